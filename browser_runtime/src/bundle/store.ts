/**
 * Bundles in the browser's own storage: fetched once, checked, kept under their sha-256, deletable.
 *
 * Files lie in a Cache under the hash of their content, so what two versions share is fetched once, an interrupted download
 * is continued, and a broken file is fetched again. Without a secure context there is no storage: nothing is opened.
 */

import { Bundle } from "./bundle.js";
import { fetchFile, fetchText, keep, keepOnly, keptText, openCache, type Progress } from "./files.js";
import { BundleError, MANIFEST, type Manifest, neededFiles, parseManifest } from "./manifest.js";

export type { Progress };

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
    const cache = await openCache(this.name);
    const base = new URL(url.endsWith("/") ? url : `${url}/`, globalThis.location?.href);
    const text = (await fetchText(new URL(MANIFEST, base), signal)) ?? (await keptText(cache, MANIFEST));
    if (text === null) throw new BundleError(`no bundle can be fetched from ${base.href}, and none is kept here`);
    const manifest = parseManifest(text);
    const names = neededFiles(manifest);
    const all = names.reduce((sum, name) => sum + manifest.files[name].bytes, 0);
    const files = new Map<string, Uint8Array<ArrayBuffer>>();
    this.notKept = cache ? "" : "this browser has no storage for pages like this one";
    const keepPiece = async (name: string, data: Uint8Array<ArrayBuffer>) => {
      this.notKept = (await keep(cache, name, data)) || this.notKept;
    };
    let done = 0;
    for (const name of names) {
      const entry = manifest.files[name];
      const tell = (bytes: number) => progress(done + bytes, all);
      files.set(name, await fetchFile(cache, new URL(name, base), entry, keepPiece, tell, signal));
      done += entry.bytes;
      progress(done, all);
    }
    await this.settle(cache, text, manifest);
    return Bundle.open(manifest, async name => files.get(name)!);
  }

  /** The manifest that is kept, or null. */
  async manifest(): Promise<Manifest | null> {
    const text = await keptText(await openCache(this.name), MANIFEST);
    return text === null ? null : parseManifest(text);
  }

  /** Delete all that is kept. */
  async delete(): Promise<void> {
    await globalThis.caches?.delete(this.name);
  }

  /** All of it is there: remember the version, and forget what only older ones need. */
  private async settle(cache: Cache | null, text: string, manifest: Manifest): Promise<void> {
    if (!cache || this.notKept) return;
    this.notKept = await keep(cache, MANIFEST, text);
    await keepOnly(cache, [MANIFEST, ...neededFiles(manifest).map(name => manifest.files[name].sha256)]);
  }
}
