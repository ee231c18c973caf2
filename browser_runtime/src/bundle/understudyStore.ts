/** The understudy in the browser's own storage, beside the bundle: fetched when somebody asks for it, deletable. */

import { fetchFile, fetchText, keep, keepOnly, kept, keptText, openCache, type Progress, sha256 } from "./files.js";
import { BundleError, checkEntry, type FileEntry, MANIFEST, type UnderstudyEntry } from "./manifest.js";

/** Version of the folder's layout and of the graph's arithmetic that is read here; of `outrider_core.targets.bundle`. */
const FORMAT_VERSION = 8;
/** The files of the folder that run the model; tokenizer and template are the bundle's own. */
const MODEL = "target.onnx";
const DATA = "target.onnx.data";

/** Counts and widths of a target's graph. */
export interface TargetShape {
  vocabSize: number;
  layers: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  /** Tokens that layers with a sliding window see, 0: there are no such layers. */
  window: number;
}

/** A model that was checked: its ONNX file, the tables beside it under the name that it gives them, and its shape. */
export interface TargetFiles {
  model: Uint8Array<ArrayBuffer>;
  data: Uint8Array<ArrayBuffer>;
  dataName: string;
  shape: TargetShape;
}

/** The model's shapes in a manifest, under config.json's names. */
interface TargetConfig {
  vocab_size: number;
  num_hidden_layers: number;
  num_attention_heads: number;
  num_key_value_heads: number;
  head_dim: number;
  sliding_window: number;
  windowed_layers?: number[];
}

interface TargetManifest {
  shape: TargetShape;
  files: Record<string, FileEntry>;
}

export class UnderstudyStore {
  /** name: of the Cache. */
  constructor(readonly name = "outrider-understudy") {}

  /** Whether it is complete: its manifest is kept last. Its files were checked on arrival; `read` checks them again. */
  async has(entry: UnderstudyEntry): Promise<boolean> {
    if (!(await globalThis.caches?.has(this.name).catch(() => false))) return false; // opening it would make one
    const cache = await openCache(this.name);
    return (await keptText(cache, entry.manifestSha256)) !== null;
  }

  /**
   * Fetch what is not here yet of the understudy that lies in the bundle at `url`, and forget any other one.
   *
   * Throws BundleError: it cannot be fetched, differs from the hashes that the bundle gives, or cannot be kept.
   */
  async fetch(url: string, entry: UnderstudyEntry, progress: Progress = () => {}, signal?: AbortSignal): Promise<void> {
    const cache = await openCache(this.name);
    if (!cache) throw new BundleError("this browser has no storage for pages like this one, where it could be kept");
    const base = new URL(`${entry.folder}/`, new URL(url.endsWith("/") ? url : `${url}/`, globalThis.location?.href));
    const text = await fetchText(new URL(MANIFEST, base), signal);
    if (text === null) throw new BundleError(`nothing answers at ${base.href}; try again later`);
    const bytes = new TextEncoder().encode(text);
    const manifest = parseTarget(text);
    if ((await sha256(bytes)) !== entry.manifestSha256) {
      throw new BundleError(`${base.href} holds another bundle's understudy; copy this bundle's own to the server`);
    }
    const all = manifest.files[MODEL].bytes + manifest.files[DATA].bytes;
    const mustKeep = async (name: string, data: Uint8Array<ArrayBuffer>) => {
      const why = await keep(cache, name, data);
      if (why) throw new BundleError(`the understudy cannot be kept: ${why}`);
    };
    let done = 0;
    for (const name of [MODEL, DATA]) {
      const file = manifest.files[name];
      const tell = (bytes: number) => progress(done + bytes, all);
      await fetchFile(cache, new URL(name, base), file, mustKeep, tell, signal);
      done += file.bytes;
      progress(done, all);
    }
    await mustKeep(entry.manifestSha256, bytes);
    await keepOnly(cache, [entry.manifestSha256, manifest.files[MODEL].sha256, manifest.files[DATA].sha256]);
  }

  /** The stored files, checked again. Throws BundleError. */
  async read(entry: UnderstudyEntry): Promise<TargetFiles> {
    const cache = await openCache(this.name);
    const text = await keptText(cache, entry.manifestSha256);
    if (!cache || text === null) throw new BundleError("the understudy is not in this browser; fetch it first");
    const { files, shape } = parseTarget(text);
    const [model, data] = [await kept(cache, files[MODEL]), await kept(cache, files[DATA])];
    if (model && data) return { model, data, dataName: DATA, shape };
    await keepOnly(cache, [files[MODEL].sha256, files[DATA].sha256]); // so that it does not count as here any more
    throw new BundleError("the understudy is damaged in this browser's storage; fetch it again");
  }

  /** Delete all that is kept. */
  async delete(): Promise<void> {
    await globalThis.caches?.delete(this.name);
  }
}

/** From the text of the understudy's own manifest.json. Throws BundleError. */
export function parseTarget(text: string): TargetManifest {
  let raw: { format_version?: unknown; config?: TargetConfig; files?: Record<string, FileEntry> };
  try {
    raw = JSON.parse(text);
  } catch {
    throw new BundleError(`the understudy's ${MANIFEST} is not JSON; copy it to the server again`);
  }
  if (raw?.format_version !== FORMAT_VERSION) {
    throw new BundleError(
      `the understudy has format ${raw?.format_version}, this runtime reads ${FORMAT_VERSION}; export again or update`,
    );
  }
  const { config = {} as TargetConfig, files = {} } = raw;
  const window = config.windowed_layers?.length ? config.sliding_window : 0;
  const shape: TargetShape = {
    vocabSize: config.vocab_size,
    layers: config.num_hidden_layers,
    heads: config.num_attention_heads,
    kvHeads: config.num_key_value_heads,
    headDim: config.head_dim,
    window,
  };
  for (const value of Object.values({ ...shape, window: window || 1 })) {
    if (!Number.isSafeInteger(value) || value < 1) throw new BundleError(`the understudy's ${MANIFEST} is broken`);
  }
  for (const name of [MODEL, DATA]) checkEntry(name, files[name]);
  return { shape, files };
}
