/** The service worker: the page starts without a network. `BundleStore` keeps the bundle. */

/** Both are set by the build. */
declare const SHELL_FILES: string[];
declare const SHELL_VERSION: string;

interface Extendable extends Event {
  waitUntil(done: Promise<unknown>): void;
}
interface Fetching extends Extendable {
  request: Request;
  respondWith(response: Promise<Response>): void;
}

const worker = globalThis as unknown as {
  registration: { scope: string };
  clients: { claim(): Promise<void> };
  addEventListener(type: string, listen: (event: never) => void): void;
};
const PREFIX = "outrider-page-";
const NAME = PREFIX + SHELL_VERSION;

async function install(): Promise<void> {
  const cache = await caches.open(NAME);
  await cache.addAll(
    SHELL_FILES.map(name => new Request(new URL(name, worker.registration.scope), { cache: "reload" })),
  );
}

async function activate(): Promise<void> {
  const old = (await caches.keys()).filter(name => name.startsWith(PREFIX) && name !== NAME);
  await Promise.all(old.map(name => caches.delete(name)));
  await worker.clients.claim();
}

/**
 * Answer from the kept files, which all have one version. A newer version is fetched beside it and takes over once no page
 * of this one is open, as an open page may still load parts of itself.
 */
async function answer(request: Request): Promise<Response> {
  const cache = await caches.open(NAME);
  const kept = await cache.match(request.mode === "navigate" ? worker.registration.scope : request);
  return kept ?? fetch(request);
}

worker.addEventListener("install", (event: Extendable) => event.waitUntil(install()));
worker.addEventListener("activate", (event: Extendable) => event.waitUntil(activate()));
worker.addEventListener("fetch", (event: Fetching) => {
  const { request } = event;
  const path = request.url.startsWith(worker.registration.scope)
    ? request.url.slice(worker.registration.scope.length)
    : null;
  const shell = request.mode === "navigate" ? path === "" : SHELL_FILES.includes(path ?? "?");
  if (request.method === "GET" && shell) event.respondWith(answer(request));
});
