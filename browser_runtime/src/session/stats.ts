/** Counts that a session keeps of its answer. */

import type { Draft } from "../drafting/drafter.js";
import type { Arm } from "../speed/arms.js";
import { type Settled, wasDrafted } from "./settled.js";

/** Counts of one answer; seconds are as the driver measured them. */
export class SessionStats {
  /** Tree rounds with a verdict, catch-up rounds not counted; draft tokens accepted and nodes sent in them. */
  rounds = 0;
  accepted = 0;
  nodes = 0;
  /** Of these rounds, those whose tree the understudy drafted. */
  chains = 0;
  /** Tokens accepted in them. */
  chained = 0;
  catchUpRounds = 0;
  /** VERIFY and GENERATE sent. */
  calls = 0;
  /** Tokens that the target wrote by itself (GENERATE). */
  streamed = 0;
  /** Between VERIFY and its verdict, rounds of drafted trees only; of that, the verifier's engine. */
  waitSeconds = 0;
  engineSeconds = 0;
  /** Trees whose root could have been expanded ahead, whose root had been, and nodes below such roots. */
  aheadRounds = 0;
  aheadHits = 0;
  aheadUsed = 0;
  /** Tokens written offline; of these, by the understudy, verified later, rolled back, and kept unverified (`keep`). */
  provisional = 0;
  understudy = 0;
  kept = 0;
  rolledBack = 0;
  adopted = 0;
  stalls = 0;
  pauses = 0;
  opens = 0;

  /** Count a drafted tree. The first one of an answer could not be drafted ahead. */
  drafted(arm: Arm, draft: Draft): void {
    if (!this.rounds || arm === "chain") return;
    this.aheadRounds++;
    this.aheadHits += draft.ahead ? 1 : 0;
    this.aheadUsed += draft.kept;
  }

  /** Count a verdict with `fresh` tokens. catchingUp: provisional text followed it. */
  settled(settled: Settled, fresh: number, catchingUp: boolean): void {
    if (settled.arm === "stream") {
      this.streamed += fresh;
      return;
    }
    if (wasDrafted(settled)) {
      this.waitSeconds += settled.wait;
      this.engineSeconds += settled.engine;
    }
    if (catchingUp) {
      this.catchUpRounds++;
    } else {
      this.rounds++;
      this.chains += settled.arm === "chain" ? 1 : 0;
      this.chained += settled.arm === "chain" ? fresh - 1 : 0;
      this.accepted += fresh - 1;
      this.nodes += settled.tree.size;
    }
  }
}
