/**
 * What the device measured of drafter, link and target, and what follows from it: tree size, when to stop, which mode.
 *
 * A round of tree drafting commits 1 + (sum of the sent nodes' acceptance probabilities) tokens and takes
 * exposed drafting + round-trip time + step(nodes). A stream commits a token per step(0). Everything here maximises or
 * compares tokens per second by these two lines. Seconds throughout.
 */

import { CostCurve } from "../protocol/costs.js";
import { argmax } from "../protocol/sampling.js";
import type { TokenTree } from "../protocol/tree.js";
import { Ahead, type Round } from "./ahead.js";
import { type BestChain, Chains, FIRST_TOKENS } from "./chains.js";
import { PACE } from "./paceConfig.js";

/** Smoothed measurements; they outlive answers. */
export class Pace {
  readonly config = PACE;
  /** As WELCOME advertised it, or null: a step is taken to last a second. Steps really take `slowdown` times as long. */
  private curve: CostCurve | null = null;
  private slowdown: number | null = null;
  private tokenSlowdown: number | null = null;
  /** Of a round, without the verifier's engine and queue. */
  rtt: number | null = null;
  private queue = 0;
  /**
   * Drafting between a tree's verdict and the next VERIFY, 0 where nothing tells of it; reading and drafting between
   * another and a first tree.
   */
  private exposed = 0;
  private reading = 0;
  private drafterStep: number | null = null;
  /** Drafting a tree of which nothing was there, and a tree for comparison. */
  private fromScratch: number | null = null;
  private comparing = 0;
  /** Of a stream by such a tree, where device and verifier share processors; `losing`: by the one under way. */
  private lost = 0;
  private losing: number | null = null;
  /** Streamed tokens since such a tree; below 0: so many more than it was entitled to. */
  private uncompared = 0;
  /** Between tokens of a stream, of which there were `gaps`; late: tokens arrive that an outage held back. */
  private gap: number | null = null;
  private gaps = 0;
  private late = false;
  /**
   * The same in the answers so far, and the share of a stream's tokens that came of one step with the token before, of
   * `usualGaps` measurements.
   */
  private usualGap: number | null = null;
  private usualGaps = 0;
  private together = 0;
  /** Tokens of a tree round in this answer; in the answers so far, which `trees` were measured of. */
  tau = 2;
  private usualTau = 2;
  private trees = 0;
  /** Tokens of this answer, of those so far, and nodes of a tree. */
  private written = 0;
  private usualLength: number | null = null;
  private nodes: number | null = null;
  ahead = new Ahead();
  /** Of the understudy. */
  readonly chains = new Chains();
  /** The round that ends with the next VERIFY, and whether it drafts ahead. */
  private ending: { ahead: boolean; round: Round } | null = null;
  /** Accepted nodes by depth: as the drafter predicted them, and as they came. */
  private readonly predicted: number[] = Array(PACE.depths + 1).fill(PACE.prior);
  private readonly accepted: number[] = [...this.predicted];

  // --- measurements ---

  /** A handshake took `rtt`. Another verifier has other costs; what was measured of the same one stays. */
  linked(costs: Uint8Array, rtt: number): void {
    const curve = CostCurve.unpack(costs);
    this.rtt = rtt;
    if (curve?.equals(this.curve)) return;
    this.curve = curve;
    this.slowdown = this.tokenSlowdown = this.gap = this.ending = this.losing = null;
    this.gaps = this.lost = this.exposed = this.reading = 0;
    this.usualGap = null;
    this.usualGaps = this.together = 0;
    this.ahead = new Ahead(this.ahead.fixed);
  }

  /** fromScratch: nothing of the tree was there before, and no prompt had to be read. */
  drafted(seconds: number, steps: number, fromScratch: boolean): void {
    if (steps) this.drafterStep = blend(this.drafterStep, seconds / steps);
    if (fromScratch) this.fromScratch = blend(this.fromScratch, seconds);
  }

  /** A tree's verdict came after `wait`: `path` nodes were accepted; engine, queue: the verifier's own part of it. */
  verified(tree: TokenTree, scores: readonly number[], path: number, wait: number, engine: number, queue: number) {
    const [between, stretch] = [Math.max(0, wait - engine - queue), engine / this.advertised(1 + tree.size)];
    this.ending = engine > 0 ? { ahead: this.draftsAhead(), round: { exposed: 0, between, stretch } } : null;
    if (!this.ahead.trying) {
      this.stepped(1 + tree.size, engine);
      this.rtt = blend(this.rtt, between);
    }
    this.queue = blend(this.queue, queue);
    this.uncompared = 0;
    this.written += 1 + path;
    this.learn(tree, scores, path, PACE.smoothing, PACE.usualSmoothing);
  }

