/** The page in a real browser, against a real verifier of the default target. */

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { BUNDLE, browserPath, ChatPage, Chromium, type PageSettings, Verifier } from "./harness.js";

const QUESTION = "Why is the sky blue?";
/** Number of answers with a cut; set it higher by hand. */
const CUTS = Number(process.env.OUTRIDER_WEB_ANSWERS ?? 4);
const executable = browserPath();
const skip = executable ? false : "no Chromium here: install one, or name it in OUTRIDER_CHROMIUM";
let verifier: Verifier;
let browser: Chromium;

before(async () => {
  if (!executable) return;
  [verifier, browser] = await Promise.all([Verifier.start(), Chromium.start(executable)]);
});
after(async () => {
  await browser?.close();
  await verifier?.kill();
});

/** Copy the bundle, without a drafter in its manifest. */
function undrafted(): string {
  const folder = mkdtempSync(join(tmpdir(), "outrider-undrafted-"));
  cpSync(BUNDLE, folder, { recursive: true });
  const path = join(folder, "manifest.json");
  const manifest = JSON.parse(readFileSync(path, "utf8"));
  const widths = ["hidden_size", "sa_kv_heads", "ca_kv_heads", "head_dim", "draft_vocab_size"];
  const none = { engines: {}, drafter_hash: "", draft_ids_file: null, null_row_file: null };
  const described = { ...manifest, ...none, ...Object.fromEntries(widths.map(name => [name, 0])) };
  writeFileSync(path, JSON.stringify(described));
  return folder;
}

/** Use the page in a context of its own, closed at the end. It must log no errors and send no requests to other servers. */
async function onPage(settings: PageSettings, use: (chat: ChatPage) => Promise<void>): Promise<void> {
  const context = await browser.context();
  try {
    const chat = await ChatPage.open(context, verifier.url, settings);
    await use(chat);
    assert.deepEqual(chat.faults, []);
  } finally {
    await context.close();
  }
}

test("an answer equals plain decoding, greedy and seeded, by trees and by a stream", { skip }, async () => {
  for (const mode of ["tree", "stream"]) {
    for (const sampling of [{ temperature: 0 }, { temperature: 0.9, seed: 7 }]) {
      const wanted = await verifier.plain(QUESTION, { ...sampling, maxNewTokens: 32 });
      const settings: PageSettings = { mode, maxNewTokens: 32, temperature: sampling.temperature };
      if (sampling.seed) settings.seed = `${sampling.seed}`;
      await onPage(settings, async chat => {
        await chat.ready();
        await chat.ask(QUESTION);
        const { verified, provisional } = await chat.finished();
        assert.equal(verified, wanted, `${mode}, ${sampling.temperature}`);
        assert.equal(provisional, "");
      });
    }
  }
});

test("a killed verifier, an offline browser, a silence and the switch cut the link, and nothing is lost", {
  skip,
}, async () => {
  const maxNewTokens = 64;
  const wanted = await verifier.plain(QUESTION, { maxNewTokens });
  const cuts: Record<string, (chat: ChatPage, cut: boolean) => unknown> = {
    killed: (_, cut) => (cut ? verifier.kill() : verifier.start()),
    offline: (chat, cut) => chat.page.context().setOffline(cut),
    silent: (_, cut) => verifier.silence(cut),
    switched: chat => chat.page.click("#cut"),
  };
  for (const [name, cut] of Object.entries(cuts)) {
    await onPage({ maxNewTokens, offline: "continue" }, async chat => {
      await chat.ready();
      await chat.ask(QUESTION);
      await chat.grown(40);
      await cut(chat, true);
      await chat.alone();
      assert.match((await chat.page.textContent("#state"))!, /device writes alone/, name);
      await cut(chat, false);
      const { verified, provisional, note } = await chat.finished();
      assert.equal(verified, wanted, name);
      assert.equal(provisional, "");
      assert.match(note, /written alone/, name);
    });
  }
});

test(`${CUTS} answers are cut here and there, and all are the target's own`, { skip, timeout: 1_200_000 }, async () => {
  await onPage({ maxNewTokens: 40 }, async chat => {
    await chat.ready();
    for (let number = 0; number < CUTS; number++) {
      const question = `What comes after ${number}?`;
      const wanted = await verifier.plain(question, { maxNewTokens: 40 });
      await chat.page.click("#open-conversations");
      await chat.page.click("#new-conversation");
      await chat.page.waitForSelector("#conversations", { state: "hidden" }); // what is behind it takes no keys
      await chat.ask(question);
      await chat.grown(1 + ((number * 7) % Math.max(1, wanted.length - 8)));
      await chat.page.click("#cut");
      await chat.page.waitForTimeout(100 + ((number * 130) % 700));
      await chat.page.click("#cut");
      const { verified } = await chat.finished();
      assert.equal(verified, wanted, question);
    }
  });
});

