/** One answer, one arithmetic: what its verified text was computed in, and who may go on with it. */

import type { Action } from "./actions.js";

export class AnswerArithmetic {
  /** What the answer's verified text was computed in; "" where there is none yet, or its verifier did not say. */
  pinned = "";
  /** What the link's verifier computes in; "" where it does not say. */
  offered = "";

  /** What the link is to look for. */
  get wanted(): Action[] {
    return this.pinned ? [{ type: "Pin", arithmetic: this.pinned }] : [];
  }

  /** The link's verifier has written some of the answer: the rest is to be computed like that. */
  pin(): Action[] {
    if (this.pinned || !this.offered) return [];
    this.pinned = this.offered;
    return this.wanted;
  }
}
