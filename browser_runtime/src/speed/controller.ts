/**
 * What was measured of drafter, link and target, and which arm writes by it: whichever promises most tokens per second, and
 * now and then another one, to know what it brings. Seconds throughout.
 */

import { CostCurve } from "../protocol/costs.js";
import type { Welcome } from "../protocol/messages.js";
import type { TokenTree } from "../protocol/tree.js";
import { Ahead } from "./ahead.js";
import { type Arm, ChainArm, PRIOR_STEPS, StreamArm, TreeArm } from "./arms.js";
import { blend, CostModel, LEAST_SECONDS, OUTLIER } from "./costModel.js";
import { best, EVERY, Explorer, type Rates } from "./explorer.js";

/** What a verifier measured of itself. */
type Measured = Pick<Welcome, "costs" | "streamTokens" | "queueUs">;

/**
 * Measures one verifier, its link and the drafter, and chooses with hysteresis; it outlives answers. pinned: always this arm;
 * trees and chains are one then.
 *
 * While streaming, the device drafts trees and chains for comparison. While drafting trees, it knows a stream's time per
 * token only from the verifier's curve, which may be wrong, and nothing of chains: so it tries them now and then.
 */
export class Controller {
  costs = new CostModel();
  readonly tree = new TreeArm();
  readonly chain = new ChainArm();
  stream = new StreamArm();
  ahead = new Ahead();
  readonly explorer = new Explorer();
  arm: Arm = "tree";
  /** Steps that are left of a trial, the arm before it, and steps in which another arm promised more. */
  trial = 0;
  private home: Arm = "tree";
  private better = 0;
  /** Whether the round that ends with the next VERIFY drafts ahead, and the seconds that it took so far. */
  private ending: { ahead: boolean; seconds: number } | null = null;

  constructor(public pinned: Arm | null = null) {}

  // --- measurements ---

  /** A handshake took `rtt`. Another verifier has other costs; those of the same one's steps stay. */
  linked(welcome: Measured, rtt: number): void {
    const curve = CostCurve.unpack(welcome.costs);
    const queue = welcome.queueUs / 1e6;
    this.costs.linked(rtt, queue);
    if (!curve?.equals(this.costs.curve)) {
      const drafting = PRIOR_STEPS * (this.tree.step ?? 0);
      this.costs = new CostModel(curve, rtt, queue, drafting);
      this.stream = new StreamArm();
      this.ahead = new Ahead(this.ahead.fixed);
      this.ending = null;
    }
    this.stream.told(welcome.streamTokens / 100);
  }

  /** A tree's verdict came after `wait`: `path` nodes were accepted; engine: the verifier's own part of it. */
  verified(tree: TokenTree, scores: readonly number[], path: number, wait: number, engine: number): void {
    this.ending = engine > 0 ? { ahead: this.ahead.now, seconds: Math.max(LEAST_SECONDS, wait) } : null;
    this.explorer.passed(wait);
    if (!this.ahead.trial) this.costs.measured(1 + tree.size, wait, engine);
    this.tree.learn(tree, scores, path);
  }

  /**
   * The verdict on a chain of `tokens` of the understudy came after `wait`: the first `accepted` were right. ended: behind
   * them the answer has ended, and nothing is known of the others.
   */
  chainVerified(tokens: number, accepted: number, wait: number, engine: number, ended = false): void {
    this.ending = null;
    this.explorer.passed(wait);
    this.costs.measured(1 + tokens, wait, engine);
    this.chain.verified(ended ? accepted : tokens, accepted);
  }

  /**
   * A streamed token came `gap` after the one before it. sameStep: it came of one step with the one before, as where the
   * verifier foresees what the text repeats.
   */
  streamed(gap: number, engine: number, sameStep = false): void {
    this.ending = null;
    this.explorer.passed(gap);
    if (!sameStep) this.costs.stepped(1, engine); // that has told its time
    this.stream.came(gap, engine, sameStep);
  }

  /** Of a tree drafted in `seconds` for comparison, `path` nodes came true. */
  foreseen(tree: TokenTree, scores: readonly number[], path: number, seconds: number): void {
    this.tree.learn(tree, scores, path);
    if (!this.ahead.on) this.costs.exposed = blend(this.costs.exposed, this.tree.usual(seconds, PRIOR_STEPS));
  }

  /** `exposed` seconds passed between a verdict and the next VERIFY: a round ends. */
  waited(exposed: number): void {
    const { ending, costs } = this;
    this.ending = null;
    const usual = Math.max(this.tree.usual(exposed, PRIOR_STEPS), Math.min(exposed, OUTLIER * costs.exposed));
    if (!this.ahead.trial) costs.exposed = blend(costs.exposed, usual);
    if (ending) this.ahead.measured(ending.ahead, ending.seconds + usual, this.explorer);
    else this.ahead.trial = 0;
  }

  /** What passed between a verdict and an answer's first tree, or the first behind a stream, is no round's. */
  prepared(): void {
    this.ending = null;
    this.ahead.trial = 0;
  }

  // --- choices ---

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
    this.tree.tau = this.tree.usualTau;
    this.stream.first = this.stream.usual;
    this.arm = best(this.allowed(), before, 1);
    return this.arm;
  }

  /** After every verdict, a step. */
  choose(): Arm {
    const rates = this.allowed();
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
    if (this.arm === "chain") return this.explorer.due(arm, 0, 1); // the drafter is idle
    const rates = this.rates();
    const [now, other] = [rates.get(this.arm), rates.get(arm)];
    return this.explorer.due(arm, this.costs.exposed, now && other ? now / other : 1);
  }

  /** Tokens per second of each arm of which anything is known. */
  rates(): Rates {
    const rates: Rates = new Map([["tree", this.tree.rate(this.costs)]]);
    const { ready, most, token } = this.chain;
    if (ready && most > 1 && token !== null) rates.set("chain", this.chain.best(this.costs).rate);
    const stream = this.stream.rate(this.costs);
    if (stream !== null) rates.set("stream", stream);
    return rates;
  }

  private allowed(): Rates {
    const rates = this.rates();
    if (this.pinned === "stream") return new Map([["stream", rates.get("stream") ?? Number.POSITIVE_INFINITY]]);
    if (this.pinned) rates.delete("stream");
    return rates;
  }

  private switch(arm: Arm): void {
    this.arm = arm;
    this.better = 0;
  }

  /** Try one chain, or a stream for a few tokens, if it is due. */
  private maybeTry(rates: Rates): void {
    const { costs, chain, explorer } = this;
    const [now, chains, stream] = [rates.get(this.arm)!, rates.get("chain"), rates.get("stream")];
    const due = (rate: number) => explorer.due("chain", costs.round(1) * Math.max(0, 1 - rate / now), now / rate);
    if (this.arm === "tree" && chain.ready && (chains === undefined || due(chains))) {
      this.try("chain", 1);
    } else if (stream === undefined) {
      if (!this.stream.tokens && !this.pinned) this.try("stream", EVERY);
    } else {
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
