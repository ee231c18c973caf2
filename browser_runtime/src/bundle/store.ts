/**
 * Bundles in the browser's own storage: fetched once, checked, kept under their sha-256, deletable.
 *
 * Files lie in a Cache under the hash of their content, so what two versions share is fetched once, an interrupted download
 * goes on where it was, and a broken file is fetched again. Without a secure context there is no storage: nothing is opened.
 */

import { Bundle } from "./bundle.js";
import { BundleError, type FileEntry, MANIFEST, type Manifest, neededFiles, parseManifest } from "./manifest.js";

/** Bytes of the bundle that are there, and that there are to be. */
export type Progress = (done: number, all: number) => void;

/** The address under which a file lies; it is never asked for. */
const KEY = "https://bundle.invalid/";

export class BundleStore {
  /** Why the last bundle opened is not kept, so that it will be fetched again; "" where it is. */
  notKept = "";

  /** name: of the Cache. */
  constructor(private readonly name = "outrider-bundle") {}

  /**
   * The bundle at `url`, a folder: what of it is not kept yet is fetched. Where nothing answers there, the kept one.
   *
   * Throws BundleError: it cannot be fetched and none is kept, or a file differs from its sha-256.
   */
  async open(url: string, progress: Progress = () => {}, signal?: AbortSignal): Promise<Bundle> {
    if (!globalThis.crypto?.subtle) {
      throw new BundleError("this page cannot check files: open it over https, or on this machine as localhost");
    }
    const cache = await this.cache();
    const base = new URL(url.endsWith("/") ? url : `${url}/`, globalThis.location?.href);
    const text = (await fetchText(new URL(MANIFEST, base), signal)) ?? (await keptText(cache));
    if (text === null) throw new BundleError(`no bundle can be fetched from ${base.href}, and none is kept here`);
    const manifest = parseManifest(text);
    const names = neededFiles(manifest);
    const all = names.reduce((sum, name) => sum + manifest.files[name].bytes, 0);
    const files = new Map<string, Uint8Array<ArrayBuffer>>();
    this.notKept = cache ? "" : "this browser has no storage for pages like this one";
    let done = 0;
    for (const name of names) {
      const entry = manifest.files[name];
      const before = done;
      const tell = (bytes: number) => progress(before + bytes, all);
      files.set(
        name,
        (await kept(cache, entry)) ?? (await this.fetchFile(cache, new URL(name, base), entry, tell, signal)),
      );
      done += entry.bytes;
      progress(done, all);
    }
    await this.settle(cache, text, manifest);
    return Bundle.open(manifest, async name => files.get(name)!);
  }

  /** The manifest that is kept, or null. */
  async manifest(): Promise<Manifest | null> {
    const text = await keptText(await this.cache());
    return text === null ? null : parseManifest(text);
  }

  /** Delete all that is kept. */
  async delete(): Promise<void> {
    await globalThis.caches?.delete(this.name);
  }

  private async cache(): Promise<Cache | null> {
    try {
      return (await globalThis.caches?.open(this.name)) ?? null;
    } catch {
      return null; // storage is switched off
    }
  }

  private async fetchFile(
    cache: Cache | null,
    url: URL,
    entry: FileEntry,
    progress: (bytes: number) => void,
    signal?: AbortSignal,
  ): Promise<Uint8Array<ArrayBuffer>> {
    const data = await fetchBytes(url, entry.bytes, progress, signal);
    if ((await sha256(data)) !== entry.sha256) {
      throw new BundleError(`${url.href} differs from its sha256 in the manifest; copy the bundle to the server again`);
    }
    await this.keep(cache, entry.sha256, data);
    return data;
  }

  private async keep(cache: Cache | null, key: string, data: BodyInit): Promise<void> {
    try {
      await cache?.put(KEY + key, new Response(data));
    } catch (error) {
      const full = error instanceof DOMException && error.name === "QuotaExceededError";
      this.notKept = full ? "this browser's storage is full" : String(error);
    }
  }

  /** All of it is there: remember the version, and forget what only older ones need. */
  private async settle(cache: Cache | null, text: string, manifest: Manifest): Promise<void> {
    if (!cache || this.notKept) return;
    await this.keep(cache, MANIFEST, text);
    const wanted = new Set([MANIFEST, ...neededFiles(manifest).map(name => manifest.files[name].sha256)]);
    for (const { url } of await cache.keys()) if (!wanted.has(url.slice(KEY.length))) await cache.delete(url);
  }
}

/** The text at `url`, or null where nothing answers. Throws BundleError where something else does. */
async function fetchText(url: URL, signal?: AbortSignal): Promise<string | null> {
  let response: Response;
  try {
    response = await fetch(url, { cache: "no-cache", signal });
  } catch {
    signal?.throwIfAborted();
    return null;
  }
  if (response.status >= 500) return null;
  if (!response.ok) throw new BundleError(`${url.href} gives HTTP ${response.status}; is a bundle served there?`);
  return response.text();
}

async function fetchBytes(url: URL, size: number, progress: (bytes: number) => void, signal?: AbortSignal) {
  const response = await fetch(url, { signal }).catch(error => {
    signal?.throwIfAborted();
    throw new BundleError(`${url.href} cannot be fetched: ${error.message}; go on by trying again`);
  });
  if (!response.ok || !response.body) throw new BundleError(`${url.href} gives HTTP ${response.status}`);
  const data = new Uint8Array(size);
  let at = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read().catch(error => {
      signal?.throwIfAborted();
      throw new BundleError(`${url.href} ended after ${at} of ${size} bytes: ${error.message}; go on by trying again`);
    });
    if (done) break;
    if (at + value.length > size) throw new BundleError(`${url.href} has more than the manifest's ${size} bytes`);
    data.set(value, at);
    at += value.length;
    progress(at);
  }
  if (at !== size) throw new BundleError(`${url.href} has ${at} bytes instead of ${size}; copy it to the server again`);
  return data;
}

async function keptText(cache: Cache | null): Promise<string | null> {
  return (await (await cache?.match(KEY + MANIFEST))?.text()) ?? null;
}

/** A file that is kept and whole, or null. */
async function kept(cache: Cache | null, entry: FileEntry): Promise<Uint8Array<ArrayBuffer> | null> {
  const found = await cache?.match(KEY + entry.sha256);
  if (!found) return null;
  const data = new Uint8Array(await found.arrayBuffer());
  return (await sha256(data)) === entry.sha256 ? data : null;
}

async function sha256(data: Uint8Array<ArrayBuffer>): Promise<string> {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(digest, byte => byte.toString(16).padStart(2, "0")).join("");
}