test("an answer survives a reload in its middle", { skip }, async () => {
  const maxNewTokens = 64;
  const wanted = await verifier.plain(QUESTION, { maxNewTokens });
  await onPage({ maxNewTokens }, async chat => {
    await chat.ready();
    await chat.ask(QUESTION);
    await chat.grown(60);
    await chat.reload();
    await chat.ready();
    const { verified } = await chat.finished();
    assert.equal(verified, wanted);
    assert.deepEqual(await chat.page.locator(".turn.user").allTextContents(), [QUESTION]);
    await chat.reload();
    await chat.ready();
    const shown = await chat.page.locator(".turn.assistant").allTextContents();
    assert.deepEqual(shown, [wanted]);
  });
});

test("without network and verifier the installed page starts, and the device writes alone", { skip }, async () => {
  await onPage({ maxNewTokens: 24, offline: "continue" }, async chat => {
    await chat.ready();
    await chat.page.evaluate(() => navigator.serviceWorker.ready.then(() => null));
    await verifier.kill();
    try {
      await chat.reload();
      await chat.ready();
      await chat.ask(QUESTION);
      await chat.alone();
      assert.match((await chat.page.textContent("#state"))!, /device writes alone/);
    } finally {
      await verifier.start();
    }
    const { verified } = await chat.finished();
    assert.equal(verified, await verifier.plain(QUESTION, { maxNewTokens: 24 }));
  });
});

test("an understudy that was asked for takes over where the link is cut, and can be deleted", {
  skip,
  timeout: 600_000,
}, async () => {
  const maxNewTokens = 64;
  const wanted = await verifier.plain(QUESTION, { maxNewTokens });
  await onPage({ maxNewTokens, understudy: "cold" }, async chat => {
    await chat.ready();
    await chat.understudyHere();
    assert.ok(await chat.page.evaluate(() => caches.has("outrider-understudy")));
    await chat.ask(QUESTION);
    await chat.grown(40);
    await chat.page.click("#cut");
    await chat.understudyWrites();
    await chat.alone(30);
    await chat.page.click("#cut");
    const { verified, note } = await chat.finished();
    assert.equal(verified, wanted);
    assert.match(note, /by the understudy/);
    await chat.page.click("#open-settings");
    await chat.page.waitForSelector("#delete-understudy:not([hidden])");
    await chat.page.click("#delete-understudy");
    await chat.page.waitForSelector("#delete-understudy", { state: "hidden" });
    assert.match((await chat.page.textContent("#understudy-size"))!, /fetched once, \d+(\.\d)? MB/);
    assert.equal(await chat.page.evaluate(() => caches.has("outrider-understudy")), false);
  });
});

test("without a drafter in the bundle the understudy drafts, and writes where the link is cut", {
  skip,
  timeout: 600_000,
}, async () => {
  const bundle = undrafted();
  const other = await Verifier.start(["cloud.verifier"], ["--page-bundle", bundle]);
  const context = await browser.context();
  try {
    const wanted = await other.plain(QUESTION, { maxNewTokens: 64 });
    const chat = await ChatPage.open(context, other.url, { maxNewTokens: 64, understudy: "warm", mode: "tree" });
    await chat.ready();
    assert.match((await chat.page.textContent("#engine-note"))!, /without a drafter/);
    await chat.understudyHere();
    await chat.ask(QUESTION);
    await chat.grown(40);
    await chat.page.click("#cut");
    await chat.understudyWrites();
    await chat.alone(30);
    await chat.page.click("#cut");
    const { verified, provisional, note } = await chat.finished();
    assert.equal(verified, wanted);
    assert.equal(provisional, "");
    assert.match(note, /by the understudy/);
    assert.deepEqual(chat.faults, []);
  } finally {
    await context.close();
    await other.kill();
    rmSync(bundle, { recursive: true });
  }
});

test("nobody gets an understudy who did not ask for one", { skip }, async () => {
  await onPage({}, async chat => {
    const asked: string[] = [];
    chat.page.on("request", request => asked.push(request.url()));
    await chat.reload();
    await chat.ready();
    assert.ok(asked.length > 0 && !asked.some(url => url.includes("/understudy/")), asked.join());
  });
});

