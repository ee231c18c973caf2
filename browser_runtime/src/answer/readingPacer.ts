/** Holds a token that is to be written alone until a reader can be expected to have read the one before. */

import type { WriteToken } from "../session/actions.js";

/** Seconds that a writer is behind a reader, at most, and makes up for. */
const MADE_UP = 1;

/**
 * Somebody who reads what is written alone, at `rate` tokens per second, from the first token on.
 *
 * committed, provisional: tokens of the text that are verified, and unverified ones behind them.
 */
export class Reader {
  /** Tokens of a text, behind which reading ... */
  private committed = -1;
  /** ... began then. */
  private began = 0;
  /** When another token would be read, anywhere. */
  private next = 0;

  constructor(private readonly rate: number) {}

  /** When the reader reaches the next token; that is past if other tokens stood there before. */
  due(committed: number, provisional: number): number {
    return committed === this.committed ? this.began + provisional / this.rate : this.next;
  }

  /** Another token stands there. */
  shown(committed: number, provisional: number, now: number): void {
    const came = now - provisional / this.rate; // who was there just now began then
    this.began = committed === this.committed ? Math.max(this.began, came - MADE_UP) : came;
    [this.committed, this.next] = [committed, now + 1 / this.rate];
  }
}

/** At most one WriteToken, held until its time has come. The first one is not held. */
export class HeldToken {
  private action: WriteToken | null = null;
  /** Where a paced token will stand, as in `Reader`. */
  private place: [committed: number, provisional: number] | null = null;
  private readonly reader: Reader;

  constructor(rate: number) {
    this.reader = new Reader(rate);
  }

  /**
   * Hold `action`, whose token will stand behind `committed` verified ones and what is provisional; without `paced` it is
   * due at once.
   */
  hold(action: WriteToken, committed: number, paced: boolean): void {
    this.action = action;
    this.place = paced ? [committed, action.prefix.length - committed] : null;
  }

  /** When the token is due; null if none is held. */
  wakeAt(): number | null {
    if (!this.action) return null;
    return this.place ? this.reader.due(...this.place) : 0;
  }

  /**
   * The token to write now, if its time has come or it is stale, as jobs carry `version` now; from then on it is not held.
   */
  release(now: number, version: number): WriteToken | null {
    const { action, place } = this;
    const due = this.wakeAt();
    if (!action || due === null || (action.version === version && now < due)) return null;
    this.action = null;
    if (place && action.version === version) this.reader.shown(...place, now);
    return action;
  }
}
