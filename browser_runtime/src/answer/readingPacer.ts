/** Holds a token that is to be written alone until a reader can be expected to have read the one before. */

import type { WriteToken } from "../session/actions.js";
import type { Session } from "../session/session.js";

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
  /** When another token would be read, wherever it stands. */
  private next = 0;

  constructor(private readonly rate: number) {}

  /** When the reader comes to where the next token will stand; that is over where others stood there before. */
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
  private readonly reader: Reader;

  constructor(private readonly session: Session) {
    this.reader = new Reader(session.policy.offlineRate);
  }

  hold(action: WriteToken): void {
    this.action = action;
  }

  /** When the token is due; null where none is held. */
  wakeAt(): number | null {
    return this.action && this.reader.due(this.session.committed.length, this.session.provisional.length);
  }

  /** The token to write now, if its time has come or nobody wants it any more; it is not held after that. */
  release(now: number): WriteToken | null {
    const { action, session } = this;
    const due = this.wakeAt();
    if (!action || due === null) return null;
    const paced = action.version === session.version && session.solo.mayBeTakenBack;
    if (paced && now < due) return null;
    this.action = null;
    if (paced) this.reader.shown(session.committed.length, session.provisional.length, now);
    return action;
  }
}
