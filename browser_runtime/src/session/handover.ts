/** Who writes alone: the drafter at once, the understudy as soon as it has read the text. */

import type { ReadText } from "./actions.js";
import type { Policy } from "./policy.js";
import type { Writer } from "./states.js";

/** Tokens of new text after which an understudy that is kept warm reads on. */
const WARM_TOKENS = 64;
/** Tokens that it may still have to read before it writes the first one alone: nobody notices. */
const FEW_TOKENS = 8;

/**
 * How far the understudy is. absent: there is none, or the policy wants none. done: it has read the text, or nearly all of
 * it, and can write. broken: it failed, and is not asked again.
 */
type Reading = "absent" | "idle" | "under way" | "done" | "broken";

/** What the understudy was asked to read, and whether it may write. */
export class Handover {
  reading: Reading;
  /** text, base: of the last `ReadText`. */
  text: readonly number[] = [];
  base = 0;
  /** The drafter waits for what is read. */
  holds = false;
  /** Who wrote the last token alone. */
  writer: Writer = "drafter";
  private readonly warm: boolean;

  /** present: there is an understudy. */
  constructor(present: boolean, policy: Policy) {
    this.warm = policy.understudy === "warm";
    this.reading = present && policy.understudy !== "off" ? "idle" : "absent";
  }

  /** It will write, but cannot yet. */
  get coming(): boolean {
    return this.reading === "idle" || this.reading === "under way";
  }

  /** Who writes the next token alone. */
  get nextWriter(): Writer {
    return this.reading === "done" ? "understudy" : "drafter";
  }

  /** It has read along, and can draft what the target verifies. */
  get drafts(): boolean {
    return this.warm && this.reading === "done";
  }

  /** The committed text, which it reads as it drafts behind it, so that it need not be asked to. */
  readToDraft(committed: readonly number[]): number[] {
    const text = [...committed];
    this.text = text;
    return text;
  }

  /** Ask for `text` to be read, of which the tokens from `base` on are the drafter's own. */
  read(text: number[], base: number, holds = false): ReadText {
    this.reading = "under way";
    this.text = text;
    this.base = base;
    this.holds = holds;
    return { type: "ReadText", prefix: text, base };
  }

  /** Where it is kept warm, and enough is new in the committed text, ask for that to be read. */
  readAlong(committed: readonly number[]): ReadText[] {
    const idle = this.reading === "idle" || this.reading === "done";
    const fresh = committed.length - this.text.length;
    if (!this.warm || !idle || fresh < (this.text.length ? WARM_TOKENS : 1)) return [];
    return [this.read([...committed], committed.length)];
  }

  /** Whether `action` is what it is reading, and to a purpose. */
  reads(action: ReadText, alone: boolean): boolean {
    return this.reading === "under way" && this.text === action.prefix && (alone || this.warm);
  }

  /** The first token alone will stand behind `text`; the drafter writes it where too little of that is read. */
  begin(text: readonly number[]): void {
    const differs = this.text.findIndex((token, index) => token !== text[index]);
    const read = differs < 0 ? this.text.length : differs;
    if (this.reading === "done" && text.length - read > FEW_TOKENS) this.gaveUp();
  }

  /** The text is read. Whether that is how `text` begins, and to a purpose, so that it can write now. */
  hasRead(text: readonly number[], alone: boolean): boolean {
    const begins = this.text.length <= text.length && this.text.every((token, index) => token === text[index]);
    const ready = begins && (alone || this.warm);
    if (ready) this.reading = "done";
    else this.gaveUp();
    return ready;
  }

  /** Nothing is known to be read. */
  gaveUp(): void {
    this.reading = "idle";
    this.text = [];
  }

  /** It will not be asked again. */
  failed(): void {
    this.reading = "broken";
    this.writer = "drafter";
  }

  /** Nobody writes alone any more. */
  targetIsBack(): void {
    this.writer = "drafter";
    this.holds = false;
    if (this.reading === "done" && !this.warm) this.reading = "idle";
  }
}
