/** Choices for one answer, made from measurements: tree or stream, the tree's size, what else to draft. Pure. */

import { type Draft, type TreeShape, treeShape } from "../drafting/drafter.js";
import type { Welcome } from "../protocol/messages.js";
import { MAX_NODES, ROOT, type TokenTree } from "../protocol/tree.js";
import { FIRST_TOKENS, MOST_TOKENS } from "./chains.js";
import { Controller, type Mode } from "./controller.js";
import type { Pace } from "./pace.js";
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

/** Choices of one answer. controller: measurements and mode, which outlive it. */
export class Tuning {
  readonly largest: TreeShape;
  private readonly shaping: boolean;
  private readonly ahead: boolean | null;
  /** When the last verdict came, until a tree is sent. behindTree: on a tree; else the drafter reads what is new to it. */
  private verdictAt: number | null = null;
  private behindTree = false;
  /** A tree or a chain for comparison alone, below the first `base` tokens, whose outcome is not known yet. */
  private comparing: { draft: Draft; base: number; seconds: number } | null = null;
  /** One is under way; was since the last token. */
  private drafting = false;
  private beside = false;
  /** What trees bring in this answer is known from others alone. */
  private untold = true;
  /** The last tree was the understudy's chain; that is what is to be compared next, if it can be. */
  private chained = false;
  private chainNext = true;
  /** A chain for comparison is under way. */
  private comparingChain = false;
  /** The understudy found nothing to draft in this answer. */
  private barren = false;

  constructor(
    readonly controller = new Controller(),
    options: TuningOptions = {},
  ) {
    this.largest = options.largest ?? LARGEST;
    this.shaping = options.shaping ?? true;
    this.ahead = options.ahead ?? null;
    this.pace.ahead.fixed = this.ahead !== null;
    this.pace.chains.ready = false;
  }

  get pace(): Pace {
    return this.controller.pace;
  }

  // --- what was measured ---

  /** A handshake took `rtt` seconds. */
  linked(welcome: Welcome, rtt: number): void {
    this.pace.linked(welcome.costs, rtt);
  }

  /**
   * Drafting `draft` took `seconds`. Before a first tree the drafter had something to read. wanted: it was not given up.
   */
  drafted(draft: Draft, seconds: number, wanted: boolean): void {
    if (draft.chain) {
      if (wanted && !draft.tree.size) this.barren = true;
      this.pace.chains.drafted(draft.steps, seconds);
    } else this.pace.drafted(seconds, draft.steps, this.behindTree && !draft.ahead);
  }

  /** A drafted tree was sent: since the last verdict, reading and drafting was all that happened. */
  asked(now: number, chain = false): void {
    if (this.verdictAt !== null && !chain) this.pace[this.behindTree ? "waited" : "prepared"](now - this.verdictAt);
    this.verdictAt = null; // one that is sent again, behind an outage, tells nothing
  }

  /** A verdict came. One that is late says nothing of the link. */
  answered(settled: Settled, now: number): void {
    const { kind, tree, accepted, wait, engine, queue, sameStep } = settled;
    this.verdictAt = now;
    this.behindTree = false;
    if (kind === "stream") {
      // the first token had to be asked for; those of its step say nothing without it
      if (settled.clock === "silent" || (sameStep && settled.clock !== "running")) return;
      this.pace.streamed(wait, engine, settled.late, this.beside, sameStep);
      this.beside = this.drafting;
    } else if (wasDrafted(settled)) {
      this.untold = false;
      this.behindTree = kind === "tree";
      if (settled.late) return;
      if (kind === "tree") this.pace.verified(tree, settled.scores, accepted.length, wait, engine, queue);
      else this.pace.chainVerified(tree.size, accepted.length, wait, engine, queue, settled.ended);
    }
  }

  /** A tree for comparison, empty if it tells nothing, below the first `base` tokens; drafting it took `seconds`. */
  compared(draft: Draft, base: number, seconds: number): void {
    this.comparing = draft.chain || draft.tree.size ? { draft, base, seconds } : null;
    this.drafting = this.comparingChain = false;
    if (draft.chain) this.pace.chains.drafted(draft.steps, seconds);
  }

