/** A bundle's manifest.json, which `python -m export bundle` writes, checked. */

export const FORMAT_VERSION = 2;
export const MANIFEST = "manifest.json";

/** A folder is not a usable bundle. The message is one line that says what to do. */
export class BundleError extends Error {}

export interface FileEntry {
  sha256: string;
  bytes: number;
}

/** A complete small model in its own folder of the bundle, which is fetched on request. */
export interface UnderstudyEntry {
  folder: string;
  name: string;
  format: string;
  /** Of all its files. */
  bytes: number;
  manifestSha256: string;
  /** Ids with a meaning only to this model, which it must not write. */
  barred: number[];
}

/**
 * Widths in values; hashes as the handshake compares them. The file names are keys of `files`. A bundle without a drafter has
 * no engine and no draft ids, and widths of 1; its understudy drafts.
 */
export interface Manifest {
  target: string;
  targetHash: string;
  drafterHash: string;
  vocabSize: number;
  eosIds: number[];
  maxContext: number;
  saKvHeads: number;
  caKvHeads: number;
  headDim: number;
  draftVocabSize: number;
  draftIdsFile: string | null;
  nullRowFile: string | null;
  /** Divides logits in greedy decoding, so that a token's probability tells how often the target chooses it. */
  confidenceTemperature: number;
  engineFile: string | null;
  engineData: string | null;
  files: Record<string, FileEntry>;
  /** null: the bundle has none. */
  understudy: UnderstudyEntry | null;
}

const TEXT_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/** Parse the text of manifest.json. Throws BundleError. */
export function parseManifest(text: string): Manifest {
  let raw: Record<string, unknown>;
  try {
    raw = JSON.parse(text);
  } catch {
    throw new BundleError(`${MANIFEST} is not JSON: is this the address of a bundle?`);
  }
  const version = raw?.format_version;
  if (version !== FORMAT_VERSION) {
    throw new BundleError(
      `${MANIFEST}: format ${version}, this runtime reads ${FORMAT_VERSION}; export again or update`,
    );
  }
  const engines = (raw.engines ?? {}) as Record<string, Record<string, unknown>>;
  const engine = engines.onnx ?? null;
  const drafted = Object.keys(engines).length > 0;
  if (drafted && !engine)
    throw new BundleError(`${MANIFEST} lists no onnx engine; export the bundle with --format onnx`);
  if (!drafted && !raw.understudy) {
    throw new BundleError(`${MANIFEST} describes neither a drafter nor an understudy; export the bundle again`);
  }
  const width = (name: string) => (drafted ? count(raw, name) : 1);
  const manifest: Manifest = {
    target: text_(raw, "target"),
    targetHash: text_(raw, "target_hash"),
    drafterHash: text_(raw, "drafter_hash"),
    vocabSize: count(raw, "vocab_size"),
    eosIds: raw.eos_ids as number[],
    maxContext: count(raw, "max_context"),
    saKvHeads: width("sa_kv_heads"),
    caKvHeads: width("ca_kv_heads"),
    headDim: width("head_dim"),
    draftVocabSize: width("draft_vocab_size"),
    draftIdsFile: drafted ? text_(raw, "draft_ids_file") : null,
    nullRowFile: raw.null_row_file === null ? null : text_(raw, "null_row_file"),
    confidenceTemperature: temperature(raw.confidence_temperature),
    engineFile: engine && text_(engine, "file"),
    engineData: engine?.data === null || engine?.data === undefined ? null : text_(engine, "data"),
    files: raw.files as Record<string, FileEntry>,
    understudy: understudyOf(raw.understudy),
  };
  if (!Array.isArray(manifest.eosIds) || !manifest.eosIds.length) throw broken("eos_ids");
  for (const name of neededFiles(manifest)) {
    const entry = manifest.files?.[name];
    if (!entry) throw new BundleError(`${MANIFEST} does not list ${name}; export the bundle again`);
    checkEntry(name, entry);
  }
  return manifest;
}

/** The files that the runtime reads, small ones first. */
export function neededFiles(manifest: Manifest): string[] {
  const { draftIdsFile, nullRowFile, engineFile, engineData } = manifest;
  const names = [...TEXT_FILES, draftIdsFile, nullRowFile, engineFile, engineData];
  return names.filter((name): name is string => name !== null);
}

/** Throws BundleError if `name` is not a plain file name, or `entry` is not a hash and a size. */
export function checkEntry(name: string, entry: FileEntry): void {
  const hash = typeof entry?.sha256 === "string" && /^[0-9a-f]{64}$/.test(entry.sha256);
  if (!isPlain(name) || !hash || !Number.isSafeInteger(entry.bytes)) throw broken(name);
}

function isPlain(name: string): boolean {
  return /^[\w.-]+$/.test(name) && !name.startsWith(".");
}

function understudyOf(raw: unknown): UnderstudyEntry | null {
  if (raw === null || raw === undefined) return null;
  const of = raw as Record<string, unknown>;
  const folder = text_(of, "folder");
  const manifestSha256 = text_(of, "manifest_sha256");
  if (!isPlain(folder) || !/^[0-9a-f]{64}$/.test(manifestSha256)) throw broken("understudy");
  const barred = (of.barred ?? []) as number[];
  if (!Array.isArray(barred) || !barred.every(Number.isSafeInteger)) throw broken("understudy");
  const [name, format, bytes] = [text_(of, "name"), text_(of, "format"), count(of, "bytes")];
  return { folder, name, format, bytes, manifestSha256, barred };
}

function text_(of: Record<string, unknown>, name: string): string {
  const value = of[name];
  if (typeof value !== "string") throw broken(name);
  return value;
}

function count(of: Record<string, unknown>, name: string): number {
  const value = of[name];
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 1) throw broken(name);
  return value;
}

/** Older bundles have none. */
function temperature(given: unknown): number {
  if (given === undefined) return 1;
  if (typeof given !== "number" || !(given >= 0.05 && given <= 20)) throw broken("confidence_temperature");
  return given;
}

function broken(name: string): BundleError {
  return new BundleError(`${MANIFEST} is broken at ${name}; export the bundle again`);
}
