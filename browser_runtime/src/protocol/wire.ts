/**
 * Messages as frames: binary WebSocket messages, subprotocol `outrider.v1` (docs/protocol.md).
 *
 * A frame is the MessagePack array `[type, fields...]`, one byte 0x80, then zeros up to the next size bucket. Fields are
 * only ever appended, with defaults. Every bound that does not depend on the model is checked while decoding.
 */

import { Encoder, decode as unpack } from "@msgpack/msgpack";
import { Constraint } from "./constraint.js";
import { MAX_POINTS } from "./costs.js";
import { type ClientMessage, isArithmetic, type Message, type ServerMessage } from "./messages.js";
import { Sampling } from "./sampling.js";
import { MAX_NODES, ROOT, type TokenTree } from "./tree.js";

export const SUBPROTOCOL = "outrider.v1";
export const PROTOCOL_VERSION = 1;
/** The largest frame the device accepts. */
export const MAX_SERVER_FRAME = 1 << 20;
export const STREAMS = 1 << 16;
const MAX_TOKENS = 1 << 17;

/** A frame that cannot be understood: truncated, out of range, wrong type, broken padding. */
export class WireError extends Error {}

/** Checks one field and encodes it in MessagePack. */
interface Kind {
  check(value: unknown): unknown;
  pack(value: never): Uint8Array;
  /** The default of a missing field; undefined: it is required. */
  fallback?: unknown;
}

const encoder = new Encoder({ useBigInt64: true });
const floats = new Encoder({ forceIntegerToFloat: true });
const packed = (value: unknown): Uint8Array => encoder.encode(value);

function wrong(wanted: string, value: unknown): WireError {
  return new WireError(`a field is ${String(value).slice(0, 40)} in place of ${wanted}`);
}

function int(least: number, most: number, fallback?: number): Kind {
  const check = (value: unknown) => {
    const number = typeof value === "bigint" ? Number(value) : value;
    if (typeof number === "number" && Number.isInteger(number) && number >= least && number <= most) return number;
    throw wrong(`a whole number from ${least} to ${most}`, value);
  };
  return { check, pack: packed, fallback };
}

/** most: code points at most. */
function text(most: number, fallback?: string): Kind {
  const check = (value: unknown) => {
    if (typeof value === "string" && (value.length <= most || [...value].length <= most)) return value;
    throw wrong(`text of at most ${most} characters`, value);
  };
  return { check, pack: packed, fallback };
}

function bytes(least: number, most: number, fallback?: Uint8Array): Kind {
  const check = (value: unknown) => {
    if (value instanceof Uint8Array && value.length >= least && value.length <= most) return value;
    throw wrong(`${least} to ${most} bytes`, value);
  };
  return { check, pack: packed, fallback };
}

const arithmetic: Kind = {
  check: value => {
    if (isArithmetic(value)) return value;
    throw wrong("at most 64 printable characters", value);
  },
  pack: packed,
  fallback: "",
};

const flag: Kind = {
  check: value => {
    if (typeof value === "boolean") return value;
    throw wrong("true or false", value);
  },
  pack: packed,
  fallback: false,
};

/** [temperature, top_k, top_p, min_p, seed]; fractions are float64 even if they are whole. */
const sampling: Kind = {
  check: value => {
    if (!Array.isArray(value)) throw wrong("sampling parameters", value);
    const [temperature, topK, topP, minP, seed] = value;
    try {
      return new Sampling({ temperature, topK, topP, minP, seed });
    } catch (error) {
      throw new WireError(String(error));
    }
  },
  pack: (value: Sampling) => {
    const seed = value.seed < 2n ** 32n ? Number(value.seed) : value.seed;
    const [temperature, topP, minP] = [value.temperature, value.topP, value.minP].map(one => floats.encode(one));
    return joined([array(5), temperature, packed(value.topK), topP, minP, packed(seed)]);
  },
};

/** [begin, two penalties, uint32 ids and float32 amounts of the biases, grammar, schema], or null. Only ever sent. */
const constraint: Kind = {
  check: value => {
    if (value instanceof Constraint || value === undefined) return value;
    throw wrong("a constraint", value);
  },
  pack: (value: Constraint | undefined) => {
    if (value === undefined) return packed(null);
    const amounts = new DataView(new ArrayBuffer(4 * value.biases.size));
    for (const [index, bias] of [...value.biases.values()].entries()) amounts.setFloat32(4 * index, bias, true);
    const penalties = [value.frequencyPenalty, value.presencePenalty].map(one => floats.encode(one));
    const biases = [packIds([...value.biases.keys()]), new Uint8Array(amounts.buffer)].map(packed);
    return joined([
      array(7),
      packed(value.begin),
      ...penalties,
      ...biases,
      packed(value.grammar),
      packed(value.schema),
    ]);
  },
};

const stream = int(0, STREAMS - 1);
const count = int(0, 2 ** 31 - 1);
const later = int(0, 2 ** 31 - 1, 0);
const seq = int(0, 2 ** 32 - 1);
const hash = text(64);
const ids = bytes(0, 4 * MAX_TOKENS);
const anyBytes = bytes(0, MAX_SERVER_FRAME);

