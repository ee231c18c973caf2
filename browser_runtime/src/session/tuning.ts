/**
 * One answer's part in the choices: what is measured of it goes to the controller, which keeps and weighs it; by that, the
 * tree's size and what else to draft are chosen. Pure.
 */

import { type Draft, type TreeShape, treeShape } from "../drafting/drafter.js";
import { MAX_NODES } from "../protocol/tree.js";
import { type Arm, FIRST_TOKENS, MOST_TOKENS } from "../speed/arms.js";
import { Controller } from "../speed/controller.js";
import { type Settled, wasDrafted } from "./settled.js";

/** The largest trees where no others are asked for: as many nodes as a frame of 256 bytes holds. */
export const LARGEST = treeShape({ nodes: 48 });

/** Nodes and levels of a tree, at most. gain: as of `TreeShape`; null: that of the largest. */
export interface TreeSize {
  nodes: number;
  depth: number;
  gain: number | null;
}

/** largest: bounds of every tree. shaping: draft and send less where that brings more tokens per second. */
export interface TuningOptions {
  largest?: TreeShape;
  shaping?: boolean;
  /** Draft on while a verdict is awaited; null: where it makes rounds shorter. */
  ahead?: boolean | null;
}

/** Choices of one answer. controller: measurements and arm, which outlive it. */
export class Tuning {
  readonly largest: TreeShape;
  private readonly shaping: boolean;
  private readonly ahead: boolean | null;
  /** When the last verdict came, until a tree is sent. behindTree: on a tree; else the drafter reads what is new to it. */
  private verdictAt: number | null = null;
  private behindTree = false;
  /** What is being drafted for comparison. */
  private comparing: Arm | null = null;
  /** A tree or a chain for comparison alone, below the first `base` tokens, whose outcome is not known yet. */
  private outcome: { arm: Arm; draft: Draft; base: number; seconds: number } | null = null;
  /** What trees bring in this answer is known from others alone. */
  private untold = true;
  /** The understudy found nothing to draft in this answer. */
  private barren = false;

  constructor(
    readonly controller = new Controller(),
    options: TuningOptions = {},
  ) {
    this.largest = options.largest ?? LARGEST;
    this.shaping = options.shaping ?? true;
    this.ahead = options.ahead ?? null;
    this.controller.ahead.fixed = this.ahead !== null;
    this.controller.chain.ready = false; // it has to read the text first
  }

  // --- what was measured ---

  /**
   * Drafting `draft` took `seconds`. wanted: it was not given up. A tree that is not behind another tells nothing of a step:
   * the drafter had to read first.
   */
  drafted(arm: Arm, draft: Draft, seconds: number, wanted: boolean): void {
    if (arm === "chain") {
      if (wanted && !draft.tree.size) this.barren = true;
      this.controller.chain.drafted(draft.steps, seconds);
    } else if (this.behindTree) this.controller.tree.drafted(seconds, draft.steps);
  }

  /** What was drafted was sent: since the last verdict, reading and drafting was all that happened. */
  asked(arm: Arm, now: number): void {
    if (this.verdictAt !== null && arm === "tree") {
      if (this.behindTree) this.controller.waited(now - this.verdictAt);
      else this.controller.prepared();
    }
    this.verdictAt = null; // one that is sent again, behind an outage, tells nothing
  }

  /** A verdict came. One that is late says nothing of the link. */
  answered(settled: Settled, now: number): void {
    const { arm, tree, accepted, wait, engine } = settled;
    const drafted = wasDrafted(settled);
    this.verdictAt = now;
    this.behindTree = drafted && arm === "tree";
    if (drafted) this.untold = false;
    if (arm === "stream" && !settled.askedFor) this.controller.streamed(wait, engine, settled.sameStep);
    else if (settled.late) return;
    else if (arm === "stream") {
      // the text was read first; it waited for nothing
      if (!(settled.afterOpen || settled.sameStep)) this.controller.costs.waited(wait - engine);
    } else if (drafted) {
      if (arm === "tree") this.controller.verified(tree, settled.scores, accepted.length, wait, engine);
      else this.controller.chainVerified(tree.size, accepted.length, wait, engine, settled.ended);
    }
  }

