/** What the device measured of drafter, link and target, and each arm's tokens per second by it. Seconds throughout. */

import { CostCurve } from "../protocol/costs.js";
import type { Welcome } from "../protocol/messages.js";
import type { TokenTree } from "../protocol/tree.js";
import { Ahead } from "./ahead.js";
import { ChainArm, PRIOR_STEPS, StreamArm, TreeArm } from "./arms.js";
import { blend, CostModel, LEAST_SECONDS } from "./costModel.js";
import { Explorer, type Rates } from "./explorer.js";

/** What a verifier measured of itself. */
type Measured = Pick<Welcome, "costs" | "streamTokens" | "queueUs">;

/** Measurements of one verifier, its link and the drafter; they outlive answers. */
export class Pace {
  costs = new CostModel();
  readonly tree = new TreeArm();
  readonly chain = new ChainArm();
  stream = new StreamArm();
  ahead = new Ahead();
  readonly explorer = new Explorer();
  /** Whether the round that ends with the next VERIFY drafts ahead, and the seconds that it took so far. */
  private ending: { ahead: boolean; seconds: number } | null = null;

  // --- measurements ---

  /** A handshake took `rtt`. Another verifier has other costs; what was measured of the same one stays. */
  linked(welcome: Measured, rtt: number): void {
    const curve = CostCurve.unpack(welcome.costs);
    this.costs.rtt = rtt;
    if (!curve?.equals(this.costs.curve)) {
      const drafting = PRIOR_STEPS * (this.tree.step ?? 0);
      this.costs = new CostModel(curve, rtt, welcome.queueUs / 1e6, drafting);
      this.stream = new StreamArm();
      this.ahead = new Ahead(this.ahead.fixed);
      this.ending = null;
    }
    this.stream.told(welcome.streamTokens / 100);
  }

  /** A tree's verdict came after `wait`: `path` nodes were accepted; engine, queue: the verifier's own part of it. */
  verified(tree: TokenTree, scores: readonly number[], path: number, wait: number, engine: number, queue: number) {
    this.ending = engine > 0 ? { ahead: this.ahead.now, seconds: Math.max(LEAST_SECONDS, wait - queue) } : null;
    if (!this.ahead.trial) this.round(1 + tree.size, wait, engine, queue);
    this.explorer.passed(wait);
    this.tree.learn(tree, scores, path);
  }

  /**
   * The verdict on a chain of `tokens` of the understudy came after `wait`: the first `accepted` were right. ended: behind
   * them the answer has ended, and nothing is known of the others.
   */
  chainVerified(tokens: number, accepted: number, wait: number, engine: number, queue: number, ended = false): void {
    this.ending = null;
    this.round(1 + tokens, wait, engine, queue);
    this.explorer.passed(wait);
    this.chain.verified(ended ? accepted : tokens, accepted);
  }

  /**
   * A streamed token came `gap` after the one before it. sameStep: it came of one step with the one before, as where the
   * verifier foresees what the text repeats.
   */
  streamed(gap: number, engine: number, overdue: boolean, sameStep = false): void {
    this.ending = null;
    if (!sameStep) this.costs.stepped(1, engine); // that has told its time
    if (!overdue) this.explorer.passed(gap);
    this.stream.came(gap, engine, overdue, sameStep);
  }

  /** Of a tree drafted in `seconds` for comparison, `path` nodes came true. */
  foreseen(tree: TokenTree, scores: readonly number[], path: number, seconds: number): void {
    this.tree.learn(tree, scores, path);
    if (!this.ahead.on) this.costs.exposed = blend(this.costs.exposed, seconds);
  }

  /** What passed between a verdict and an answer's first tree, or the first behind a stream, is no round's. */
  prepared(): void {
    this.ending = null;
    this.ahead.trial = 0;
  }

  /** `exposed` seconds passed between a verdict and the next VERIFY: a round ends. */
  waited(exposed: number): void {
    if (!this.ahead.trial) this.costs.exposed = blend(this.costs.exposed, exposed);
    const ended = this.ending;
    this.ending = null;
    if (ended) this.ahead.measured(ended.ahead, ended.seconds + exposed, this.explorer);
    else this.ahead.trial = 0;
  }

  /** A new answer begins, of which nothing is known. */
  forgetAnswer(): void {
    this.tree.tau = this.tree.usualTau;
    this.stream.first = this.stream.usual;
  }

  private round(tokens: number, wait: number, engine: number, queue: number): void {
    this.costs.stepped(tokens, engine);
    this.costs.rtt = blend(this.costs.rtt, Math.max(0, wait - engine - queue));
    this.costs.waited(queue);
  }

  // --- what follows ---

  /** Tokens per second of each arm of which anything is known. */
  rates(): Rates {
    const rates: Rates = new Map([["tree", this.tree.rate(this.costs)]]);
    if (this.chain.known) rates.set("chain", this.chain.best(this.costs).rate);
    const stream = this.stream.rate(this.costs);
    if (stream !== null) rates.set("stream", stream);
    return rates;
  }
}