/** The number and the fields of each message, in the order of the wire. */
const SCHEMAS: Record<Message["type"], [number, Record<string, Kind>]> = {
  Hello: [1, { protocol: int(1, 65535), targetHash: hash, drafterHash: hash, client: text(128, ""), arithmetic }],
  Welcome: [
    2,
    {
      protocol: int(-(2 ** 53), 2 ** 53),
      targetHash: hash,
      drafterHash: hash,
      vocabSize: count,
      maxContext: count,
      maxNodes: count,
      treeBudget: count,
      server: text(128, ""),
      costs: bytes(0, 8 * MAX_POINTS, new Uint8Array()),
      constraints: later,
      arithmetic,
      streamTokens: int(0, 9999, 0),
      queueUs: later,
    },
  ],
  Open: [3, { stream, session: bytes(16, 16), seq, tokens: ids, featuresHave: count, sampling, constraint }],
  Opened: [4, { stream, committed: count, cached: count }],
  Features: [5, { stream, start: count, rows: anyBytes }],
  Verify: [6, { stream, seq, baseLen: count, tokens: bytes(0, 4 * MAX_NODES), parents: bytes(0, MAX_NODES) }],
  Verdict: [
    7,
    {
      stream,
      seq,
      baseLen: count,
      accepted: bytes(0, MAX_NODES),
      bonus: count,
      finish: int(0, 15),
      rows: anyBytes,
      treeBudget: later,
      queueUs: later,
      engineUs: later,
    },
  ],
  Resync: [8, { stream, committed: count }],
  Generate: [9, { stream, seq, baseLen: count, maxNew: int(1, MAX_TOKENS - 1), rows: flag }],
  Cancel: [10, { stream }],
  Close: [11, { stream }],
  Error: [12, { code: int(0, 255), text: text(512), stream: int(-1, STREAMS - 1, -1), retryAfterMs: later }],
};

const SERVER_TYPES = ["Welcome", "Opened", "Features", "Verdict", "Resync", "Error"] as const;
const BY_NUMBER = new Map(SERVER_TYPES.map(type => [SCHEMAS[type][0], type]));

function array(size: number): Uint8Array {
  return Uint8Array.of(0x90 | size);
}

function joined(parts: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** Return the frame size that `size` bytes are padded to: steps of 64 up to 1 KiB, then of 512. */
export function bucket(size: number): number {
  const step = size <= 1024 ? 64 : 512;
  return Math.ceil(size / step) * step;
}

/** A padded frame. */
export function encode(message: Message): Uint8Array<ArrayBuffer> {
  const [number, fields] = SCHEMAS[message.type];
  const values = message as unknown as Record<string, never>;
  const packedFields = Object.entries(fields).map(([name, kind]) => kind.pack(values[name]));
  const parts = [array(1 + packedFields.length), packed(number), ...packedFields];
  const data = joined([...parts, Uint8Array.of(0x80)]);
  const frame = new Uint8Array(bucket(data.length));
  frame.set(data);
  return frame;
}

/** Decode what a verifier sent. Throws WireError and nothing else, whatever the bytes. */
export function decodeServer(frame: Uint8Array): ServerMessage {
  let end = frame.length;
  while (end > 0 && frame[end - 1] === 0) end--;
  if (frame[end - 1] !== 0x80) throw new WireError("frame without padding mark");
  let values: unknown;
  try {
    values = unpack(frame.subarray(0, end - 1), { useBigInt64: true });
  } catch (error) {
    throw new WireError(`not a server message: ${error instanceof Error ? error.message : error}`);
  }
  if (!Array.isArray(values)) throw new WireError("not a server message: no array");
  const type = BY_NUMBER.get(Number(values[0]));
  if (type === undefined) throw new WireError(`not a server message: type ${String(values[0]).slice(0, 40)}`);
  const message: Record<string, unknown> = { type };
  for (const [index, [name, kind]] of Object.entries(SCHEMAS[type][1]).entries()) {
    const value = index + 1 < values.length ? values[index + 1] : kind.fallback;
    if (value === undefined) throw new WireError(`${type} without ${name}`);
    message[name] = kind.check(value);
  }
  return message as unknown as ServerMessage;
}

/** Whether `message` is for `stream`, or for all. */
export function concerns(message: ServerMessage, stream: number): boolean {
  return message.type === "Welcome" || message.stream === stream || message.stream === -1;
}

/** uint32 ids, little-endian. */
export function packIds(values: readonly number[]): Uint8Array {
  const view = new DataView(new ArrayBuffer(4 * values.length));
  for (const [index, value] of values.entries()) view.setUint32(4 * index, value, true);
  return new Uint8Array(view.buffer);
}

/** (tokens, parents) as VERIFY carries them. */
export function packTree(tree: TokenTree): { tokens: Uint8Array; parents: Uint8Array } {
  const parents = Uint8Array.from(tree.parents, parent => (parent === ROOT ? 255 : parent));
  return { tokens: packIds(tree.tokens), parents };
}

/** Bytes of one WebSocket frame around `payload` bytes (RFC 6455, section 5.2). */
export function frameBytes(payload: number, masked: boolean): number {
  const header = payload < 126 ? 2 : payload < 65536 ? 4 : 10;
  return header + (masked ? 4 : 0) + payload;
}

export type { ClientMessage, ServerMessage };
