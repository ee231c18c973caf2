/** Holds a token that is to be written alone until a reader can be expected to have read the one before. */

import type { WriteToken } from "./actions.js";
import type { Session } from "./session.js";

/** At most one WriteToken, held until its time has come. The first one is not held. */
export class HeldToken {
  private action: WriteToken | null = null;
  private due = 0;

  constructor(private readonly session: Session) {}

  hold(action: WriteToken): void {
    this.action = action;
  }

  /** When the token is due; null where none is held. */
  wakeAt(): number | null {
    return this.action ? this.due : null;
  }

  /** The token to write now, if its time has come or nobody wants it any more; it is not held after that. */
  release(now: number): WriteToken | null {
    const { action, session } = this;
    if (!action) return null;
    const wanted = action.version === session.version;
    if (wanted && session.solo.mayBeTakenBack && now < this.due) return null;
    this.action = null;
    if (wanted) this.due = now + 1 / session.policy.offlineRate;
    return action;
  }
}
