/**
 * Records README's moving pictures of a cut, docs/cut-light.webp and docs/cut-dark.webp: `npm run record`.
 *
 * The page as it is, in a real Chromium against a real verifier of the default target: a question is asked, the page's own
 * switch cuts the link, drafter and understudy write alone, the link comes back and the text is put right. The picture
 * plays in real time. The question is the same in both, the cut comes when it comes.
 */

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { PYTHON, ROOT } from "../test/python.js";
import { browserPath, ChatPage, Chromium, Verifier } from "./harness.js";

const SIZE = { width: 800, height: 600 };
/** Pixels of the picture for one of the page, so that it is sharp on small screens too. */
const SHARPNESS = 1.5;
/** Milliseconds between two pictures at least. */
const PAUSE_MS = 150;
/** Milliseconds for which the understudy writes. */
const ALONE_MS = 2000;
/** A link on which the trees are worth seeing: milliseconds there and back. */
const LINK_MS = 80;
const QUESTION = "Why is the sky blue?";
const SETTINGS = { maxNewTokens: 80, mode: "tree", understudy: "cold" };

const executable = browserPath();
if (!executable) throw new Error("no Chromium here: install one, or name it in OUTRIDER_CHROMIUM");
const verifier = await Verifier.start();
const browser = await Chromium.start(executable, `--force-device-scale-factor=${SHARPNESS}`);

/** Writes what is seen while `play` runs into `folder`, named by its milliseconds. */
async function filmed(page: Page, folder: string, play: () => Promise<void>): Promise<void> {
  const devtools = await page.context().newCDPSession(page);
  let began = 0;
  devtools.on("Page.screencastFrame", ({ data, metadata, sessionId }) => {
    const seen = 1000 * metadata.timestamp!;
    began ||= seen;
    const name = `${Math.round(seen - began)}.png`;
    writeFileSync(join(folder, name), Buffer.from(data, "base64"));
    // the next one comes once this one is acknowledged
    setTimeout(() => devtools.send("Page.screencastFrameAck", { sessionId }).catch(() => {}), PAUSE_MS);
  });
  const [maxWidth, maxHeight] = [SHARPNESS * SIZE.width, SHARPNESS * SIZE.height];
  await devtools.send("Page.startScreencast", { format: "png", maxWidth, maxHeight });
  await play();
  await devtools.send("Page.stopScreencast");
}

async function record(colorScheme: "light" | "dark"): Promise<void> {
  const folder = mkdtempSync(join(tmpdir(), "outrider-film-"));
  const context = await browser.context({ viewport: SIZE, colorScheme, deviceScaleFactor: SHARPNESS });
  try {
    const chat = await ChatPage.open(context, verifier.url, SETTINGS);
    await chat.ready();
    await chat.understudyHere();
    await chat.page.fill("#delay", `${LINK_MS}`);
    await chat.page.focus("#question");
    await filmed(chat.page, folder, async () => {
      await chat.ask(QUESTION);
      await chat.grown(90);
      await chat.page.click("#cut");
      await chat.understudyWrites();
      await chat.page.waitForTimeout(ALONE_MS);
      await chat.page.click("#cut");
      await chat.finished();
      await chat.page.waitForTimeout(PAUSE_MS);
    });
    const output = join(ROOT, `docs/cut-${colorScheme}.webp`);
    const screens = join(ROOT, "browser_runtime/tools/screens.py");
    execFileSync(PYTHON, [screens, "moving", folder, output], { stdio: "inherit" });
  } finally {
    await context.close();
    rmSync(folder, { recursive: true });
  }
}

try {
  await record("light");
  await record("dark");
} finally {
  await browser.close();
  await verifier.kill();
}
