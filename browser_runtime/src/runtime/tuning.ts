/** What measurements decide for one answer: tree or stream, how large a tree, what to draft besides. Pure. */

import { type Draft, type TreeShape, treeShape } from "../drafting/drafter.js";
import type { Verdict, Welcome } from "../protocol/messages.js";
import { MAX_NODES, ROOT, type TokenTree } from "../protocol/tree.js";
import type { Compare, TreeSize } from "./actions.js";
import { Controller } from "./controller.js";
import type { Pace } from "./pace.js";
import type { Mode } from "./policy.js";
import type { Flight } from "./requests.js";
import type { SessionStats } from "./tokens.js";

/** The largest trees where no others are asked for: as many nodes as a frame of 256 bytes holds. */
export const LARGEST = treeShape({ nodes: 48 });

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
  /** A tree for comparison alone, below the first `base` tokens, whose outcome is not known yet. */
  private comparing: { draft: Draft; base: number; seconds: number } | null = null;
  /** One is under way; was since the last token. */
  private drafting = false;
  private beside = false;
  /** Nothing of what trees bring in this answer is known but from others. */
  private untold = true;

  constructor(
    readonly controller = new Controller(),
    options: TuningOptions = {},
  ) {
    this.largest = options.largest ?? LARGEST;
    this.shaping = options.shaping ?? true;
    this.ahead = options.ahead ?? null;
    this.pace.ahead.fixed = this.ahead !== null;
  }

  get pace(): Pace {
    return this.controller.pace;
  }

  // --- what was measured ---

  /** A handshake took `rtt` seconds. */
  linked(welcome: Welcome, rtt: number): void {
    this.pace.linked(welcome.costs, rtt);
  }

  /** Drafting `draft` took the drafter `seconds`. Before a first tree it had something to read. */
  drafted(draft: Draft, seconds: number, stats: SessionStats): void {
    this.pace.drafted(seconds, draft.steps, this.behindTree && !draft.ahead);
    if (!stats.rounds) return;
    stats.aheadRounds++;
    stats.aheadHits += draft.ahead ? 1 : 0;
    stats.aheadUsed += draft.kept;
  }

  /** A drafted tree was sent: since the last verdict, reading and drafting was all that happened. */
  asked(now: number): void {
    if (this.verdictAt !== null) this.pace[this.behindTree ? "waited" : "prepared"](now - this.verdictAt);
    this.verdictAt = null; // one that is sent again, behind an outage, tells nothing
  }

  /** `verdict` on `flight` came. overdue: it had been given up; an outage says nothing of the link. */
  answered(flight: Flight, verdict: Verdict, now: number, overdue: boolean, stats: SessionStats): void {
    const [engine, queue, wait] = [verdict.engineUs / 1e6, verdict.queueUs / 1e6, now - flight.sent];
    this.verdictAt = now;
    this.behindTree = false;
    if (!flight.tree) {
      if (!flight.streaming) return; // the first token had to be asked for
      this.pace.streamed(wait, engine, overdue, this.beside);
      this.beside = this.drafting;
    } else if (!flight.catchingUp && !flight.afterOpen) {
      stats.waitSeconds += wait;
      stats.engineSeconds += engine;
      this.untold = false;
      this.behindTree = true;
      if (!overdue) this.pace.verified(flight.tree, flight.scores, verdict.accepted.length, wait, engine, queue);
    }
  }

  /** A tree for comparison is ready, below the first `base` tokens; drafting it took `seconds`. */
  compared(draft: Draft, base: number, seconds: number): void {
    this.comparing = { draft, base, seconds };
    this.drafting = false;
  }

  /** The text is `tokens` now. What came of the tree for comparison is measured once it is known. */
  committed(tokens: readonly number[]): void {
    if (!this.comparing) return;
    const draft = this.worthSending(this.comparing.draft);
    const path = foreseen(draft.tree, tokens.slice(this.comparing.base));
    if (!path) return;
    this.pace.foreseen(draft.tree, draft.scores, path.length, this.comparing.seconds);
    this.comparing = null;
  }

  // --- what follows ---

  /** The mode of an answer, or of its rest on a new link. */
  begin(): Mode {
    return this.controller.begin(this.untold);
  }

  /** The mode after a verdict. */
  choose(): Mode {
    return this.controller.choose();
  }

  /** Bounds of the next tree, where the session has room for `nodes` and `depth` levels. */
  treeSize(nodes: number, depth: number): TreeSize {
    const most = Math.min(this.largest.nodes, nodes);
    const levels = Math.min(this.largest.depth, depth);
    if (!this.shaping) return { nodes: most, depth: levels, gain: null };
    return { nodes: Math.min(most, this.pace.worthDrafting()), depth: levels, gain: this.pace.gain() };
  }

  /** What of a draft is sent. */
  worthSending(draft: Draft): Draft {
    const count = this.shaping ? this.pace.worthSending(draft.tree, draft.scores) : draft.tree.size;
    const tree = draft.tree.pruned(count, MAX_NODES);
    return { ...draft, tree, scores: draft.scores.slice(0, tree.size) };
  }

  /** Whether to draft on while a verdict is awaited. */
  draftsAhead(): boolean {
    return this.ahead ?? this.pace.draftsAhead();
  }

  /**
   * `streamed` tokens into an answer's streams: a tree to draft below `tokens` now and then, so that tau stays known.
   * Where the mode is pinned, nobody wants to know it.
   */
  comparison(tokens: readonly number[], streamed: number): Compare[] {
    if (this.controller.pinned !== null || !this.pace.compares(streamed, this.untold)) return [];
    this.untold = false;
    this.drafting = this.beside = true;
    return [{ type: "Compare", prefix: [...tokens], ...this.treeSize(MAX_NODES, this.largest.depth) }];
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
