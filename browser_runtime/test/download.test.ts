/** Bundles over real HTTP, from servers and connections that fail: whole in the end or one line, never half. */

import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { after, afterEach, before, beforeEach, mock, test } from "node:test";
import { BundleError, MANIFEST, type UnderstudyEntry } from "../src/bundle/manifest.js";
import { BundleStore } from "../src/bundle/store.js";
import { UnderstudyStore } from "../src/bundle/understudyStore.js";
import { type Any, read } from "./vectors.js";

const MIB = 1 << 20;
const ENGINE_DATA = "drafter.onnx.data";
/** How many times faster than elsewhere the product's timers run here. */
const HASTE = 20;

const sha256 = (data: Uint8Array) => createHash("sha256").update(data).digest("hex");
const listed = (data: Uint8Array) => ({ sha256: sha256(data), bytes: data.length });

/** A bundle and its understudy, by their names. */
const files = new Map<string, Uint8Array>();

/** Serves them on loopback, with the faults that its fields say. */
class FileServer {
  readonly files = new Map(files);
  /** Names of files, each with where its range began. */
  asked: string[] = [];
  sent = 0;
  ranges: "served" | "ignored" | "refused" = "served";
  cutsLeft = 0;
  cutAfter = 0;
  /** Nothing follows the head of a response. */
  silent = false;
  readonly server = createServer((request, response) => this.answer(request, response));

  get url(): string {
    return `http://127.0.0.1:${(this.server.address() as AddressInfo).port}/some/bundle`;
  }

  private answer({ url, headers }: IncomingMessage, response: ServerResponse): void {
    const name = url!.replace("/some/bundle/", "");
    const begin = Number(headers.range?.match(/^bytes=(\d+)-$/)?.[1] ?? 0);
    this.asked.push(begin ? `${name} ${begin}` : name);
    const data = this.files.get(name);
    const refused = begin > 0 && this.ranges === "refused";
    if (!data || refused) {
      response.writeHead(data ? 416 : 404).end();
      return;
    }
    const from = this.ranges === "served" ? begin : 0;
    const range = from ? { "content-range": `bytes ${from}-${data.length - 1}/${data.length}` } : {};
    response.writeHead(from ? 206 : 200, { "content-length": data.length - from, ...range });
    if (this.silent && name !== MANIFEST) {
      response.flushHeaders();
      return;
    }
    const cut = this.cutsLeft > 0 && data.length - from > this.cutAfter;
    const body = cut ? data.subarray(from, from + this.cutAfter) : data.subarray(from);
    this.sent += body.length;
    if (!cut) {
      response.end(body);
      return;
    }
    this.cutsLeft--;
    response.write(body, () => response.destroy());
  }
}

/** A browser's storage, of which `room` bytes are left. */
class Storage {
  room = Number.POSITIVE_INFINITY;
  readonly caches = new Map<string, Map<string, Uint8Array<ArrayBuffer>>>();

  async open(name: string) {
    const kept = this.caches.get(name) ?? new Map<string, Uint8Array<ArrayBuffer>>();
    this.caches.set(name, kept);
    return {
      put: async (key: string, response: Response) => {
        const data = new Uint8Array(await response.arrayBuffer());
        if (data.length > this.room) throw new DOMException("no room", "QuotaExceededError");
        this.room -= data.length;
        kept.set(key, data);
      },
      match: async (key: string) => kept.get(key) && new Response(kept.get(key)),
      keys: async () => [...kept.keys()].map(url => ({ url })),
      delete: async (key: string) => kept.delete(key),
    };
  }

  async has(name: string) {
    return this.caches.has(name);
  }

  async delete(name: string) {
    return this.caches.delete(name);
  }
}

let server: FileServer;
let storage: Storage;
let entry: UnderstudyEntry;
let manifest: Any;
let names: string[] = [];
let all = 0;

