/** Which arm writes: whichever promises most tokens per second, and now and then another one, to know what it brings. */

import { best, EVERY, type Rates } from "./explorer.js";
import { Pace } from "./pace.js";
import type { Arm } from "./settled.js";

/**
 * Chooses with hysteresis, from the measurements of `pace`. pinned: always this arm; trees and chains are one then.
 *
 * While streaming, the device drafts trees and chains for comparison. While drafting trees, it knows a stream's time per
 * token only from the verifier's curve, which may be wrong, and nothing of chains: so it tries them now and then.
 */
export class Controller {
  arm: Arm = "tree";
  /** Steps that are left of a trial, the arm before it, and steps in which another arm promised more. */
  trial = 0;
  private home: Arm = "tree";
  private better = 0;

  constructor(
    readonly pace = new Pace(),
    public pinned: Arm | null = null,
  ) {}

  /**
   * The arm of an answer. unknown: nothing tells of it yet; otherwise it goes on, on a new link. There is no hysteresis in
   * either case.
   */
  begin(unknown = true): Arm {
    if (!unknown) {
      this.better = EVERY;
      return this.choose();
    }
    const before = this.trial ? this.home : this.arm;
    this.trial = this.better = 0;
    this.pace.forgetAnswer();
    this.arm = best(this.rates(), before, 1);
    return this.arm;
  }

  /** After every verdict, a step. */
  choose(): Arm {
    const rates = this.rates();
    if (this.trial) {
      if (!--this.trial) this.switch(best(rates, this.home));
      return this.arm;
    }
    const other = best(rates, this.arm);
    // a delayed token is followed by a burst: a stream is not left for a few of them
    this.better = other === this.arm ? 0 : this.better + 1;
    if (this.better >= (this.arm === "stream" && rates.has("stream") ? EVERY : 1)) this.switch(other);
    else if (this.arm !== "stream") this.maybeTry(rates);
    return this.arm;
  }

  /** Whether to draft for `arm` beside the one in use. */
  compares(arm: Arm): boolean {
    const { explorer, costs } = this.pace;
    if (this.arm === "chain") return explorer.due(arm, 0, 1); // the drafter is idle
    const rates = this.pace.rates();
    const [now, other] = [rates.get(this.arm), rates.get(arm)];
    return explorer.due(arm, costs.exposed, now && other ? now / other : 1);
  }

  private rates(): Rates {
    const rates = this.pace.rates();
    if (this.pinned === "stream") return new Map([["stream", rates.get("stream") ?? Number.POSITIVE_INFINITY]]);
    if (this.pinned) rates.delete("stream");
    return rates;
  }

  private switch(arm: Arm): void {
    this.arm = arm;
    this.better = 0;
  }

  /** Try a stream for a few tokens, or one chain, if it is due. */
  private maybeTry(rates: Rates): void {
    const { costs, chain, explorer } = this.pace;
    const [now, chains, stream] = [rates.get(this.arm)!, rates.get("chain"), rates.get("stream")];
    const due = (rate: number) => explorer.due("chain", costs.round(1) * Math.max(0, 1 - rate / now), now / rate);
    if (this.arm === "tree" && chain.ready && (chains === undefined || due(chains))) {
      this.try("chain", 1);
    } else if (stream !== undefined) {
      const cost = costs.round(0) - costs.step(0) + EVERY * Math.max(0, 1 / stream - 1 / now);
      if (explorer.due("stream", cost, now / stream)) this.try("stream", EVERY);
    }
  }

  private try(arm: Arm, steps: number): void {
    this.home = this.arm;
    this.trial = steps;
    this.switch(arm);
  }
}
