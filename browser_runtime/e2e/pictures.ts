/** Takes the pictures of the page in docs/: `npm run pictures`. */

import { execFileSync } from "node:child_process";
import { join } from "node:path";
import { PYTHON, ROOT } from "../test/python.js";
import { browserPath, ChatPage, Chromium, Verifier } from "./harness.js";

const PHONE = { width: 390, height: 780 };
const DESKTOP = { width: 900, height: 640 };
/** Pixels of a picture per pixel of the page. */
const SHARPNESS = 2;
/** Round trip in milliseconds of a link on which trees are worth showing. */
const LINK_MS = 80;
const QUESTION = "Why is the sky blue?";

const executable = browserPath();
if (!executable) throw new Error("no Chromium here: install one, or name it in OUTRIDER_CHROMIUM");
const verifier = await Verifier.start();
const browser = await Chromium.start(executable);

const taken: string[] = [];

/** Take a picture of each stage of an answer: question, cut, repair. */
async function pictures(name: string, viewport: typeof PHONE, colorScheme: "light" | "dark"): Promise<void> {
  const context = await browser.context({ viewport, colorScheme, deviceScaleFactor: SHARPNESS });
  const settings = { maxNewTokens: 200, mode: "tree", offline: "continue" };
  const chat = await ChatPage.open(context, verifier.url, settings);
  const take = async (stage: "online" | "alone" | "repaired") => {
    const path = join(ROOT, `docs/web-${name}-${colorScheme}-${stage}.png`);
    await chat.page.screenshot({ path });
    taken.push(path);
  };
  await chat.ready();
  await chat.page.fill("#delay", `${LINK_MS}`);
  await chat.ask(QUESTION);
  await chat.grown(120);
  await chat.page.waitForFunction(() => document.querySelectorAll("#tree g.accepted").length > 1);
  await take("online");
  await chat.page.click("#cut");
  await chat.alone(60);
  await take("alone");
  await chat.page.click("#cut");
  await chat.page.waitForSelector(".turn .withdrawn");
  await chat.page.waitForTimeout(150);
  await take("repaired");
  await context.close();
}

try {
  for (const scheme of ["light", "dark"] as const) {
    await pictures("phone", PHONE, scheme);
    await pictures("desktop", DESKTOP, scheme);
  }
  execFileSync(PYTHON, [join(ROOT, "browser_runtime/tools/screens.py"), "still", ...taken], { stdio: "inherit" });
} finally {
  await browser.close();
  await verifier.kill();
}
