/** The page with a second model, of 152k tokens, if OUTRIDER_SECOND_MODEL names its file (tests/second.py). */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { join } from "node:path";
import { test } from "node:test";
import { PYTHON, ROOT } from "../test/python.js";
import { browserPath, ChatPage, Chromium, Verifier } from "./harness.js";

const { OUTRIDER_SECOND_MODEL: FILE, OUTRIDER_SECOND_PAIR: PAIR = join(ROOT, "build/second") } = process.env;
/** Answers long enough for a cut in their middle. */
const SETTINGS = { maxNewTokens: 64, offline: "continue" };
const executable = browserPath();
const skip = executable && FILE ? false : "no Chromium here, or OUTRIDER_SECOND_MODEL names no file";

test("answers of a second model equal plain decoding, in trees, as a stream and through a cut", {
  skip,
  timeout: 3_600_000,
}, async () => {
  execFileSync(PYTHON, ["-m", "tests.second"], { cwd: ROOT, env: { ...process.env, PYTHONPATH: ROOT } });
  const flags = ["--model", FILE!, "--drafter", join(PAIR, "drafter"), "--page-bundle", join(PAIR, "bundle")];
  const [verifier, browser] = await Promise.all([Verifier.start(undefined, flags), Chromium.start(executable!)]);
  try {
    for (const mode of ["tree", "stream"]) {
      const chat = await ChatPage.open(await browser.context(), verifier.url, { mode, ...SETTINGS });
      await chat.ready();
      for (const question of ["What is a hash table?", "Write hello world in Rust."]) {
        const wanted = await verifier.plain(question, SETTINGS);
        await chat.ask(question);
        await chat.grown(4);
        await chat.page.click("#cut");
        await chat.alone();
        await chat.page.click("#cut");
        const { verified, provisional, note } = await chat.finished();
        assert.equal(verified, wanted, `${mode}, ${question}`);
        assert.equal(provisional, "");
        assert.match(note, /written alone/);
        await chat.page.click("#open-conversations");
        await chat.page.click("#new-conversation");
        await chat.page.waitForSelector("#conversations", { state: "hidden" });
      }
      assert.deepEqual(chat.faults, []);
    }
  } finally {
    await browser.close();
    await verifier.kill();
  }
});
