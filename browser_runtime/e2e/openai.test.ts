/** The JavaScript client of the OpenAI API against both endpoints, in Node and from a page of another origin. */

import assert from "node:assert/strict";
import { type ChildProcess, spawn } from "node:child_process";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { PYTHON, ROOT } from "../test/python.js";
import { BUNDLE, browserPath, Chromium, Verifier } from "./harness.js";
import { cases } from "./openaiCases.js";

const executable = browserPath();
let page: Server;
let verifier: Verifier;
let device: ChildProcess;
let endpoints: string[];

/** Serve a page with only the client. */
async function servedPage(): Promise<Server> {
  const entryPoints = [fileURLToPath(new URL("openaiCases.js", import.meta.url))];
  const bundled = await build({ entryPoints, bundle: true, format: "iife", globalName: "openai", write: false });
  const html = `<!doctype html><script>${bundled.outputFiles[0].text.replaceAll("</script", "<\\/script")}</script>`;
  const server = createServer((_request, response) => response.setHeader("content-type", "text/html").end(html));
  await new Promise<void>(resolve => server.listen(0, "127.0.0.1", resolve));
  return server;
}

function originOf(server: Server): string {
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

before(async () => {
  page = await servedPage();
  const allowed = ["--allow-origin", originOf(page)];
  verifier = await Verifier.start(["cloud.verifier"], allowed);
  const flags = [
    "--bundle",
    BUNDLE,
    "--server",
    new URL(verifier.url).host,
    "--port",
    "0",
    "--threads",
    "1",
    ...allowed,
  ];
  device = spawn(PYTHON, ["-m", "outrider", "serve", ...flags], { cwd: ROOT, stdio: ["ignore", "ignore", "pipe"] });
  for await (const line of createInterface({ input: device.stderr! })) {
    const [url] = line.match(/http:\S+/) ?? [];
    if (!url) continue;
    endpoints = [`${verifier.url}v1`, url];
    break;
  }
  device.stderr!.resume();
});
after(async () => {
  device?.kill();
  page?.close();
  await verifier?.kill();
});

test("the client gets the same texts of both endpoints in Node", async () => {
  const [first, second] = [await cases(endpoints[0]), await cases(endpoints[1])];
  assert.deepEqual(second, first);
});

const skip = executable ? false : "no Chromium here: install one, or name it in OUTRIDER_CHROMIUM";
test("and in a browser, from a page of another origin", { skip }, async () => {
  const browser = await Chromium.start(executable!);
  try {
    const opened = await (await browser.context()).newPage();
    await opened.goto(originOf(page));
    const texts: string[][] = [];
    for (const url of endpoints)
      texts.push((await opened.evaluate(`openai.cases(${JSON.stringify(url)})`)) as string[]);
    assert.deepEqual(texts[1], texts[0]);
    assert.ok(texts[0].length > 10 && texts[0][0]);
  } finally {
    await browser.close();
  }
});