  /** What was drafted for comparison, empty if it tells nothing, below the first `base` tokens, in `seconds`. */
  compared(draft: Draft, base: number, seconds: number): void {
    const arm = this.comparing ?? "tree";
    this.comparing = null;
    this.outcome = draft.tree.size ? { arm, draft, base, seconds } : null;
    if (arm === "chain") this.controller.chain.drafted(draft.steps, seconds);
  }

  /** The text is `tokens` now. What came of the tree for comparison is measured once it is known. */
  committed(tokens: readonly number[]): void {
    if (!this.outcome) return;
    const { arm, base, seconds } = this.outcome;
    const draft = this.worthSending(arm, this.outcome.draft);
    const path = draft.tree.foreseen(tokens.slice(base));
    if (!path) return;
    if (arm === "chain") this.controller.chain.verified(draft.tree.size, path.length);
    else this.controller.foreseen(draft.tree, draft.scores, path.length, seconds);
    this.outcome = null;
  }

  /** The understudy drafts nothing more, and not what was asked for. */
  understudyFailed(): void {
    this.controller.chain.ready = false;
    if (this.comparing === "chain") this.comparing = null;
  }

  // --- what follows ---

  /** The arm of an answer, or of its rest on a new link. */
  begin(): Arm {
    return this.controller.begin(this.untold);
  }

  /** The arm after a verdict. drafts: the understudy can draft. */
  choose(drafts: boolean): Arm {
    this.offer(drafts);
    return this.controller.choose();
  }

  /** Bounds of the next tree, where the session has room for `nodes` and `depth` levels. */
  treeSize(nodes: number, depth: number): TreeSize {
    const most = Math.min(this.largest.nodes, nodes);
    const levels = Math.min(this.largest.depth, depth);
    if (!this.shaping) return { nodes: most, depth: levels, gain: null };
    const { tree, costs } = this.controller;
    return { nodes: Math.min(most, tree.worthDrafting()), depth: levels, gain: tree.gain(costs) };
  }

  /**
   * Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree. most: that the verifier takes.
   * room: that the session has. ready: the understudy can draft. alone: there is no drafter. Where nothing is shaped, trees
   * alone are drafted, or chains alone.
   */
  chain(most: number, room: number, ready: boolean, alone = false): number {
    this.offer(ready);
    const { chain, costs } = this.controller;
    const fits = Math.min(most, room);
    chain.most = most;
    if (fits < 2) return 0;
    if (alone && ready && !this.shaping && !this.barren) return Math.min(fits, this.largest.depth, MOST_TOKENS);
    if (!chain.ready || this.controller.arm !== "chain") return 0;
    return Math.min(fits, this.controller.trial ? FIRST_TOKENS : chain.best(costs).length);
  }

  /** Record whether chains are available. ready: the understudy can draft. */
  private offer(ready: boolean): void {
    this.controller.chain.ready = ready && this.shaping && !this.barren;
  }

  /** What of a draft is sent. */
  worthSending(arm: Arm, draft: Draft): Draft {
    if (arm === "chain") return draft;
    const { tree: trees, costs } = this.controller;
    const count = this.shaping ? trees.worthSending(draft.tree, draft.scores, costs) : draft.tree.size;
    const tree = draft.tree.pruned(count, MAX_NODES);
    return { ...draft, tree, scores: draft.scores.slice(0, tree.size) };
  }

  /** Whether to draft on while a verdict is awaited: on a chain of the understudy, that costs the drafter nothing. */
  draftsAhead(arm: Arm): boolean {
    return this.ahead ?? (arm === "chain" || this.controller.ahead.now);
  }

  /**
   * What to draft for comparison beside a stream or a chain now, and its size; null: nothing. Where the arm is pinned, nothing
   * needs to know it. drafts: the understudy can draft.
   */
  comparison(drafts = false): (TreeSize & { arm: Arm }) | null {
    const { controller } = this;
    if (controller.pinned !== null || this.comparing || controller.arm === "tree") return null;
    this.offer(drafts);
    if (controller.arm === "stream" && this.controller.chain.ready && controller.compares("chain")) {
      this.comparing = "chain";
      return { arm: "chain", nodes: FIRST_TOKENS, depth: FIRST_TOKENS, gain: null };
    }
    if (!controller.compares("tree")) return null;
    this.comparing = "tree";
    this.untold = false;
    return { arm: "tree", ...this.treeSize(MAX_NODES, this.largest.depth) };
  }
}
