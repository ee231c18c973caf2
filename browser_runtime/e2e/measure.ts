/**
 * Measures the page in a real Chromium: `npm run measure`. Prints JSON; seconds and tokens a second, drafts in milliseconds.
 *
 * Compares trees and a stream over an emulated link (round trip LINK_MS) with a target whose steps take at least TARGET_MS.
 * Nothing else should run on the machine meanwhile.
 */

import { fileURLToPath } from "node:url";
import { browserPath, ChatPage, Chromium, type PageSettings, Verifier } from "./harness.js";

/**
 * Time is this many times slower for link and target, whose steps for large trees would take longer here than TARGET_MS. The
 * drafter's are not slowed: a step of 24 ms counts as one of 3.
 */
const DILATION = 8;
const LINK_MS = 30 * DILATION;
const TARGET_MS = 60 * DILATION;
const TOKENS = 48;
/** Nodes of the drafts that are timed. */
const NODES = 15;
const QUESTIONS = ["Why is the sky blue?", "How do I bake bread?", "Write a Python function that adds two numbers."];

/** The library for pages without a bundler. */
const LIBRARY = fileURLToPath(new URL("../../outrider", import.meta.url));

const executable = browserPath();
if (!executable) throw new Error("no Chromium here: install one, or name it in OUTRIDER_CHROMIUM");
const verifier = await Verifier.start(["benchmarks.slow_target", "--step-ms", `${TARGET_MS}`, "--engine", "torch"]);
const browser = await Chromium.start(executable);

/** Use a page in a context of its own. */
async function onPage<T>(settings: PageSettings, use: (chat: ChatPage) => Promise<T>): Promise<T> {
  const context = await browser.context();
  try {
    const chat = await ChatPage.open(context, verifier.url, settings);
    await chat.ready();
    return await use(chat);
  } finally {
    await context.close();
  }
}

/** Return tokens per second for each question, over the delayed link. */
async function rates(mode: string): Promise<number[]> {
  return onPage({ mode, maxNewTokens: TOKENS }, async chat => {
    await chat.page.fill("#delay", `${LINK_MS}`);
    const found: number[] = [];
    for (const question of QUESTIONS) {
      await chat.page.click("#open-conversations");
      await chat.page.click("#new-conversation");
      await chat.page.waitForSelector("#conversations", { state: "hidden" });
      await chat.ask(question);
      const { note } = await chat.finished();
      found.push(Number(note.match(/([\d.]+) a second/)?.[1]));
    }
    return found;
  });
}

/** Return the time of the first paint, and of an eight-wide step after 128 tokens, measured by the worker. */
async function start(): Promise<Record<string, number | string | null>> {
  return onPage({}, async chat => {
    return chat.page.evaluate(() => {
      const [paint] = performance.getEntriesByName("first-paint");
      const { step = "" } = document.documentElement.dataset;
      const engine = document.getElementById("engine-note")!.textContent;
      return { firstPaint: paint.startTime / 1000, eightWideStep: Number(step) / 1000, engine };
    });
  });
}

/** Return the seconds from cutting the link to the first offline word, five times. */
async function alone(): Promise<number[]> {
  return onPage({ maxNewTokens: 400, mode: "tree", offline: "continue" }, async chat => {
    const found: number[] = [];
    for (let round = 0; round < 5; round++) {
      if (round === 0) await chat.ask("Tell me a long story about a lighthouse.");
      await chat.page.waitForTimeout(1500);
      const seconds = await chat.page.evaluate(async () => {
        const answer = [...document.querySelectorAll(".turn.assistant")].at(-1)!;
        const provisional = answer.querySelector(".provisional")!;
        const began = performance.now();
        document.getElementById("cut")!.click();
        while (!provisional.textContent) await new Promise(resolve => setTimeout(resolve, 1));
        return (performance.now() - began) / 1000;
      });
      found.push(seconds);
      await chat.page.click("#cut");
    }
    return found;
  });
}

/**
 * Return the worker's milliseconds for a tree of NODES nodes, drafted from scratch during an answer, and the engine's steps
 * for it.
 */
async function drafts(): Promise<Record<string, number>> {
  const context = await browser.context({ serviceWorkers: "block" });
  const { page } = await ChatPage.open(context, verifier.url);
  await page.route("**/library/**", route => {
    const path = LIBRARY + new URL(route.request().url()).pathname.slice("/library".length);
    return route.fulfill({ path, headers: { "cross-origin-embedder-policy": "require-corp" } });
  });
  const found = await page.evaluate(
    async ([nodes, question, at]) => {
      const library: typeof import("../src/index.js") = await import(`${at}`);
      const bundle = await new library.BundleStore().open("/bundle/");
      const drafter = await library.startDrafter(bundle, { wasmUrl: "/library/ort/", threads: 1 });
      const timed: { seconds: number; steps: number }[] = [];
      const draft = drafter.draft.bind(drafter);
      drafter.draft = async (...given) => {
        const drafted = await draft(...given);
        const { tree, ahead, steps } = drafted.result;
        if (tree.size === nodes && !ahead) timed.push({ seconds: drafted.seconds, steps });
        return drafted;
      };
      const shape = library.treeShape({ nodes: Number(nodes) });
      const runtime = new library.EdgeRuntime(bundle, drafter, location.origin, {
        mode: "tree",
        shape,
        shaping: false,
        ahead: false,
      });
      for await (const _ of runtime.generate(`${question}`, { maxNewTokens: 100 }));
      await runtime.close();
      return timed;
    },
    [NODES, QUESTIONS[0], "/library/outrider.js"],
  );
  await context.close();
  const milliseconds = found.map(({ seconds }) => 1000 * seconds);
  return {
    drafts: found.length,
    steps: median(found.map(({ steps }) => steps)),
    median: median(milliseconds),
    fastest: Math.min(...milliseconds),
  };
}

const median = (values: number[]) => values.sort((one, other) => one - other)[values.length >> 1];
try {
  const [started, drafted, firstAlone] = [await start(), await drafts(), await alone()];
  const [tree, stream] = [await rates("tree"), await rates("stream")];
  const ratio = median(tree) / median(stream);
  console.log(
    JSON.stringify(
      {
        ...started,
        drafted,
        firstAlone,
        dilation: DILATION,
        linkMs: LINK_MS,
        targetMs: TARGET_MS,
        tree,
        stream,
        ratio,
      },
      null,
      1,
    ),
  );
} finally {
  await browser.close();
  await verifier.kill();
}
