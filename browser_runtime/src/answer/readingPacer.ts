/** Hold an offline token until a reader has probably read the one before. */

import type { WriteToken } from "../session/actions.js";

/** Most seconds that a writer may lag behind a reader and then catch up. */
const MADE_UP = 1;

/**
 * Models a reader of offline text, at `rate` tokens per second, from the first token on.
 *
 * committed, provisional: verified tokens of the text, and unverified ones after them.
 */
export class Reader {
  /** Tokens of the text after which reading began ... */
  private committed = -1;
  /** ... at this time. */
  private began = 0;
  /** When another token would be read, anywhere. */
  private next = 0;

  constructor(private readonly rate: number) {}

  /** Return when the reader reaches the next token; that is past if other tokens stood there before. */
  due(committed: number, provisional: number): number {
    return committed === this.committed ? this.began + provisional / this.rate : this.next;
  }

  /** Note that another token is shown there. */
  shown(committed: number, provisional: number, now: number): void {
    const came = now - provisional / this.rate; // a reader who is there now began then
    this.began = committed === this.committed ? Math.max(this.began, came - MADE_UP) : came;
    [this.committed, this.next] = [committed, now + 1 / this.rate];
  }
}

/** Holds at most one WriteToken until its time has come. The first one is not held. */
export class HeldToken {
  private action: WriteToken | null = null;
  /** Where a paced token will stand, as in `Reader`. */
  private place: [committed: number, provisional: number] | null = null;
  private readonly reader: Reader;

  constructor(rate: number) {
    this.reader = new Reader(rate);
  }

  /**
   * Hold `action`, whose token will follow `committed` verified ones and the provisional ones. Without `paced` it is due at
   * once.
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

  /** Release the token to write now, if its time has come or `version` shows that it is stale. */
  release(now: number, version: number): WriteToken | null {
    const { action, place } = this;
    const due = this.wakeAt();
    if (!action || due === null || (action.version === version && now < due)) return null;
    this.action = null;
    if (place && action.version === version) this.reader.shown(...place, now);
    return action;
  }
}
