/** Runtimes over a drafter of hashes and the fake verifier. */

import assert from "node:assert/strict";
import { LocalDrafter } from "../src/answer/drafterThread.js";
import type { Bundle } from "../src/bundle/bundle.js";
import { Drafter } from "../src/drafting/drafter.js";
import type { Event, Finished } from "../src/events.js";
import type { Weather } from "../src/link/weather.js";
import { RowShape } from "../src/protocol/rows.js";
import { EdgeRuntime, type Options } from "../src/runtime.js";
import { ALPHABET, EOS, type FakeVerifier, plain } from "./fakeVerifier.js";
import { HashEngine } from "./hashEngine.js";

export const PROMPT = [5, 9, 2];
export const shape = new RowShape(1, 2);
export const draftIds = Uint32Array.from({ length: ALPHABET }, (_, token) => token);

/** The part of a bundle that a runtime reads; a token's text is a letter. */
export const bundle = {
  manifest: { targetHash: "target", drafterHash: "drafter", vocabSize: 64, eosIds: [EOS], maxContext: 200 },
  rowShape: shape,
  sentenceEnds: new Set(),
  tokenizer: { decode: (ids: number[]) => ids.map(id => String.fromCharCode(97 + id)).join("") },
} as unknown as Bundle;

export function drafterOf(script: readonly number[] = []): LocalDrafter {
  const engine = new HashEngine(Array.from(draftIds), 2, 2, script);
  return new LocalDrafter(new Drafter(engine, { draftIds, rowShape: shape, saKvHeads: 1, maxContext: 200 }), () =>
    engine.close(),
  );
}

export function runtimeOf(verifier: FakeVerifier | Weather | null, options: Options = {}): EdgeRuntime {
  const script = [...PROMPT, ...plain(PROMPT, 190)];
  const server = verifier ? "127.0.0.1:1" : null;
  return new EdgeRuntime(bundle, drafterOf(script), server, { makeSocket: verifier?.makeSocket, ...options });
}

/** Texts on the screen must never lose verified text. `each` is called with every event. */
export async function read(events: AsyncGenerator<Event>, each: (event: Event) => void = () => {}): Promise<Finished> {
  let verified = "";
  let last: Event | null = null;
  for await (const event of events) {
    assert.ok(event.verified.startsWith(verified), `${event.type} takes verified text back`);
    verified = event.verified;
    last = event;
    each(event);
  }
  assert.ok(last?.type === "finished");
  return last;
}
