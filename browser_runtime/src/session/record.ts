/** An answer in progress, as JSON that outlives the page. */

import { constraintOrNull, type PlainConstraint, plainConstraint } from "../protocol/constraint.js";
import { isArithmetic } from "../protocol/messages.js";
import { Sampling } from "../protocol/sampling.js";
import type { Session } from "./session.js";
import type { Writer } from "./states.js";

const VERSION = 1;

/** The data with which `EdgeRuntime.resume` continues an answer. It holds the conversation's tokens. */
export interface AnswerRecord {
  version: number;
  target: string;
  prompt: number[];
  committed: number[];
  provisional: number[];
  /** Begin, end and writer of each span of the answer. */
  writers: [number, number, Writer][];
  /** seed: as decimal digits, since it has up to 63 bits. */
  sampling: { temperature: number; topK: number; topP: number; minP: number; seed: string };
  maxNew: number;
  seq: number;
  stream: number;
  /** 32 hex digits. */
  session: string;
  stop: string[];
  /** The arithmetic of the verified tokens; "" if unknown. */
  arithmetic: string;
  /** The answer's constraint; null for none. */
  constraint: PlainConstraint | null;
}

export function recordOf(session: Session, target: string, stop: readonly string[]): AnswerRecord {
  const { setup, text } = session;
  const { temperature, topK, topP, minP, seed } = setup.sampling;
  return {
    version: VERSION,
    target,
    prompt: [...setup.prompt],
    committed: session.committed.slice(setup.prompt.length),
    provisional: [...session.provisional],
    writers: text.spans.map(({ begin, end, writer }) => [begin, end, writer]),
    sampling: { temperature, topK, topP, minP, seed: `${seed}` },
    maxNew: setup.maxNew,
    seq: session.verifier.seq,
    stream: setup.stream,
    session: Array.from(setup.sessionId, byte => byte.toString(16).padStart(2, "0")).join(""),
    stop: [...stop],
    arithmetic: session.verifier.pinned,
    constraint: plainConstraint(setup.constraint),
  };
}

/** Throws RangeError on anything but a record of this version and target. */
export function checkRecord(record: AnswerRecord, target: string): AnswerRecord {
  const wrong = (why: string) => new RangeError(`this is not a record of an answer of this bundle: ${why}`);
  const ids = (values: unknown) => Array.isArray(values) && values.every(id => Number.isSafeInteger(id) && id >= 0);
  if (record?.version !== VERSION) throw wrong(`version ${record?.version}, and this runtime reads ${VERSION}`);
  if (record.target !== target) throw wrong("it is of another target; ask the question again");
  if (!isArithmetic(record.arithmetic)) throw wrong("its arithmetic is not at most 64 printable characters");
  if (![record.prompt, record.committed, record.provisional].every(ids) || !record.prompt.length) throw wrong("tokens");
  if (!/^[0-9a-f]{32}$/.test(record.session) || !ids([record.seq, record.stream, record.maxNew]))
    throw wrong("numbers");
  const written = record.committed.length + record.provisional.length;
  if (record.writers?.reduce((at, [begin, end]) => (begin === at ? end : Number.NaN), 0) !== written)
    throw wrong("writers");
  if (record.constraint === undefined) throw wrong("constraint");
  try {
    constraintOrNull(record.constraint);
  } catch (error) {
    throw wrong(`constraint: ${error instanceof Error ? error.message : error}`);
  }
  return record;
}

/** Sampling, session id and constraint as a record has them. */
export function settingsOf(record: AnswerRecord) {
  const { seed, ...others } = record.sampling;
  const sessionId = Uint8Array.from(record.session.match(/../g)!, pair => Number.parseInt(pair, 16));
  const sampling = new Sampling({ ...others, seed: BigInt(seed) });
  return { sampling, sessionId, constraint: constraintOrNull(record.constraint) };
}

/** Restore a recorded answer in a session with its prompt and settings, which must not have started. */
export function restore(session: Session, record: AnswerRecord): void {
  session.text.committed.push(...record.committed);
  session.text.provisional = [...record.provisional];
  session.text.writers = record.writers.flatMap(([begin, end, writer]) => Array<Writer>(end - begin).fill(writer));
  session.verifier.seq = record.seq;
  session.verifier.pinned = record.arithmetic;
}
