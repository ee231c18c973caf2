/** The page's service worker: an open page gets the files of its own version, even if another one is installed meanwhile. */

import assert from "node:assert/strict";
import { test } from "node:test";

type Listener = (event: unknown) => void;
type Kept = Map<string, string>;

const SCOPE = "https://verifier.example/";
const scope = globalThis as unknown as Record<string, unknown>;

/** Caches of a browser, and the version of the files that the server has now. */
class Origin {
  version = "";
  skipped = 0;
  readonly caches = new Map<string, Kept>();

  open(name: string) {
    const kept = this.caches.get(name) ?? new Map<string, string>();
    this.caches.set(name, kept);
    return {
      addAll: (requests: Request[]) => {
        for (const { url } of requests) kept.set(url, this.version);
        return Promise.resolve();
      },
      match: (request: Request | string) =>
        Promise.resolve(kept.get(typeof request === "string" ? request : request.url)),
    };
  }

  /** Return the listeners of a version's worker. */
  async worker(version: string): Promise<Map<string, Listener>> {
    const listeners = new Map<string, Listener>();
    Object.assign(scope, {
      SHELL_FILES: ["", "app.js", "chunk-late.js"],
      SHELL_VERSION: version,
      registration: { scope: SCOPE },
      clients: { claim: () => Promise.resolve() },
      skipWaiting: () => Promise.resolve((this.skipped += 1)),
      addEventListener: (type: string, listen: Listener) => listeners.set(type, listen),
      caches: {
        open: (name: string) => Promise.resolve(this.open(name)),
        keys: () => Promise.resolve([...this.caches.keys()]),
        delete: (name: string) => Promise.resolve(this.caches.delete(name)),
      },
    });
    await import(`../page/sw.js?${version}`);
    return listeners;
  }
}

async function waited(worker: Map<string, Listener>, type: string): Promise<void> {
  let done: Promise<unknown> = Promise.resolve();
  worker.get(type)!({ waitUntil: (promise: Promise<unknown>) => (done = promise) });
  await done;
}

async function fetched(worker: Map<string, Listener>, path: string): Promise<unknown> {
  let answer: Promise<unknown> = Promise.resolve("network");
  const request = { url: SCOPE + path, method: "GET", mode: "no-cors" };
  worker.get("fetch")!({ request, respondWith: (promise: Promise<unknown>) => (answer = promise) });
  return await answer;
}

test("a newer version waits until no page of the older one is open", async () => {
  const origin = new Origin();
  origin.version = "old";
  const old = await origin.worker("old");
  await waited(old, "install");
  await waited(old, "activate");
  assert.equal(await fetched(old, "app.js"), "old");
  origin.version = "new";
  const young = await origin.worker("new");
  await waited(young, "install");
  assert.equal(origin.skipped, 0);
  assert.equal(await fetched(old, "chunk-late.js"), "old");
  await waited(young, "activate"); // the last page of the old version is closed
  assert.equal(await fetched(young, "chunk-late.js"), "new");
  assert.deepEqual([...origin.caches.keys()], ["outrider-page-new"]);
  assert.equal(await fetched(young, "v1/models"), "network");
});
