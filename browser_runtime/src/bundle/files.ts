/** Files of a bundle: fetched, checked, and kept in the browser's own storage, in pieces under the sha-256 of the whole. */

import { BundleError, type FileEntry } from "./manifest.js";

/** Bytes that are there, and that there are to be. */
export type Progress = (done: number, all: number) => void;

/** The address under which everything is kept; nothing is requested there. */
const KEY = "https://bundle.invalid/";
/** Bytes of a piece. The last one of a file may be shorter. */
const PIECE = 4 << 20;
/** Failures in a row, without a new byte between them, after which a download ends. */
const FAILURES = 7;
const PAUSE_MS = 100;
/** A connection that brings nothing for so long counts as cut. */
const SILENCE_MS = 15_000;
/** Of requests that may succeed later: a time-out, too many at once. */
const PASSING = new Set([408, 429]);

/** Keep something under a name. "" or, in words for people, why it is not kept. */
export async function keep(cache: Cache | null, name: string, data: BodyInit): Promise<string> {
  try {
    await cache?.put(KEY + name, new Response(data));
    return "";
  } catch (error) {
    const full = error instanceof DOMException && error.name === "QuotaExceededError";
    return full ? "this browser's storage is full" : String(error);
  }
}

/** The text that is kept under a name, or null. */
export async function keptText(cache: Cache | null, name: string): Promise<string | null> {
  return (await (await cache?.match(KEY + name))?.text()) ?? null;
}

/** Forget what lies under other names, and other files' pieces. */
export async function keepOnly(cache: Cache, names: readonly string[]): Promise<void> {
  const wanted = new Set(names);
  for (const { url } of await cache.keys()) {
    if (!wanted.has(url.slice(KEY.length).split("/")[0])) await cache.delete(url);
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
  try {
    const response = await fetch(url, { cache: "no-cache", signal });
    if (response.status >= 500) return null;
    if (response.ok) return await response.text();
    throw new BundleError(`${url.href} gives HTTP ${response.status}; is a bundle served there?`);
  } catch (error) {
    signal?.throwIfAborted();
    if (error instanceof BundleError) throw error;
    return null;
  }
}

/** A file that is kept and whole, or null. */
export async function kept(cache: Cache | null, entry: FileEntry): Promise<Uint8Array<ArrayBuffer> | null> {
  const data = new Uint8Array(entry.bytes);
  const whole = (await readPieces(cache, entry, data)) === entry.bytes && (await sha256(data)) === entry.sha256;
  return whole ? data : null;
}

/** In hexadecimal digits. */
export async function sha256(data: Uint8Array<ArrayBuffer>): Promise<string> {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
  return Array.from(digest, byte => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * The file at `url`, checked. What `cache` has of it is not fetched again.
 *
 * keepPiece: keeps what comes, under names of this file, so that a later call continues an interrupted one. progress: gets
 * the bytes that are there. Throws BundleError.
 */
export async function fetchFile(
  cache: Cache | null,
  url: URL,
  entry: FileEntry,
  keepPiece: (name: string, data: Uint8Array<ArrayBuffer>) => Promise<void>,
  progress: (bytes: number) => void,
  signal?: AbortSignal,
): Promise<Uint8Array<ArrayBuffer>> {
  const data = new Uint8Array(entry.bytes);
  const arrived = async (begin: number, end: number) => {
    for (let piece = begin - (begin % PIECE); piece < end; piece += PIECE) {
      const pieceEnd = Math.min(piece + PIECE, data.length);
      if (pieceEnd <= end) await keepPiece(pieceName(entry, piece), data.subarray(piece, pieceEnd));
    }
    progress(end);
  };
  // a piece that was kept may be of another version under this manifest: then all of it is fetched once more
  for (const begin of new Set([await readPieces(cache, entry, data), 0])) {
    await receive(url, data, begin, arrived, signal);
    if ((await sha256(data)) === entry.sha256) return data;
  }
  throw new BundleError(`${url.href} differs from its sha256 in the manifest; copy the bundle to the server again`);
}

function pieceName({ sha256 }: FileEntry, begin: number): string {
  return `${sha256}/${begin}`;
}

/** Fill `data` with the pieces of a file that are kept, up to the first missing one; how many bytes that are. */
async function readPieces(cache: Cache | null, entry: FileEntry, data: Uint8Array): Promise<number> {
  let at = 0;
  while (at < data.length) {
    const found = await cache?.match(KEY + pieceName(entry, at));
    const piece = found && new Uint8Array(await found.arrayBuffer());
    if (piece?.length !== Math.min(PIECE, data.length - at)) break;
    data.set(piece, at);
    at += piece.length;
  }
  return at;
}

/**
 * Fill `data` from `end` on with the bytes at `url`, through as many cuts as bring something, or with fewer if there are
 * fewer. Throws BundleError.
 */
async function receive(
  url: URL,
  data: Uint8Array,
  end: number,
  arrived: (begin: number, end: number) => Promise<void>,
  signal?: AbortSignal,
): Promise<void> {
  let [furthest, failures] = [end, 0];
  while (end < data.length) {
    signal?.throwIfAborted();
    try {
      for await (const { begin, chunk } of chunksOf(url, end, signal)) {
        end = begin + chunk.length;
        if (end > data.length) throw new BundleError(`${url.href} has more than the manifest's ${data.length} bytes`);
        data.set(chunk, begin);
        await arrived(begin, end);
      }
      return;
    } catch (error) {
      signal?.throwIfAborted();
      if (error instanceof BundleError) throw error;
      failures = end > furthest ? 0 : failures + 1;
      furthest = Math.max(furthest, end);
      if (failures === FAILURES) {
        const why = error instanceof Error ? error.message : error;
        throw new BundleError(`${url.href} cannot be fetched: ${why}; try again to continue`);
      }
    }
    await new Promise<unknown>(resolve => {
      setTimeout(resolve, PAUSE_MS << failures);
      signal?.addEventListener("abort", resolve, { once: true });
    });
  }
}

/** What one request brings of the file at `url` from `from` on, or all of it if the server ignores ranges. */
async function* chunksOf(
  url: URL,
  from: number,
  signal?: AbortSignal,
): AsyncGenerator<{ begin: number; chunk: Uint8Array }> {
  const ending = new AbortController();
  const soon = <Result>(work: Promise<Result>) => {
    const timer = setTimeout(() => ending.abort(new Error(`nothing came for ${SILENCE_MS / 1000} s`)), SILENCE_MS);
    return work.finally(() => clearTimeout(timer));
  };
  try {
    const headers: HeadersInit = from ? { Range: `bytes=${from}-` } : {};
    const either = AbortSignal.any(signal ? [signal, ending.signal] : [ending.signal]);
    const response = await soon(fetch(url, { headers, cache: "no-store", signal: either }));
    const { status, body } = response;
    if (status === 416 && from) return yield* chunksOf(url, 0, signal);
    if (status >= 400 && status < 500 && !PASSING.has(status)) {
      throw new BundleError(`${url.href} gives HTTP ${status}; is a bundle served there?`);
    }
    if (!response.ok || !body) throw new Error(`HTTP ${status}`);
    const range = response.headers.get("Content-Range") ?? `bytes ${from}-`; // hidden from pages of other origins
    if (status === 206 && !range.startsWith(`bytes ${from}-`)) throw new Error("the server sent another range");
    let begin = status === 206 ? from : 0;
    for (const reader = body.getReader(); ; ) {
      const { done, value: chunk } = await soon(reader.read());
      if (done) return;
      yield { begin, chunk };
      begin += chunk.length;
    }
  } finally {
    ending.abort(); // what is still on its way is not wanted
  }
}
