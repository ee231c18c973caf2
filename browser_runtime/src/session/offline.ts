/** Decides who writes while the target is silent: the drafter at once, the understudy once it has read the text. */

import { commonPrefix } from "../protocol/prefix.js";
import type { HandOver, ReadText } from "./actions.js";
import type { Policy } from "./policy.js";
import type { PauseReason, Writer } from "./states.js";

/** Tokens over which the writer's confidence is averaged. */
const CONFIDENCE_WINDOW = 8;
/** Most tokens that the drafter writes offline to finish a sentence. */
const SENTENCE_TOKENS = 24;
/** New tokens after which an understudy that is kept warm reads on. */
const WARM_TOKENS = 64;
/** Unread tokens at which it may write already: too few to notice. */
const FEW_TOKENS = 8;
/** Seconds that an answer waits at its end for a verifier that accepts it, if the last one did not. */
export const REFUSED_SECONDS = 10;

/**
 * The understudy's progress in reading. absent: there is none, or the policy excludes it. done: it has read the text, or
 * nearly all of it, and can write. broken: it failed, and is not asked again.
 */
type Reading = "absent" | "idle" | "under way" | "done" | "broken";

export class OfflineWriter {
  /** The target is silent. */
  active = false;
  /** Why offline writing is paused; null if it is not. */
  paused: PauseReason | null = null;
  /** When the wait for the target ends, once offline writing has stopped. */
  giveUpAt: number | null = null;
  private confidence: number[] = [];
  /** Tokens that the drafter wrote since the target fell silent; whether the last of them ended a sentence. */
  private drafted = 0;
  private endedSentence = false;
  /** `proceed` was called. */
  private urged = false;
  private reading: Reading;
  /** The last text that the understudy should read; its tokens from `base` on are the drafter's own. */
  private text: readonly number[] = [];
  private base = 0;
  /** The drafter waits for what is read. */
  private holds = false;
  /** The writer of the last offline token. */
  private writer: Writer = "drafter";
  private readonly warm: boolean;
  private waitSeconds: number;

  /**
   * understudy: there is one. sentenceEnds: tokens that end a sentence or a line. supported: the device's writers can obey
   * the answer's constraint, if it has one. usualWait: seconds to wait for the target once offline writing has stopped.
   * drafter: there is one; otherwise only the understudy writes, and it reads along.
   */
  constructor(
    private readonly policy: Policy,
    understudy: boolean,
    private readonly sentenceEnds: ReadonlySet<number>,
    public supported: boolean,
    private readonly usualWait: number,
    private readonly drafter = true,
  ) {
    this.warm = policy.understudy === "warm" || !drafter;
    this.reading = understudy && policy.understudy !== "off" ? "idle" : "absent";
    this.waitSeconds = usualWait;
  }

  // --- whether ---

  /** The target is never asked. */
  get deviceOnly(): boolean {
    return this.policy.writer === "device-only";
  }

  /** The device may write none of this answer. */
  get silenced(): boolean {
    return !this.supported || this.policy.writer === "cloud-only";
  }

  /** Offline writing is paused, whatever happens to the link. */
  get muted(): boolean {
    return this.silenced || this.paused !== null;
  }

  /** The device writes without waiting for the target. */
  get writesFirst(): boolean {
    const can = this.drafter || (this.reading !== "absent" && this.reading !== "broken");
    return can && (this.policy.writer === "prefer-device" || this.deviceOnly) && !this.muted;
  }

  /** Whether the target may return and roll back what is written now. */
  get mayBeTakenBack(): boolean {
    return this.active && !this.deviceOnly;
  }

  /** Whether another token may follow `provisional` unverified ones. */
  mayWrite(provisional: number): boolean {
    if (this.muted || this.active) return !this.muted;
    return this.policy.writer === "prefer-device" && provisional < this.policy.lead;
  }

  /** The drafter has written as much as is useful, or is missing. */
  private get drafterIsDone(): boolean {
    if (!this.drafter) return true;
    const limited = this.policy.offline === "sentence" && this.mayBeTakenBack && !this.urged;
    return limited && (this.endedSentence || this.drafted >= SENTENCE_TOKENS);
  }

  // --- the target falls silent, and returns ---

  /** The target is silent. */
  start(): void {
    this.active = true;
  }

  /** The target answers again; a pause by `pause` remains. */
  stop(): void {
    this.active = false;
    this.giveUpAt = null;
    if (this.paused !== "asked") this.paused = null;
    this.drafted = 0;
    this.endedSentence = this.urged = this.holds = false;
    this.confidence = [];
    this.writer = "drafter";
    if (this.reading === "done" && !this.warm) this.reading = "idle";
  }

  /** Wait a limited time for the target, as nothing more can be written. Returns false if it will not come. */
  wait(now: number): boolean {
    this.giveUpAt ||= now + (this.paused === "asked" ? this.usualWait : this.waitSeconds);
    return !this.deviceOnly || (this.muted && this.paused !== "limit");
  }

  /** From now on wait no longer than `seconds` for the target. */
  expectReturn(seconds: number, now: number): void {
    this.waitSeconds = Math.min(seconds, this.usualWait);
    if (this.giveUpAt !== null && this.paused !== "asked")
      this.giveUpAt = Math.min(this.giveUpAt, now + this.waitSeconds);
  }