test("a broken file, a full storage and another target's bundle are said in words", { skip }, async () => {
  const broken = await browser.context({ serviceWorkers: "block" });
  await broken.route("**/bundle/draft_ids.u32", async route => {
    const response = await route.fetch();
    const body = await response.body();
    body[100] ^= 1;
    await route.fulfill({ response, body });
  });
  const chat = await ChatPage.open(broken, verifier.url);
  await chat.page.waitForFunction(() => document.getElementById("install-note")?.textContent?.includes("sha256"));
  assert.ok(await chat.page.isVisible("#download"));
  await broken.unroute("**/bundle/draft_ids.u32");
  await chat.page.click("#download");
  await chat.ready();
  await broken.close();

  const full = await browser.context();
  const devtools = await full.newCDPSession(await full.newPage());
  const { origin } = new URL(verifier.url);
  await devtools.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 2e6 });
  const small = await ChatPage.open(full, verifier.url);
  await small.ready();
  assert.match((await small.page.textContent("#install-note"))!, /storage is full/);
  await full.close();

  const other = await browser.context({ serviceWorkers: "block" });
  await other.route("**/bundle/manifest.json", async route => {
    const manifest = await (await route.fetch()).json();
    await route.fulfill({ json: { ...manifest, target_hash: "0123456789abcdef" } });
  });
  const stranger = await ChatPage.open(other, verifier.url, { maxNewTokens: 8 });
  await stranger.ready();
  await stranger.page.waitForFunction(() => document.getElementById("figures")?.textContent?.includes("target is"));
  await other.close();
});

test("a browser without SIMD instructions is told what it lacks", { skip }, async () => {
  const old = await Chromium.start(executable!, "--js-flags=--no-enable-sse4-1 --no-enable-sse4-2 --no-enable-avx");
  try {
    const chat = await ChatPage.open(await old.context(), verifier.url);
    await chat.page.waitForFunction(() => document.getElementById("install-note")?.textContent?.includes("no SIMD"));
  } finally {
    await old.close();
  }
});

test("light and dark, at every stage, an established checker finds nothing to say about accessibility", {
  skip,
}, async () => {
  const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
  for (const colorScheme of ["light", "dark"] as const) {
    const context = await browser.context({ colorScheme });
    const chat = await ChatPage.open(context, verifier.url, { maxNewTokens: 40, offline: "continue" });
    const check = async (stage: string) => {
      const wrong = await chat.page.evaluate(async source => {
        const { violations } = await new Function(`${source}; return axe.run()`)();
        return violations.map((one: { id: string; nodes: { html: string }[] }) => `${one.id}: ${one.nodes[0].html}`);
      }, axe);
      assert.deepEqual(wrong, [], `${colorScheme}, ${stage}`);
    };
    await chat.ready();
    await check("welcome");
    await chat.page.evaluate(() => document.getElementById("log")!.append(document.createElement("button")));
    await assert.rejects(check("a button without a name"), /button-name/);
    await chat.page.evaluate(() => document.querySelector("#log > button")!.remove());
    await chat.ask(QUESTION);
    await chat.grown(30);
    await chat.page.click("#cut");
    await chat.alone();
    await check("alone");
    await chat.page.click("#cut");
    await chat.finished();
    await chat.page.click("#open-settings");
    await check("settings");
    await chat.page.keyboard.press("Escape");
    await chat.page.click("#open-conversations");
    await check("conversations");
    await context.close();
  }
});

test("what is too long is said to be, and long conversations go on without their oldest turns", { skip }, async () => {
  await onPage({ maxNewTokens: 8 }, async chat => {
    await chat.ready();
    await chat.ask("word ".repeat(1190));
    const { note } = await chat.finished();
    assert.match(note, /the last message has \d+ tokens/);
    assert.match(await chat.page.inputValue("#question"), /^word word/);
    for (const question of ["one ".repeat(500), "two ".repeat(500)]) {
      await chat.ask(question);
      const answer = await chat.finished();
      assert.match(answer.note, /verified tokens/);
    }
  });
});

test("the keyboard alone asks, cuts, stops and looks around", { skip }, async () => {
  await onPage({ maxNewTokens: 200, offline: "continue" }, async chat => {
    await chat.ready();
    await chat.page.focus("#question");
    await chat.page.keyboard.type(QUESTION);
    await chat.page.keyboard.press("Enter");
    await chat.grown(20);
    await chat.page.keyboard.press("Shift+Tab");
    await chat.page.keyboard.press("Shift+Tab");
    assert.equal(await chat.page.evaluate(() => document.activeElement?.id), "cut");
    await chat.page.keyboard.press("Space");
    await chat.alone();
    assert.equal(await chat.page.getAttribute("#cut", "aria-checked"), "true");
    await chat.page.focus("#send");
    await chat.page.keyboard.press("Enter");
    const { note } = await chat.finished();
    assert.match(note, /stopped/);
    await chat.page.focus("#open-settings");
    await chat.page.keyboard.press("Enter");
    assert.equal(await chat.page.evaluate(() => document.querySelector("dialog")!.open), true);
    await chat.page.keyboard.press("Escape");
    assert.equal(await chat.page.evaluate(() => document.querySelector("dialog")!.open), false);
  });
});