before(() => {
  const real = setTimeout;
  const hasty = (run: () => void, milliseconds = 0, ...rest: []) => real(run, milliseconds / HASTE, ...rest);
  mock.method(globalThis, "setTimeout", hasty);
  const { tokenizer } = read("tokenizer").find(row => row.tokenizer);
  const put = (name: string, data: Uint8Array | string) => files.set(name, Buffer.from(data));
  put("tokenizer.json", JSON.stringify(tokenizer));
  put("tokenizer_config.json", "{}");
  put("chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
  put("draft_ids.u32", new Uint8Array(4));
  put("drafter.onnx", randomBytes(2 * MIB));
  put(ENGINE_DATA, randomBytes(9 * MIB + 5));
  names = [...files.keys()];
  put("understudy/target.onnx", randomBytes(MIB));
  put("understudy/target.onnx.data", randomBytes(6 * MIB));
  const file = (name: string) => listed(files.get(name)!);
  const [folder, shape] = ["understudy", { num_attention_heads: 1, num_key_value_heads: 1, head_dim: 2 }];
  const text = JSON.stringify({
    format_version: 8,
    config: { vocab_size: 9, num_hidden_layers: 1, ...shape },
    files: Object.fromEntries(["target.onnx", "target.onnx.data"].map(name => [name, file(`${folder}/${name}`)])),
  });
  put(`${folder}/${MANIFEST}`, text);
  const manifestSha256 = sha256(Buffer.from(text));
  entry = { folder, name: "small", format: "onnx", bytes: 7 * MIB, manifestSha256, barred: [] };
  const widths = { sa_kv_heads: 1, ca_kv_heads: 1, head_dim: 2, draft_vocab_size: 1, vocab_size: 50, max_context: 100 };
  manifest = {
    format_version: 2,
    ...{ target: "t", target_hash: "t", drafter_hash: "d", eos_ids: [2], ...widths },
    ...{ draft_ids_file: "draft_ids.u32", null_row_file: null },
    engines: { onnx: { file: "drafter.onnx", data: ENGINE_DATA } },
    files: Object.fromEntries(names.map(name => [name, file(name)])),
  };
  all = names.reduce((sum, name) => sum + file(name).bytes, 0);
  put(MANIFEST, JSON.stringify(manifest));
});
after(() => mock.restoreAll());

beforeEach(async () => {
  server = new FileServer();
  await new Promise<void>(resolve => server.server.listen(0, "127.0.0.1", resolve));
  storage = new Storage();
  Object.assign(globalThis, { caches: storage });
});

afterEach(() => {
  server.server.closeAllConnections();
  server.server.close();
});

/** Opens the bundle and checks that every byte is there. */
async function openWhole(store = new BundleStore(), progress?: (done: number, all: number) => void): Promise<void> {
  const bundle = await store.open(server.url, progress);
  for (const name of names) {
    assert.ok(Buffer.from(server.files.get(name)!).equals(await bundle.readFile(name)), name);
  }
}

/** It is a BundleError of one line that says this. */
function oneLine(pattern: RegExp) {
  return (error: unknown) => {
    assert.ok(error instanceof BundleError, String(error));
    assert.match(error.message, pattern);
    assert.ok(!error.message.includes("\n"), error.message);
    return true;
  };
}

test("a download that is cut twenty times is continued, and kept", async () => {
  [server.cutsLeft, server.cutAfter] = [20, MIB / 2];
  const seen: number[] = [];
  await openWhole(new BundleStore(), (done, of) => {
    assert.equal(of, all);
    seen.push(done);
  });
  assert.equal(server.cutsLeft, 0);
  assert.deepEqual(
    [...seen].sort((one, other) => one - other),
    seen,
  );
  assert.equal(seen.at(-1), all);
  assert.ok(server.sent < all + 20 * server.cutAfter, `what had come was fetched again: ${server.sent} for ${all}`);
  server.asked = [];
  await openWhole();
  assert.deepEqual(server.asked, [MANIFEST]);
  server.files.set(MANIFEST, server.files.get(MANIFEST)!.subarray(0, 100)); // its transfer is cut
  [server.cutsLeft, server.cutAfter] = [1, 50];
  await openWhole();
  assert.equal(server.cutsLeft, 0);
});

test("from a server that ignores or refuses ranges it is read from the beginning", async () => {
  for (const ranges of ["ignored", "refused"] as const) {
    Object.assign(server, { ranges, cutsLeft: 2, cutAfter: 5 * MIB });
    await openWhole(new BundleStore(ranges));
    assert.equal(server.cutsLeft, 0);
  }
});

test("a connection that is cut at the same place each time, or falls silent, ends in one line", async () => {
  for (const ranges of ["ignored", "refused"] as const) {
    Object.assign(server, { ranges, cutsLeft: 1000, cutAfter: 5 * MIB });
    await assert.rejects(new BundleStore().open(server.url), oneLine(/cannot be fetched: .*; try again/));
  }
  Object.assign(server, { silent: true, cutsLeft: 0 });
  await assert.rejects(new BundleStore().open(server.url), oneLine(/nothing came for 15 s; try again/));
  assert.equal(await new BundleStore().manifest(), null);
});

test("a wrong hash or length is one line, and what was right is not fetched again", async () => {
  const right = server.files.get(ENGINE_DATA)!;
  const flipped = Uint8Array.from(right);
  flipped[8 * MIB] ^= 1;
  const wrong = /\.data differs from its sha256/;
  for (const [store, data, pattern] of [
    ["flipped", flipped, wrong],
    ["short", right.subarray(0, 9 * MIB), wrong],
    ["long", Buffer.concat([right, right]), /has more than the manifest's/],
    ["absent", null, /gives HTTP 404/],
  ] as const) {
    if (data) server.files.set(ENGINE_DATA, data);
    else server.files.delete(ENGINE_DATA);
    await assert.rejects(new BundleStore(store).open(server.url), oneLine(pattern));
    assert.equal(await new BundleStore(store).manifest(), null);
  }
  server.files.set(ENGINE_DATA, right);
  server.asked = [];
  await openWhole(new BundleStore("flipped"));
  assert.deepEqual(server.asked, [MANIFEST, ENGINE_DATA]);
});

test("a cancelled download ends at once, and the next call continues it", async () => {
  const stop = new AbortController();
  const opening = new BundleStore().open(server.url, done => done > all - 4 * MIB && stop.abort(), stop.signal);
  await assert.rejects(opening, { name: "AbortError" });
  assert.equal(await new BundleStore().manifest(), null);
  server.asked = [];
  await openWhole();
  assert.deepEqual(server.asked, [MANIFEST, `${ENGINE_DATA} ${4 * MIB}`]);
});

test("a new version replaces the kept one only once it is whole", async () => {
  await openWhole();
  const newer = randomBytes(5 * MIB);
  const files = { ...manifest.files, [ENGINE_DATA]: listed(newer) };
  server.files.set(MANIFEST, Buffer.from(JSON.stringify({ ...manifest, files })));
  await assert.rejects(new BundleStore().open(server.url), oneLine(/has more than the manifest's/));
  assert.equal((await new BundleStore().manifest())!.files[ENGINE_DATA].bytes, 9 * MIB + 5);
  server.files.set(ENGINE_DATA, newer);
  await openWhole();
  assert.equal((await new BundleStore().manifest())!.files[ENGINE_DATA].bytes, newer.length);
  assert.equal(storage.caches.get("outrider-bundle")!.size, names.length + 2); // two pieces, and the manifest
});

test("with a full storage a bundle is opened and not kept, an understudy is one line", async () => {
  storage.room = 5 * MIB;
  const store = new BundleStore();
  await openWhole(store);
  assert.match(store.notKept, /storage is full/);
  assert.equal(await store.manifest(), null);
  const understudy = new UnderstudyStore();
  await assert.rejects(understudy.fetch(server.url, entry), oneLine(/cannot be kept: this browser's storage is full/));
  assert.equal(await understudy.has(entry), false);
  await assert.rejects(understudy.read(entry), oneLine(/is not in this browser; fetch it first/));
});

test("an understudy is here once it is whole, and no longer once it is found damaged", async () => {
  const understudy = new UnderstudyStore();
  const stop = new AbortController();
  const fetching = understudy.fetch(server.url, entry, done => done > 6 * MIB && stop.abort(), stop.signal);
  await assert.rejects(fetching, { name: "AbortError" });
  assert.equal(await understudy.has(entry), false);
  [server.cutsLeft, server.cutAfter] = [3, MIB / 2];
  await understudy.fetch(server.url, entry);
  assert.ok(await understudy.has(entry));
  const { data, model } = await understudy.read(entry);
  assert.ok(Buffer.from(data).equals(server.files.get("understudy/target.onnx.data")!));
  assert.ok(Buffer.from(model).equals(server.files.get("understudy/target.onnx")!));
  const [piece] = [...storage.caches.get(understudy.name)!].find(([, bytes]) => bytes.length === 4 * MIB)!;
  storage.caches.get(understudy.name)!.get(piece)![7] ^= 1;
  await assert.rejects(understudy.read(entry), oneLine(/damaged/));
  assert.equal(await understudy.has(entry), false);
  await understudy.fetch(server.url, entry);
  assert.deepEqual((await understudy.read(entry)).data, data);
});
