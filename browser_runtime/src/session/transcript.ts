/** The tokens of one answer, and how verified and provisional ones become each other. */

import type { Action } from "./actions.js";
import type { Writer } from "./states.js";

/** This many tokens in a row that stand in the answer already are a loop. */
const LOOP = 24;

/** What a session counts. */
export class SessionStats {
  /** Tree rounds with a verdict, catch-up rounds not counted; draft tokens accepted and nodes sent in them. */
  rounds = 0;
  accepted = 0;
  nodes = 0;
  /** Of these rounds, those whose tree the understudy drafted. */
  chains = 0;
  catchUpRounds = 0;
  /** Tokens that the target wrote alone (GENERATE). */
  streamed = 0;
  /** Tokens written alone; of these, by the understudy, verified later, withdrawn, and kept unverified. */
  provisional = 0;
  understudy = 0;
  kept = 0;
  rolledBack = 0;
  adopted = 0;
  stalls = 0;
  pauses = 0;
  opens = 0;
  /** VERIFY and GENERATE sent. */
  calls = 0;
  /** Seconds between VERIFY and its verdict, rounds of drafted trees only; of that, the verifier's engine. */
  waitSeconds = 0;
  engineSeconds = 0;
  /** Trees whose root could have been expanded ahead, whose root had been, and nodes below such roots. */
  aheadRounds = 0;
  aheadHits = 0;
  aheadUsed = 0;

  /** A verdict brought `fresh` tokens. nodes: of the tree; null: a stream's. chain: the understudy drafted it. */
  count(nodes: number | null, fresh: number, catchingUp: boolean, chain: boolean): void {
    if (nodes === null) this.streamed += fresh;
    else if (catchingUp) this.catchUpRounds++;
    else {
      this.rounds++;
      this.chains += chain ? 1 : 0;
      this.accepted += fresh - 1;
      this.nodes += nodes;
    }
  }
}

/** Tokens `begin` to `end` - 1 of an answer are `writer`'s. */
export interface Span {
  begin: number;
  end: number;
  writer: Writer;
}

/**
 * `committed`: the prompt and what the target drew. `provisional`, behind them: what was written alone.
 *
 * begin: length of the prompt. limit: tokens at most, prompt included.
 */
export class AnswerTokens {
  provisional: number[] = [];
  /** Of the answer's tokens, provisional ones included, each one's. */
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

  /** Who wrote what of the answer, in order. */
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

  /** The text, provisional part included, is at its end; or the drafter only repeats itself. */
  get full(): boolean {
    const last = this.provisional.at(-1);
    const ended = this.enough || (last !== undefined && this.eosIds.has(last));
    return ended || this.committed.length + this.provisional.length >= this.limit || this.looping();
  }

  /** What of `fresh`, the target's next tokens, belongs to the answer. */
  within(fresh: number[]): number[] {
    const end = fresh.findIndex(token => this.eosIds.has(token));
    const most = Math.min(end < 0 ? fresh.length : end + 1, this.limit - this.committed.length);
    return fresh.slice(0, Math.max(0, most));
  }

  /** `writer` wrote `token` alone. */
  provide(token: number, writer: Writer): void {
    this.provisional.push(token);
    this.writers.push(writer);
    this.stats.provisional++;
    if (writer === "understudy") this.stats.understudy++;
  }

  /** How many of `fresh` stand in the provisional text already. */
  agreeing(fresh: readonly number[]): number {
    const most = Math.min(fresh.length, this.provisional.length);
    let same = 0;
    while (same < most && fresh[same] === this.provisional[same]) same++;
    return same;
  }

  /** `fresh` are the target's: what agrees is confirmed; at the first difference the rest is rolled back. */
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

  /** Provisional text becomes part of the answer as it is. Returns its tokens. */
  adopt(): number[] {
    const tokens = this.provisional;
    this.provisional = [];
    this.committed.push(...tokens);
    this.stats.adopted += tokens.length;
    return tokens;
  }

  /** Take the last `surplus` committed tokens back, adopted ones among them. */
  withdraw(surplus: number): void {
    const end = this.length - surplus;
    const gone = this.writers.splice(end, surplus).filter(writer => writer !== "target").length;
    this.committed.length -= surplus;
    this.stats.adopted -= gone;
    this.stats.rolledBack += gone;
  }

  /** Take all provisional tokens but the first `keep` back. */
  withdrawProvisional(keep = 0): Action[] {
    this.enough = false;
    const rest = this.provisional.splice(keep);
    if (!rest.length) return [];
    this.writers.length -= rest.length;
    this.stats.rolledBack += rest.length;
    return [{ type: "RollBack", tokens: rest }];
  }

  /** Tokens of the committed answer. */
  private get length(): number {
    return this.committed.length - this.begin;
  }

  /** The last LOOP tokens were written alone and stand in the answer already. */
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