  /** Note that a verifier accepts this answer: if it falls silent, wait for it as long as usual. */
  accepted(): void {
    this.waitSeconds = this.usualWait;
  }

  /** Write nothing more, until the target answers or `proceed` is called. */
  pause(reason: PauseReason): void {
    this.paused = reason;
  }

  /** Lift a pause. */
  proceed(): void {
    this.paused = this.giveUpAt = null;
    this.urged = true;
    this.confidence = [];
  }

  /** Set whether the device's writers can obey the answer's constraint. */
  setSupported(supported: boolean): void {
    this.supported = supported;
    if (supported && !this.paused) this.giveUpAt = null;
  }

  // --- who ---

  /** The understudy will write, but cannot yet. */
  private get coming(): boolean {
    return this.reading === "idle" || this.reading === "under way";
  }

  /** The understudy has read along, and can draft for the target. */
  get drafts(): boolean {
    return this.warm && this.reading === "done";
  }

  /**
   * Return who writes the next token, or why none is written; null while the drafter waits for the understudy, which is
   * still reading.
   */
  nextWriter(): "understudy" | "drafter" | "limit" | null {
    if (this.reading === "done") return "understudy";
    if (!this.active && this.drafter) return "drafter";
    const enough = this.drafterIsDone || this.deviceOnly || this.holds;
    if (this.coming && enough) return null;
    return this.drafterIsDone ? "limit" : "drafter";
  }

  /** Let `writer` write the next token. */
  handOver(writer: Writer): HandOver[] {
    if (writer === this.writer) return [];
    this.writer = writer;
    this.confidence = [];
    return [{ type: "HandOver", writer, why: "" }];
  }

  /**
   * Note that `writer` wrote `token` with probability `confidence`. Returns whether to continue: not if the policy wants a
   * pause, as the last tokens were improbable. An understudy that will soon write may be surer.
   */
  wrote(token: number, confidence: number, writer: Writer): boolean {
    this.confidence = [...this.confidence, confidence].slice(-CONFIDENCE_WINDOW);
    if (this.active && writer === "drafter") {
      this.drafted++;
      this.endedSentence = this.sentenceEnds.has(token);
    }
    const { length } = this.confidence;
    const mean = this.confidence.reduce((sum, one) => sum + one, 0) / length;
    const sure = length < CONFIDENCE_WINDOW || mean >= this.policy.minConfidence;
    return sure || this.policy.offline !== "pause" || this.coming;
  }

  // --- the understudy reads ---

  /** Return a request to read before the understudy writes. A drafter's first token comes before that work. */
  readToWrite(committed: readonly number[], provisional: readonly number[]): ReadText[] {
    if (!this.active) return [];
    const text = [...committed, ...provisional];
    const unread = text.length - commonPrefix(this.text, text);
    // the drafter writes the first token if too little is read
    if (!provisional.length && this.reading === "done" && unread > FEW_TOKENS) this.gaveUp();
    const begun = provisional.length > 0 || this.deviceOnly || !this.drafter;
    return this.reading === "idle" && begun ? [this.ask(text, committed.length)] : [];
  }

  /** Return the committed text, which the understudy reads as it drafts, so that it need not be requested. */
  readToDraft(committed: readonly number[]): number[] {
    const text = [...committed];
    this.text = text;
    return text;
  }

  /** Return a request to read new committed text, if the understudy is kept warm and there is enough. */
  readAlong(committed: readonly number[]): ReadText[] {
    const idle = this.reading === "idle" || this.reading === "done";
    const fresh = committed.length - this.text.length;
    if (!this.warm || !idle || fresh < (this.text.length ? WARM_TOKENS : 1)) return [];
    return [this.ask([...committed], committed.length)];
  }

  /** Whether the understudy is reading for `action`, and that is still useful. */
  stillReads(action: ReadText): boolean {
    return this.reading === "under way" && this.text === action.prefix && (this.active || this.warm);
  }

  /**
   * Note that the understudy has read the text, or has cancelled that (null); `agreed`: see `ReadText`.
   *
   * Returns how many of the provisional tokens to keep, as it would have written them itself; if none of those that it read
   * are withdrawn, a request to read what the drafter wrote meanwhile, while that one waits; null if nothing follows.
   */
  hasRead(
    agreed: number | null,
    committed: readonly number[],
    provisional: readonly number[],
  ): ReadText | number | null {
    const text = [...committed, ...provisional];
    const read = this.text.length;
    if (agreed === null || commonPrefix(this.text, text) < read || !(this.active || this.warm)) {
      this.gaveUp();
      return null;
    }
    this.reading = "done";
    const judged = Math.max(this.base + agreed, committed.length);
    if (!this.active || judged >= text.length) return null;
    if (judged < read) return judged - committed.length;
    return this.ask(text, judged, true);
  }

  /** Stop using the understudy, as it failed. */
  understudyFailed(): void {
    this.reading = "broken";
    this.writer = "drafter";
  }

  private ask(text: number[], base: number, holds = false): ReadText {
    this.reading = "under way";
    this.text = text;
    this.base = base;
    this.holds = holds;
    return { type: "ReadText", prefix: text, base };
  }

  /** Forget what the understudy has read. */
  private gaveUp(): void {
    this.reading = "idle";
    this.text = [];
  }
}
