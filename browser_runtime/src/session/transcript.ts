/** The tokens of one answer, and how verified and provisional ones become each other. */

import type { FinishReason } from "../protocol/ending.js";
import { commonPrefix } from "../protocol/prefix.js";
import type { Action } from "./actions.js";
import type { Writer } from "./states.js";
import type { SessionStats } from "./stats.js";

/** This many tokens in a row that occur in the answer already are a loop. */
const LOOP = 24;

/** Tokens `begin` to `end` - 1 of an answer are `writer`'s. */
export interface Span {
  begin: number;
  end: number;
  writer: Writer;
}

/**
 * `committed`: the prompt and the tokens that the target drew. `provisional`, after them: offline tokens.
 *
 * begin: length of the prompt. limit: most tokens, prompt included.
 */
export class Transcript {
  provisional: number[] = [];
  /** The writer of each of the answer's tokens, provisional ones included. */
  writers: Writer[] = [];
  /** A stop string came in the provisional text. */
  enough = false;

  constructor(
    readonly committed: number[],
    private readonly begin: number,
    public limit: number,
    private readonly eosIds: ReadonlySet<number>,
    private readonly stats: SessionStats,
  ) {}

  get answer(): number[] {
    return [...this.committed.slice(this.begin), ...this.provisional];
  }

  /** Who wrote which part of the answer, in order. */
  get spans(): Span[] {
    const spans: Span[] = [];
    for (const [index, writer] of this.writers.entries()) {
      const last = spans.at(-1);
      if (last?.writer === writer) last.end++;
      else spans.push({ begin: index, end: index + 1, writer });
    }
    return spans;
  }

  /** Levels that a tree may have; the bonus token takes the last place. */
  get room(): number {
    return this.limit - this.committed.length - 1;
  }

  /** The target ended the answer. */
  get ended(): boolean {
    return this.committed.length > this.begin && this.eosIds.has(this.committed[this.committed.length - 1]);
  }

  get over(): boolean {
    return this.ended || this.committed.length >= this.limit;
  }

  /** The text, provisional part included, is at its end, or the drafter only repeats itself. */
  get full(): boolean {
    return this.endAlone !== null;
  }

  /** How the text has ended, provisional part included; null if more may follow. */
  get endAlone(): FinishReason | null {
    const last = this.provisional.at(-1);
    if (this.enough || (last !== undefined && this.eosIds.has(last))) return "stop";
    return this.committed.length + this.provisional.length >= this.limit || this.looping() ? "length" : null;
  }

  /** The part of `fresh`, the target's next tokens, that belongs to the answer. */
  within(fresh: number[]): number[] {
    const end = fresh.findIndex(token => this.eosIds.has(token));
    const most = Math.min(end < 0 ? fresh.length : end + 1, this.limit - this.committed.length);
    return fresh.slice(0, Math.max(0, most));
  }

  /** Add `token`, which `writer` wrote offline. */
  provide(token: number, writer: Writer): void {
    this.provisional.push(token);
    this.writers.push(writer);
    this.stats.provisional++;
    if (writer === "understudy") this.stats.understudy++;
  }

  /** Count the tokens of `fresh` that agree with the provisional text. */
  agreeing(fresh: readonly number[]): number {
    return commonPrefix(fresh, this.provisional);
  }

  /** Add the target's tokens `fresh`: confirm equal provisional ones, and roll the rest back at the first difference. */
  commit(fresh: number[]): Action[] {
    const same = this.agreeing(fresh);
    const actions = same < fresh.length ? this.withdrawProvisional(same) : [];
    this.provisional = this.provisional.slice(same);
    this.writers.splice(this.length, same, ...fresh.map((): Writer => "target"));
    this.committed.push(...fresh);
    this.stats.kept += same;
    if (fresh.length) actions.push({ type: "Commit", tokens: fresh, confirmed: same });
    return actions;
  }

  /** Make provisional text part of the answer as it is. Returns its tokens. */
  adopt(): number[] {
    const tokens = this.provisional;
    this.provisional = [];
    this.committed.push(...tokens);
    this.stats.adopted += tokens.length;
    return tokens;
  }

  /** Withdraw the last `surplus` committed tokens, adopted ones among them. */
  withdraw(surplus: number): void {
    const end = this.length - surplus;
    const gone = this.writers.splice(end, surplus).filter(writer => writer !== "target").length;
    this.committed.length -= surplus;
    this.stats.adopted -= gone;
    this.stats.rolledBack += gone;
  }

  /** Withdraw all provisional tokens but the first `keep`. */
  withdrawProvisional(keep = 0): Action[] {
    this.enough = false;
    const rest = this.provisional.splice(keep);
    if (!rest.length) return [];
    this.writers.length -= rest.length;
    this.stats.rolledBack += rest.length;
    return [{ type: "RollBack", tokens: rest }];
  }

  /** Tokens of the committed answer. */
  get length(): number {
    return this.committed.length - this.begin;
  }

  /** The last LOOP tokens were written offline and occur in the answer already. */
  private looping(): boolean {
    if (this.provisional.length < LOOP) return false;
    const answer = this.answer;
    const from = answer.length - LOOP;
    for (let at = 0; at < from; at++) {
      let same = 0;
      while (same < LOOP && answer[at + same] === answer[from + same]) same++;
      if (same === LOOP) return true;
    }
    return false;
  }
}
