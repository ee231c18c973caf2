/** Takes the pictures of the page in docs/: `npm run pictures`. */

import { fileURLToPath } from "node:url";
import { browserPath, ChatPage, Chromium, Verifier } from "./harness.js";

const DOCS = fileURLToPath(new URL("../../../../docs/", import.meta.url));
const PHONE = { width: 390, height: 780 };
const DESKTOP = { width: 900, height: 640 };
const QUESTION = "Why is the sky blue?";

const executable = browserPath();
if (!executable) throw new Error("no Chromium here: install one, or name it in OUTRIDER_CHROMIUM");
const verifier = await Verifier.start();
const browser = await Chromium.start(executable);

type Size = typeof PHONE;
type Scheme = "light" | "dark";

/** A picture of an answer on its way, once `until` has happened. */
async function picture(name: string, viewport: Size, colorScheme: Scheme, until: (chat: ChatPage) => Promise<unknown>) {
  const context = await browser.context({ viewport, colorScheme });
  const settings = { maxNewTokens: 200, mode: "tree", offline: "continue" };
  const chat = await ChatPage.open(context, verifier.url, settings);
  await chat.ready();
  await chat.ask(QUESTION);
  await chat.grown(120);
  await until(chat);
  await chat.page.screenshot({ path: `${DOCS}web-${name}.png` });
  await context.close();
}

/** Cut, and so much is written alone. */
async function cut(chat: ChatPage): Promise<void> {
  await chat.page.click("#cut");
  await chat.alone(60);
}

async function repaired(chat: ChatPage): Promise<void> {
  await cut(chat);
  await chat.page.click("#cut");
  await chat.page.waitForSelector(".turn .withdrawn");
  await chat.page.waitForTimeout(150);
}

try {
  await picture("online", PHONE, "light", chat => chat.page.waitForSelector("#tree g.accepted"));
  await picture("alone", PHONE, "dark", cut);
  await picture("repaired", DESKTOP, "light", repaired);
  await picture("dark", DESKTOP, "dark", chat => chat.page.waitForSelector("#tree g.accepted"));
} finally {
  await browser.close();
  await verifier.kill();
}