  /**
   * The verdict on a chain of `tokens` of the understudy came after `wait`: the first `accepted` were right. ended: behind
   * them the answer has ended, and nothing is known of the others.
   */
  chainVerified(tokens: number, accepted: number, wait: number, engine: number, queue: number, ended = false): void {
    this.ending = null;
    this.stepped(1 + tokens, engine);
    this.rtt = blend(this.rtt, Math.max(0, wait - engine - queue));
    this.queue = blend(this.queue, queue);
    this.uncompared = 0;
    this.written += 1 + accepted;
    this.chains.verified(ended ? accepted : tokens, accepted);
  }

  /**
   * A streamed token came `gap` after the one before it. An outage, and what it held back, say nothing. sameStep: it
   * came of one step with the one before, which told its time. beside: a tree for comparison was drafted meanwhile; what
   * the step lost by that is not part of the gap.
   */
  streamed(gap: number, engine: number, overdue: boolean, beside = false, sameStep = false): void {
    this.ending = null;
    this.written++;
    let losing = 0;
    if (!sameStep && beside && this.tokenSlowdown !== null) {
      losing = engine - this.step(0);
      this.losing = (this.losing ?? 0) + losing;
    } else if (!sameStep) {
      this.stepped(1, engine);
      if (this.losing !== null) this.lost = blend(this.lost, Math.max(0, this.losing), PACE.comparisonSmoothing);
      this.losing = null;
    }
    this.late = overdue || (this.late && (sameStep || gap < engine / 2));
    if (this.late) return;
    this.gaps++;
    this.usualGaps++;
    const own = Math.max(0, gap - Math.max(0, losing));
    this.gap = blend(this.gap, own, Math.max(PACE.tokenSmoothing, 1 / this.gaps));
    const usual = Math.max(PACE.usualTokenSmoothing, 1 / this.usualGaps);
    this.usualGap = blend(this.usualGap, own, usual);
    this.together = blend(this.together, sameStep ? 1 : 0, usual);
  }

  /** Of a tree drafted in `seconds` beside a stream, for comparison, `path` nodes came true. */
  foreseen(tree: TokenTree, scores: readonly number[], path: number, seconds: number): void {
    this.learn(tree, scores, path, PACE.comparisonSmoothing, PACE.usualComparisonSmoothing);
    this.comparing = blend(this.comparing, seconds);
    this.exposed = Math.min(this.exposed || seconds, seconds);
  }

  /** `seconds` passed between a verdict and an answer's first tree, or the first behind a stream: no round ends. */
  prepared(seconds: number): void {
    this.ending = null;
    this.ahead.givenUp();
    this.reading = Math.max(seconds, blend(this.reading, seconds));
  }

  /** `exposed` seconds passed between a verdict and the next VERIFY: a round ends. */
  waited(exposed: number): void {
    const ended = this.ending;
    this.ending = null;
    if (!this.ahead.trying) this.exposed = blend(this.exposed, exposed);
    if (!ended || !this.muchToHide()) {
      this.ahead.givenUp();
      return;
    }
    const step = this.advertised(1 + this.treeNodes());
    const better = this.ahead.measured(ended.ahead, { ...ended.round, exposed }, step);
    if (better) [this.exposed, this.rtt, this.slowdown] = [better.exposed, better.between, better.stretch];
  }

  /** Learn from what came of a tree. tau is what its nodes promise, calibrated: that varies less than luck does. */
  private learn(tree: TokenTree, scores: readonly number[], path: number, weight: number, usual: number): void {
    const { prior, fading, depths } = PACE;
    this.nodes = blend(this.nodes, tree.size, weight);
    if (scores.length !== tree.size || !scores.length) {
      this.brought(1 + path, weight, usual);
      return;
    }
    for (let depth = 1; depth <= depths; depth++) {
      this.predicted[depth] = prior + fading * (this.predicted[depth] - prior);
      this.accepted[depth] = prior + fading * (this.accepted[depth] - prior);
    }
    for (const [node, score] of scores.entries())
      this.predicted[Math.min(tree.depths[node], depths)] += Math.exp(score);
    for (let depth = 1; depth <= path; depth++) this.accepted[Math.min(depth, depths)]++;
    this.brought(this.expected(tree, scores).at(-1)!, weight, usual);
  }