  /** The text is `tokens` now. What came of the tree for comparison is measured once it is known. */
  committed(tokens: readonly number[]): void {
    if (!this.comparing) return;
    const draft = this.worthSending(this.comparing.draft);
    const path = foreseen(draft.tree, tokens.slice(this.comparing.base));
    if (!path) return;
    if (draft.chain) this.pace.chains.verified(draft.tree.size, path.length);
    else this.pace.foreseen(draft.tree, draft.scores, path.length, this.comparing.seconds);
    this.comparing = null;
  }

  /** The understudy drafts nothing more, and not what was asked for. */
  understudyFailed(): void {
    this.pace.chains.ready = false;
    if (this.comparingChain) this.drafting = this.comparingChain = false;
  }

  // --- what follows ---

  /** The mode of an answer, or of its rest on a new link. */
  begin(): Mode {
    return this.controller.begin(this.untold);
  }

  /** The mode after a verdict. drafts: the understudy can draft. */
  choose(drafts: boolean): Mode {
    this.offer(drafts);
    return this.controller.choose();
  }

  /** Bounds of the next tree, where the session has room for `nodes` and `depth` levels. */
  treeSize(nodes: number, depth: number): TreeSize {
    const most = Math.min(this.largest.nodes, nodes);
    const levels = Math.min(this.largest.depth, depth);
    if (!this.shaping) return { nodes: most, depth: levels, gain: null };
    return { nodes: Math.min(most, this.pace.worthDrafting()), depth: levels, gain: this.pace.gain() };
  }

  /**
   * Tokens of the chain that the understudy is to draft next; 0: the drafter drafts a tree. most: that the verifier takes.
   * room: that the session has. ready: the understudy can draft. alone: there is no drafter. Where nothing is shaped, trees
   * alone are drafted, or chains alone.
   */
  chain(most: number, room: number, ready: boolean, alone = false): number {
    this.offer(ready);
    this.pace.chains.most = most;
    const fits = Math.min(most, room);
    let length = fits > 1 ? Math.min(fits, this.pace.chain(this.chained)) : 0;
    if (alone && ready && !this.shaping && !this.barren) length = Math.min(fits, this.largest.depth, MOST_TOKENS);
    this.chained = length > 0;
    return length;
  }

  /** Record whether chains are available. ready: the understudy can draft. */
  private offer(ready: boolean): void {
    this.pace.chains.ready = ready && this.shaping && !this.barren;
  }

  /** A chain is drafted: now and then a tree too, of this size, so that what trees bring stays known. */
  besideChain(): TreeSize | null {
    if (this.comparing || this.drafting || !this.pace.chains.compares()) return null;
    this.drafting = true;
    return this.treeSize(MAX_NODES, this.largest.depth);
  }

  /** What of a draft is sent. */
  worthSending(draft: Draft): Draft {
    if (draft.chain) return draft;
    const count = this.shaping ? this.pace.worthSending(draft.tree, draft.scores) : draft.tree.size;
    const tree = draft.tree.pruned(count, MAX_NODES);
    return { ...draft, tree, scores: draft.scores.slice(0, tree.size) };
  }

  /**
   * Whether to draft on while a verdict is awaited. chain: on one of the understudy, which costs the drafter nothing.
   */
  draftsAhead(chain = false): boolean {
    return this.ahead ?? (chain || this.pace.draftsAhead());
  }

  /**
   * `streamed` tokens into an answer's streams: the size of a tree to draft beside them now and then, so that tau stays known.
   * Where the mode is pinned, nothing needs to know it. drafts: the understudy can draft; every second comparison is a chain of
   * its then: its tokens.
   */
  comparison(streamed: number, drafts = false): TreeSize | number | null {
    if (this.controller.pinned !== null || !this.pace.compares(streamed, this.untold)) return null;
    this.drafting = this.beside = true;
    this.offer(drafts);
    if (this.pace.chains.ready && this.chainNext) {
      this.chainNext = false;
      this.comparingChain = true;
      return FIRST_TOKENS;
    }
    this.chainNext = true;
    this.untold = false;
    return this.treeSize(MAX_NODES, this.largest.depth);
  }
}

/** The path of `tree` that `tokens`, below its root, took; null while they have not left it. */
export function foreseen(tree: TokenTree, tokens: readonly number[]): number[] | null {
  const path: number[] = [];
  for (const token of tokens) {
    const child = tree.child(path.at(-1) ?? ROOT, token);
    if (child === undefined) return path;
    path.push(child);
  }
  return null;
}
