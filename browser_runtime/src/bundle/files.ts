/** Files of a bundle: fetched, checked, and kept in the browser's own storage under the sha-256 of their content. */

import { BundleError, type FileEntry } from "./manifest.js";

/** Bytes that are there, and that there are to be. */
export type Progress = (done: number, all: number) => void;

/** The address under which a file lies; it is never asked for. */
export const KEY = "https://bundle.invalid/";

/** Keep a file under its key. "" or, in words for people, why it is not kept. */
export async function keep(cache: Cache | null, key: string, data: BodyInit): Promise<string> {
  try {
    await cache?.put(KEY + key, new Response(data));
    return "";
  } catch (error) {
    const full = error instanceof DOMException && error.name === "QuotaExceededError";
    return full ? "this browser's storage is full" : String(error);
  }
}

/** The browser's storage of this name; null if pages like this one have none. */
export async function openCache(name: string): Promise<Cache | null> {
  try {
    return (await globalThis.caches?.open(name)) ?? null;
  } catch {
    return null; // storage is switched off
  }
}

/** The text at `url`, or null if nothing answers. Throws BundleError if something else does. */
export async function fetchText(url: URL, signal?: AbortSignal): Promise<string | null> {
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

/** The `size` bytes at `url`. Throws BundleError if there are others, or none. */
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

/** A file that is kept and whole, or null. */
export async function kept(cache: Cache | null, entry: FileEntry): Promise<Uint8Array<ArrayBuffer> | null> {
  const found = await cache?.match(KEY + entry.sha256);
  if (!found) return null;
  const data = new Uint8Array(await found.arrayBuffer());
  return (await sha256(data)) === entry.sha256 ? data : null;
}

/** In hexadecimal digits. */
export async function sha256(data: Uint8Array<ArrayBuffer>): Promise<string> {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(digest, byte => byte.toString(16).padStart(2, "0")).join("");
}

/** The file at `url`, checked. Throws BundleError. */
export async function fetchFile(
  url: URL,
  entry: FileEntry,
  progress: (bytes: number) => void,
  signal?: AbortSignal,
): Promise<Uint8Array<ArrayBuffer>> {
  const data = await fetchBytes(url, entry.bytes, progress, signal);
  if ((await sha256(data)) !== entry.sha256) {
    throw new BundleError(`${url.href} differs from its sha256 in the manifest; copy the bundle to the server again`);
  }
  return data;
}