  private brought(tokens: number, weight: number, usual: number): void {
    this.trees++;
    this.tau = blend(this.tau, tokens, weight);
    this.usualTau = blend(this.usualTau, tokens, Math.max(usual, 1 / (PACE.prior + this.trees)));
  }

  /** A new answer begins, of which nothing is known. */
  forgetAnswer(): void {
    this.tau = this.usualTau;
    if (this.uneven) this.gap = this.usualGap;
    this.reading *= PACE.readingFading;
    if (!this.written) return;
    this.usualLength = blend(this.usualLength, this.written, PACE.lengthSmoothing);
    this.written = 0;
  }

  /** Tokens that the first 1, 2, ... nodes of `tree` promise, as far as promises were kept so far. */
  private expected(tree: TokenTree, scores: readonly number[]): number[] {
    let tokens = 1;
    return scores.map((score, node) => {
      const depth = Math.min(tree.depths[node], PACE.depths);
      const ratio = Math.min(PACE.mostCorrection, this.accepted[depth] / this.predicted[depth]);
      return (tokens += Math.min(1, Math.exp(score) * ratio));
    });
  }

  /**
   * A step took `engine` seconds. The slowdowns of trees and of single tokens rise and fall together, but each keeps a
   * level of its own: where the curve is wrong for one, the other must not be judged by it.
   */
  private stepped(tokens: number, engine: number): void {
    if (engine <= 0) return;
    const now = engine / this.advertised(tokens);
    const [own, other] = tokens > 1 ? [this.slowdown, this.tokenSlowdown] : [this.tokenSlowdown, this.slowdown];
    const fresh = blend(own, now);
    const followed = own === null || other === null ? other : (other * fresh) / own;
    const before = this.step(0);
    [this.slowdown, this.tokenSlowdown] = tokens > 1 ? [fresh, followed] : [followed, fresh];
    if (tokens > 1 && this.gap !== null) {
      // no stream tells at present how long its tokens take; the next one tells more than this guess
      const longer = (1 - this.together) * (this.step(0) - before);
      this.gap = Math.max(PACE.leastSeconds, this.gap + longer);
      this.usualGap = Math.max(PACE.leastSeconds, (this.usualGap ?? this.gap) + longer);
      this.gaps = 1;
    }
  }

  // --- what follows ---

  /** Tokens per second of tree drafting. */
  treeRate(): number {
    return this.tau / this.round();
  }

  /** Tokens per second of an answer of usual length in trees, with what the drafter has to read first. */
  usualTreeRate(): number {
    const reading = this.usualLength === null ? 0 : this.reading / this.usualLength;
    return 1 / (1 / this.treeRate() + reading);
  }

  /** Tokens per second of trees or of the understudy's chains, whichever are faster. */
  draftRate(): number {
    return Math.max(this.treeRate(), this.bestChain().rate);
  }

  /** The same, of an answer of usual length in trees. */
  usualDraftRate(): number {
    return Math.max(this.usualTreeRate(), this.bestChain().rate);
  }

  /**
   * Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree.
   *
   * goingOn: the last one was a chain too; leaving them takes the margin, and so does coming to them.
   */
  chain(goingOn: boolean): number {
    const { length, rate } = this.bestChain();
    const margin = goingOn ? 1 / PACE.margin : PACE.margin;
    if (length && rate > margin * this.treeRate()) {
      this.chains.chosen();
      return length;
    }
    return this.chains.tryNow() ? FIRST_TOKENS : 0;
  }

  /** The understudy's; of no tokens where nothing is known of them. */
  private bestChain(): BestChain {
    if (!this.chains.known) return { length: 0, rate: 0 };
    return this.chains.best(this.between(), nodes => this.step(nodes));
  }

  /** Seconds of a round of tree drafting. */
  round(): number {
    return Math.max(PACE.leastSeconds, this.fixed() + this.treeStep());
  }

  /** Tokens per second of a stream, or null where nothing is known. */
  streamRate(): number | null {
    if (this.gap !== null) return 1 / Math.max(PACE.leastSeconds, this.gap);
    const step = this.step(0);
    return step ? 1 / (step + this.queue) : null;
  }

