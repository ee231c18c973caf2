/** The messages between device and verifier. `wire.ts` encodes and decodes them. */

import type { Constraint } from "./constraint.js";
import type { Sampling } from "./sampling.js";

/**
 * Comes first. targetHash, drafterHash: the bundle's; client: name of the client, for logs; arithmetic: of the answer's
 * beginning, "" for none; only a verifier with the same one may continue it.
 */
export interface Hello {
  type: "Hello";
  protocol: number;
  targetHash: string;
  drafterHash: string;
  client: string;
  arithmetic: string;
}

/**
 * The verifier's answer to Hello. maxContext: committed and drafted tokens; maxNodes: of one tree; treeBudget: nodes that
 * the server would like a tree to have at most, now; costs: for `CostCurve.unpack`, empty if unknown; constraints: those it
 * supports, OBEYS_*; arithmetic: such as "torch-float32", "" if unknown; streamTokens: that a step of its streams brought
 * lately, in hundredths, 0 if unknown; queueUs: time that a round lately waited for the engine, 0 if none or unknown.
 */
export interface Welcome {
  type: "Welcome";
  protocol: number;
  targetHash: string;
  drafterHash: string;
  vocabSize: number;
  maxContext: number;
  maxNodes: number;
  treeBudget: number;
  server: string;
  costs: Uint8Array;
  constraints: number;
  arithmetic: string;
  streamTokens: number;
  queueUs: number;
}

/** Return whether a verifier may continue an answer begun in `arithmetic`: yes if one of the two is unknown. */
export function computesIn(welcome: Welcome, arithmetic: string): boolean {
  return arithmetic === "" || welcome.arithmetic === "" || welcome.arithmetic === arithmetic;
}

/** Say why a verifier that computes in `here` may not continue an answer begun in `begun`, for people. */
export function otherArithmetic(begun: string, here: string): string {
  return (
    `the answer was begun in ${begun} arithmetic, and this verifier computes in ${here}; ` +
    "another one at this address may continue it"
  );
}

/** Whether `text` may name an arithmetic: printable ASCII, as people read it. */
export function isArithmetic(text: unknown): text is string {
  return typeof text === "string" && /^[ -~]{0,64}$/.test(text);
}

/**
 * Begin or resume: the verifier needs nothing else to take a session over from another replica. session: 16 random bytes;
 * seq: the last VERIFY that is settled for the device; tokens: uint32 ids of prompt and committed text; rows
 * 0..featuresHave-1 need not be sent; constraint: only if the verifier supports it.
 */
export interface Open {
  type: "Open";
  stream: number;
  session: Uint8Array;
  seq: number;
  tokens: Uint8Array;
  featuresHave: number;
  sampling: Sampling;
  constraint?: Constraint;
}

/** cached: rows of key/value found alive (0 after a restart or an eviction). */
export interface Opened {
  type: "Opened";
  stream: number;
  committed: number;
  cached: number;
}

/** Rows (`unpackRows`) of the positions from `start` on that the device lacks; the newest are sent first. */
export interface Features {
  type: "Features";
  stream: number;
  start: number;
  rows: Uint8Array;
}

/** A tree below `baseLen` committed tokens: uint32 token ids, and a parent byte per node, 255 = root. */
export interface Verify {
  type: "Verify";
  stream: number;
  seq: number;
  baseLen: number;
  tokens: Uint8Array;
  parents: Uint8Array;
}

/**
 * The reply to a Verify, or one token of a Generate. baseLen: committed tokens before it; accepted: node numbers of the
 * accepted path; bonus: the target's own next token; finish: FINISH_NONE or why the text ends; rows: of positions `baseLen-1
 * .. baseLen-1+accepted.length`; queueUs, engineUs: microseconds that the round waited for the engine, and of the engine.
 */
export interface Verdict {
  type: "Verdict";
  stream: number;
  seq: number;
  baseLen: number;
  accepted: Uint8Array;
  bonus: number;
  finish: number;
  rows: Uint8Array;
  treeBudget: number;
  queueUs: number;
  engineUs: number;
}

export const FINISH_NONE = 0;

/** The VERIFY was based on another length than the verifier's: OPEN again with the committed tokens. */
export interface Resync {
  type: "Resync";
  stream: number;
  committed: number;
}

/** Let the target decode by itself: VERDICTs with empty paths, one a token. rows: each with that of position baseLen-1. */
export interface Generate {
  type: "Generate";
  stream: number;
  seq: number;
  baseLen: number;
  maxNew: number;
  rows: boolean;
}

/** Stop a Generate, or drop a waiting Verify. The session stays. */
export interface Cancel {
  type: "Cancel";
  stream: number;
}

/** The session is over; the verifier may forget it. (A lost socket is not a CLOSE.) */
export interface Close {
  type: "Close";
  stream: number;
}

/** code: one of ERR_*; stream -1: the connection. */
export interface WireErrorMessage {
  type: "Error";
  code: number;
  text: string;
  stream: number;
  retryAfterMs: number;
}

export type ClientMessage = Hello | Open | Verify | Generate | Cancel | Close;
export type ServerMessage = Welcome | Opened | Features | Verdict | Resync | WireErrorMessage;
export type Message = ClientMessage | ServerMessage;

/** The frame was not understood; the connection stays open. */
export const ERR_MALFORMED = 1;
/** Protocol, target or drafter differ; the connection is closed. */
export const ERR_MISMATCH = 2;
/** A field is out of the model's range. */
export const ERR_BOUNDS = 3;
/** No such stream on this connection: OPEN first. */
export const ERR_UNKNOWN = 4;
/** No room now; retry after retryAfterMs. */
export const ERR_BUSY = 6;
/** The context is full. */
export const ERR_TOO_LONG = 7;
/** The verifier stops after the requests in progress: OPEN elsewhere, or again after retryAfterMs. */
export const ERR_GOING_AWAY = 9;
