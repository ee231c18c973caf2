/**
 * Records README's moving pictures of a cut, docs/cut-light.webp and docs/cut-dark.webp: `npm run record`.
 *
 * It shows the real page in a real Chromium against a real verifier of the default target: a question is asked, the page's
 * own switch cuts the link, drafter and understudy write offline, the link comes back and the text is repaired. The picture
 * plays in real time. Both have the same question, but their cuts may differ.
 */

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { PYTHON, ROOT } from "../test/python.js";
import { browserPath, ChatPage, Chromium, Verifier } from "./harness.js";

const SIZE = { width: 800, height: 600 };
/** Pixels of the picture per pixel of the page, so that it is sharp on small screens too. */
const SHARPNESS = 1.5;
/** Least milliseconds between two pictures. */
const PAUSE_MS = 150;
/** Milliseconds for which the understudy writes. */
const ALONE_MS = 2000;
/** Round trip in milliseconds of a link on which the trees are worth showing. */
const LINK_MS = 80;
const QUESTION = "Why is the sky blue?";
const SETTINGS = { maxNewTokens: 80, mode: "tree", understudy: "cold" };

const executable = browserPath();
if (!executable) throw new Error("no Chromium here: install one, or name it in OUTRIDER_CHROMIUM");
const verifier = await Verifier.start();
const browser = await Chromium.start(executable, `--force-device-scale-factor=${SHARPNESS}`);

/** Save pictures of the page into `folder` while `play` runs, named by their milliseconds. */
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