  /** Whether a stream's steps bring as many tokens as the text allows, so that an answer has a rate of its own. */
  get uneven(): boolean {
    return this.together >= PACE.uneven;
  }

  /** Seconds that a short stream costs in place of trees: it must be asked for, and may be slower. */
  trialCost(): number {
    const token = 1 / (this.streamRate() || Number.POSITIVE_INFINITY);
    return this.fixed() + PACE.trialTokens * Math.max(0, token - 1 / this.draftRate());
  }

  /** Tokens of a stream between trees drafted beside it for comparison. streamed: of this answer's streams so far. */
  compareEvery(streamed: number): number {
    const stream = this.streamRate();
    if (stream === null) return PACE.compareEvery;
    const ahead = Math.max(1, stream / this.draftRate());
    const rarer = ahead * ahead * ahead;
    const every = Math.min(PACE.compareRarely, Math.floor(PACE.compareEvery * rarer));
    const cost = streamed <= PACE.earlyTokens ? this.lost : Math.max(this.lost, this.comparing);
    const paid = (cost * stream) / PACE.comparisonShare;
    return Math.max(every, Math.ceil(Math.max(paid, Math.min(PACE.compareSeldom, rarer * paid))));
  }

  /**
   * Whether to draft a tree for comparison, after `streamed` tokens of this answer's streams.
   *
   * first: nothing else tells of this answer yet, so it may come early, as long as the average is kept: tokens are counted
   * over answers.
   */
  compares(streamed: number, first: boolean): boolean {
    this.uncompared++;
    const every = this.compareEvery(streamed);
    const early = first && streamed >= PACE.compareEvery && this.uncompared >= 0;
    if (this.uncompared < every && !early) return false;
    this.uncompared = Math.min(0, this.uncompared - every);
    return true;
  }

  /** Whether to draft on while the next verdict is awaited. */
  draftsAhead(): boolean {
    return this.ahead.now && this.muchToHide();
  }

  /** Whether drafting is enough of a round to be hidden. */
  private muchToHide(): boolean {
    const drafting = this.fromScratch;
    return drafting !== null && drafting >= PACE.aheadShare * (drafting + this.between() + this.treeStep());
  }

  /** Accepted tokens that one more drafting step must promise to be worth its time. */
  gain(): number {
    return Math.min(PACE.mostGain, Math.max(PACE.leastGain, this.treeRate() * (this.drafterStep ?? 0)));
  }

  /** Nodes to draft of the next tree, so that there is a choice of what to send. */
  worthDrafting(): number {
    return Math.max(PACE.leastNodes, Math.ceil(PACE.spare * this.treeNodes()));
  }

  /** How many nodes of `tree`, best first, make most tokens per second; scores: log path probabilities. */
  worthSending(tree: TokenTree, scores: readonly number[]): number {
    if (!scores.length) return tree.size;
    const fixed = this.fixed();
    const time = (nodes: number) => Math.max(PACE.leastSeconds, fixed + this.step(nodes));
    return 1 + argmax(this.expected(tree, scores).map((tokens, node) => tokens / time(node + 1)));
  }

  /** A round's time without the verifier's engine. */
  private fixed(): number {
    return this.exposed + this.between();
  }

  /** A round's time without drafting and the verifier's engine. */
  private between(): number {
    return (this.rtt ?? 0) + this.queue;
  }

  /** Seconds of the verifier's engine for a tree as they are now. */
  private treeStep(): number {
    return this.step(this.treeNodes());
  }

  /** Nodes of a tree as they are now. */
  private treeNodes(): number {
    return this.nodes ?? PACE.firstNodes;
  }

  /** Seconds of the verifier's engine for a tree of `nodes` nodes; 0: for a token of a stream. */
  private step(nodes: number): number {
    const [own, other] = nodes ? [this.slowdown, this.tokenSlowdown] : [this.tokenSlowdown, this.slowdown];
    return (own || other || (this.curve ? 1 : 0)) * this.advertised(1 + nodes);
  }

  /** Seconds of a step of `tokens` as the verifier advertised. */
  private advertised(tokens: number): number {
    return this.curve ? this.curve.at(tokens) : 1;
  }
}

function blend(old: number | null, fresh: number, weight: number = PACE.smoothing): number {
  return old === null ? fresh : old + weight * (fresh - old);
}
