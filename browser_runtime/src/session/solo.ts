/** Writing without the target: whether that may be done, and why not. */

import type { Policy } from "./policy.js";
import type { PauseReason, Writer } from "./states.js";

/** Tokens over which the drafter's confidence is averaged. */
const CONFIDENCE_WINDOW = 8;
/** Tokens that the drafter writes alone to finish a sentence, at most. */
const SENTENCE_TOKENS = 24;

/** What the policy allows to be written without the target. */
export class Solo {
  /** The target is silent. */
  alone = false;
  /** The device's writers can be held to the answer's constraint, if it has one. */
  obeys = true;
  paused: PauseReason | null = null;
  private confidence: number[] = [];
  /** Tokens that the drafter wrote since the target fell silent; whether the last of them ended a sentence. */
  private drafted = 0;
  private endedSentence = false;
  /** Somebody asked to go on. */
  private urged = false;

  /** sentenceEnds: tokens that end a sentence or a line. */
  constructor(
    private readonly policy: Policy,
    private readonly sentenceEnds: ReadonlySet<number>,
  ) {}

  /** The device writes without waiting for the target. */
  get writesFirst(): boolean {
    return (this.policy.writer === "prefer-device" || this.policy.writer === "device-only") && !this.mute;
  }

  /** Nothing is written alone, whatever happens to the link. */
  get mute(): boolean {
    return this.paused !== null || !this.obeys || this.policy.writer === "cloud-only";
  }

  /** What is written now may be taken back, as the target may return. */
  get mayBeTakenBack(): boolean {
    return this.alone && this.policy.writer !== "device-only";
  }

  /** Whether another token may follow `provisional` unverified ones. */
  mayWrite(provisional: number): boolean {
    if (this.mute) return false;
    if (this.policy.writer === "prefer-device" && !this.alone) return provisional < this.policy.lead;
    return this.alone;
  }

  /** The drafter has written as much alone as anybody wants to read. */
  get drafterIsDone(): boolean {
    const limited = this.policy.offline === "sentence" && this.mayBeTakenBack && !this.urged;
    return limited && (this.endedSentence || this.drafted >= SENTENCE_TOKENS);
  }

  /** `writer` wrote `token`, to which it gives the probability `confidence`. */
  wrote(token: number, confidence: number, writer: Writer): void {
    this.confidence = [...this.confidence, confidence].slice(-CONFIDENCE_WINDOW);
    if (!this.alone || writer !== "drafter") return;
    this.drafted++;
    this.endedSentence = this.sentenceEnds.has(token);
  }

  /** Another writes from here on. */
  handedOver(): void {
    this.confidence = [];
  }

  /** The policy wants a pause, as too little probability was given to what was written last. */
  get doubts(): boolean {
    if (this.policy.offline !== "pause" || this.confidence.length < CONFIDENCE_WINDOW) return false;
    const mean = this.confidence.reduce((sum, one) => sum + one, 0) / this.confidence.length;
    return mean < this.policy.minConfidence;
  }

  /** Somebody asked to go on. */
  proceed(): void {
    this.paused = null;
    this.urged = true;
    this.confidence = [];
  }

  /** The target answers again; a pause that somebody asked for stays. */
  targetIsBack(): void {
    this.alone = false;
    if (this.paused !== "asked") this.paused = null;
    this.drafted = 0;
    this.endedSentence = this.urged = false;
    this.confidence = [];
  }
}
