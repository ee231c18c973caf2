/**
 * Grows draft trees, and writes single tokens when the link is down.
 *
 * A tree grows in batches: the likeliest unexpanded nodes are run together, until no node can join the best ones any more
 * (docs/design.md). With sampling, candidates are ranked by log q + g with the verifier's own noise g, so the target's draw
 * is likely to be among them. Ranking can only cost speed: the output is the target's draw.
 *
 * Spare rows of a step run likely continuations, so that many levels need no step of their own (spareRows.ts).
 *
 * A tree outlives its verdict. If the text continued along an expanded path, that path's cache rows become the text's, and
 * the nodes below it are the next tree already: growing on while the verdict is awaited is drafting ahead.
 */

import type { Constraint } from "../protocol/constraint.js";
import { Noise } from "../protocol/noise.js";
import { commonPrefix } from "../protocol/prefix.js";
import type { RowShape } from "../protocol/rows.js";
import { argmax, logProbs, Sampling } from "../protocol/sampling.js";
import { MAX_NODES, ROOT, TokenTree } from "../protocol/tree.js";
import { Candidates } from "./candidates.js";
import type { Engine } from "./engine.js";
import { FeatureRows } from "./featureRows.js";
import { Growth } from "./growth.js";
import { type Guess, Lookup } from "./lookup.js";
import { RowCost } from "./rowCost.js";
import { leastScore, MASKED, SEEN_RATE, type SpareRow, type StepRows, spareRows, withSpareRows } from "./spareRows.js";

/** Cache rows kept free for the expanded nodes of one tree. */
const TREE_ROWS = 512;
/** Nodes less likely than this are not expanded ahead of a verdict. */
const AHEAD_FLOOR = Math.log(0.0005);
/** Most tokens in one step of the engine. */
const MAX_WIDTH = 64;
/** Tokens of a prompt fed in one step: as fast as more, and attention's temporaries stay small. */
const PROMPT_CHUNK = 32;

/**
 * nodes: size of the tree sent; depth: levels drafted; breadth: most nodes expanded in one step; gain: accepted tokens that
 * one more step must promise, and each of its nodes a share of them; 0 drafts until the tree holds the likeliest nodes of
 * all.
 */
export interface TreeShape {
  nodes: number;
  depth: number;
  breadth: number;
  gain: number;
}

/** A shape whose numbers fit the engine. Throws RangeError. */
export function treeShape(of: Partial<TreeShape> = {}): TreeShape {
  const shape = { nodes: 32, depth: 20, breadth: 8, gain: 0.05, ...of };
  const { nodes, depth, breadth } = shape;
  if (Math.min(nodes, depth, breadth) < 1 || nodes > MAX_NODES) {
    throw new RangeError(`a tree needs 1..${MAX_NODES} nodes and at least one level and one branch`);
  }
  if (breadth > MAX_WIDTH || depth * breadth > TREE_ROWS) {
    throw new RangeError(`breadth must be at most ${MAX_WIDTH} and depth x breadth at most ${TREE_ROWS} tokens`);
  }
  return shape;
}

/**
 * A tree, the log probabilities of its nodes' paths, and its cost.
 *
 * steps: engine steps since it was requested. ahead: its root had been expanded ahead, with `kept` nodes below it.
 */
export interface Draft {
  tree: TokenTree;
  scores: readonly number[];
  steps: number;
  ahead: boolean;
  kept: number;
}

export const NO_DRAFT: Draft = { tree: TokenTree.EMPTY, scores: [], steps: 0, ahead: false, kept: 0 };

/**
 * The parts of a bundle that the drafter needs. draftIds: target token id of each row of the LM head; confidenceTemperature:
 * of greedy decoding, 1 by default; rowCost: as `RowCost.value`, by default learnt from the timing of the engine's steps, so
 * trees depend on time.
 */
export interface DrafterSetup {
  draftIds: ArrayLike<number>;
  rowShape: RowShape;
  saKvHeads: number;
  maxContext: number;
  lookup?: boolean;
  nullRow?: Float32Array | null;
  confidenceTemperature?: number;
  rowCost?: number | null;
}

/** Drafting state of one conversation: self-attention cache and feature rows. One call at a time, in order. */
export class Drafter {
  private readonly draftIds: ArrayLike<number>;
  private readonly maxContext: number;
  private readonly lookup: Lookup | null;
  private readonly candidates: Candidates;
  private readonly rows: FeatureRows;
  /** Values of a cache row, and the cache [capacity, width]. */
  private readonly width: number;
  private readonly capacity: number;
  private readonly keys: Float32Array;
  private readonly values: Float32Array;
  /** Token ids whose keys and values are in rows 0..length-1. */
  private cached: number[] = [];
  /** The tree below `cached`; its candidates were ranked for `sampling`. */
  private growth: Growth | null = null;
  private sampling = new Sampling();
  private constraint: Constraint | null = null;
  private steps = 0;
  private readonly rowCost: RowCost;
  /** Token -> the likeliest next one when it was last expanded. */
  private readonly likeliest = new Map<number, number>();

  constructor(
    private readonly engine: Engine,
    setup: DrafterSetup,
  ) {
    this.draftIds = setup.draftIds;
    this.maxContext = setup.maxContext;
    this.lookup = (setup.lookup ?? true) ? new Lookup() : null;
    this.candidates = new Candidates(setup.draftIds, this.lookup, setup.confidenceTemperature ?? 1);
    this.rows = new FeatureRows(setup.rowShape, setup.maxContext, setup.nullRow ?? null);
    this.rowCost = new RowCost(setup.rowCost ?? null);
    this.width = setup.saKvHeads * setup.rowShape.headDim;
    this.capacity = setup.maxContext + TREE_ROWS;
    this.keys = new Float32Array(this.capacity * this.width);
    this.values = new Float32Array(this.capacity * this.width);
  }

  /** Forget the rows of positions `length` and above, where the text differs now. */
  keepRows(length: number): void {
    this.rows.keep(length);
  }

  /** Keep `text`, whose conversation is over, for lookup in later ones; without lookup nothing is kept. */
  remember(text: readonly number[]): void {
    if (this.lookup) this.lookup.remember(text);
    else this.likeliest.clear();
  }

  /** Forget this text and earlier conversations: drafts no longer use them. */
  forget(): void {
    this.growth = null;
    this.likeliest.clear();
    this.lookup?.forget();
  }

  /**
   * Add feature rows [n, 2, heads, headDim] of the tokens at `positions` [n].
   *
   * Drafts made without any row are discarded: the verifier sends the first ones with an answer's first token.
   */
  addRows(positions: readonly number[], rows: Float32Array): void {
    if (this.rows.empty) this.growth = null;
    this.rows.add(positions, rows);
  }

  /**
   * Draw the drafter's own next token after `prefix` with the target's noise, under the biases and penalties of
   * `constraint`; return it with its probability.
   */
  async nextToken(
    prefix: readonly number[],
    sampling: Sampling,
    constraint: Constraint | null = null,
  ): Promise<{ token: number; probability: number }> {
    const logits = Float64Array.from(await this.advance(prefix));
    for (const [token, amount] of constraint?.amounts(prefix) ?? []) {
      const column = this.candidates.columnOf(token);
      if (column !== undefined) logits[column] += amount;
    }
    const logQ = logProbs(logits, new Sampling({ temperature: this.candidates.temperature(sampling) }));
    const noise = new Noise(sampling.seed, prefix.length);
    const drawn = sampling.greedy ? logQ : logQ.map((value, column) => value + noise.gumbel(this.draftIds[column]));
    const best = argmax(drawn);
    return { token: this.draftIds[best], probability: Math.exp(logQ[best]) };
  }

  /**
   * Draft at most shape.nodes nodes below the last token of `prefix`, ranked under the biases and penalties of `constraint`.
   *
   * Once `cancelled`, asked between steps, the tree so far is returned.
   */
  async draft(
    prefix: readonly number[],
    sampling: Sampling,
    shape: TreeShape,
    cancelled: () => boolean | Promise<boolean> = () => false,
    constraint: Constraint | null = null,
  ): Promise<Draft> {
    const depth = Math.min(shape.depth, shape.nodes, this.maxContext - prefix.length);
    if (depth < 1) return NO_DRAFT;
    this.lookup?.follow(prefix);
    const before = this.steps;
    const there = this.reroot(prefix, sampling, constraint);
    const growth = there ?? (await this.begin(prefix, sampling, constraint, shape.breadth, depth));
    const kept = there ? there.slots.filter(slot => slot >= 0).length : 0;
    while (!(await cancelled())) {
      const worst = growth.worstOfBest(shape.nodes, depth);
      if (!(await this.widen(growth, shape.breadth, depth, worst, shape.gain))) break;
    }
    const [tree, scores] = growth.best(shape.nodes, depth);
    return { tree, scores, steps: this.steps - before, ahead: there !== null, kept };
  }

  /**
   * Grow the last tree below and beside the part that was sent, likeliest nodes first; return the nodes expanded.
   *
   * Path probabilities are those of the verdict, so most work goes where it is likeliest to end.
   */
  async draftAhead(shape: TreeShape, cancelled: () => boolean | Promise<boolean>): Promise<number> {
    const { growth } = this;
    if (!growth) return 0;
    const depth = Math.min(2 * shape.depth, this.maxContext - growth.base);
    let done = 0;
    while (!(await cancelled())) {
      const expanded = await this.widen(growth, shape.breadth, depth, AHEAD_FLOOR, 0);
      if (!expanded) break;
      done += expanded;
    }
    return done;
  }

  /** Run the engine after `past` cache rows; its keys and values are stored right after them. */
  private async step(rows: StepRows, wanted: readonly number[], past: number): Promise<Float32Array> {
    this.steps++;
    const [keys, values] = [this.keys.subarray(0, past * this.width), this.values.subarray(0, past * this.width)];
    const inputs = { ...rows, wanted, past, keys, values, ...this.rows.visible() };
    const began = performance.now();
    const result = await this.engine.step(inputs);
    const took = (performance.now() - began) / 1000;
    if (wanted.length === rows.tokens.length) this.rowCost.took(wanted.length, took); // a prompt skips most of the head
    this.keys.set(result.keys, past * this.width);
    this.values.set(result.values, past * this.width);
    return result.logits;
  }

  /**
   * Bring the cache to `prefix`; return the logits [1 + spare, draftVocab] after its last token and spare rows, whose keys
   * and values follow the text's. Discards the tree.
   */
  private async advance(prefix: readonly number[], spare: readonly SpareRow[] = []): Promise<Float32Array> {
    this.growth = null;
    const kept = this.kept(prefix);
    this.cached.length = kept;
    let logits = new Float32Array();
    for (let start = kept; start < prefix.length; start += PROMPT_CHUNK) {
      const tokens = prefix.slice(start, start + PROMPT_CHUNK);
      const size = tokens.length;
      const width = start + size;
      const mask = new Float32Array(size * width);
      for (let row = 0; row < size; row++) mask.fill(MASKED, row * width + start + row + 1, (row + 1) * width);
      const positions = tokens.map((_, index) => start + index);
      const rows = withSpareRows({ tokens, positions, mask }, 1, width === prefix.length ? spare : []);
      const wanted = [...rows.tokens.keys()].slice(size - 1);
      logits = (await this.step(rows, wanted, start)) as Float32Array<ArrayBuffer>;
      this.cached.push(...tokens);
    }
    return logits;
  }

  /** Count the tokens of `prefix` that need not be read again; the last one's logits are always needed. */
  private kept(prefix: readonly number[]): number {
    return Math.min(commonPrefix(this.cached, prefix), prefix.length - 1);
  }

  /** Return the existing tree below `prefix`, or null; the cache keeps what it can. */
  private reroot(prefix: readonly number[], sampling: Sampling, constraint: Constraint | null): Growth | null {
    const { growth, cached } = this;
    if (!growth || !sampling.equals(this.sampling)) return null;
    if (constraint ? !constraint.addsAs(this.constraint) : this.constraint) return null;
    if (commonPrefix(cached, prefix) < cached.length) return null;
    const found = growth.find(prefix.slice(cached.length));
    const unexpanded = found.findIndex(node => growth.slots[node] < 0);
    const path = unexpanded < 0 ? found : found.slice(0, unexpanded);
    if (path.length) {
      const [below, rows] = growth.below(path);
      this.moveRows(rows, cached.length);
      cached.push(...prefix.slice(cached.length, cached.length + path.length));
      this.growth = below;
    }
    if (cached.length !== prefix.length) this.growth = null;
    return this.growth;
  }

  /** Move cache rows `rows` to `start` and on. */
  private moveRows(rows: readonly number[], start: number): void {
    for (const cache of [this.keys, this.values]) {
      const moved = rows.map(row => cache.slice(row * this.width, (row + 1) * this.width));
      for (const [index, row] of moved.entries()) cache.set(row, (start + index) * this.width);
    }
  }

  /** Begin a tree of the root's children and predicted tokens: a step of `breadth` rows, down to level `depth`. */
  private async begin(
    prefix: readonly number[],
    sampling: Sampling,
    constraint: Constraint | null,
    breadth: number,
    depth: number,
  ): Promise<Growth> {
    const rows = ((prefix.length - this.kept(prefix) - 1) % PROMPT_CHUNK) + 1;
    const spare = this.spareRows([[]], [0], breadth - rows, depth, prefix);
    const logits = await this.advance(prefix, spare);
    const growth = new Growth(prefix.length);
    this.growth = growth;
    this.sampling = sampling;
    this.constraint = constraint;
    growth.used += spare.length;
    this.take(growth, [ROOT], spare, logits, Number.NEGATIVE_INFINITY);
    return growth;
  }

  /** Expand the next nodes; return how many, 0 if there is no room or they do not promise `gain`. */
  private async widen(growth: Growth, breadth: number, depth: number, floor: number, gain: number): Promise<number> {
    const most = Math.min(breadth, this.capacity - growth.used);
    const likely = growth.frontier(most, depth, floor);
    const count = growth.worthExpanding(likely, floor, gain);
    growth.putBack(likely.slice(count));
    if (!count) return 0;
    const frontier = likely.slice(0, count);
    const [paths, scores] = [frontier.map(node => growth.text(node)), frontier.map(node => growth.scores[node])];
    const spare = this.spareRows(paths, scores, most - count, depth, this.cached);
    return this.take(growth, frontier, spare, await this.expand(growth, frontier, spare), floor);
  }

  /** Return likely continuations of `text` and these paths that are worth a row of this engine. */
  private spareRows(
    paths: readonly (readonly number[])[],
    scores: readonly number[],
    most: number,
    depth: number,
    text: readonly number[],
  ): SpareRow[] {
    return spareRows(paths, scores, most, depth, leastScore(this.rowCost.value), path => this.predict(text, path));
  }

  /** Return lookup's guess after `text` and `path`, or the likeliest token after the same last token before. */
  private predict(text: readonly number[], path: readonly number[]): Guess | null {
    const guess = this.lookup?.guess(path) ?? null;
    const token = this.likeliest.get((path.length ? path : text).at(-1)!);
    return token === undefined || (guess && guess.rate >= SEEN_RATE) ? guess : { token, rate: SEEN_RATE };
  }

  /**
   * Add a step's results: the children of the frontier's nodes, then of nodes that spare rows predicted; return the nodes
   * expanded.
   *
   * logits [frontier + spare, draftVocab]; the spare rows' keys and values are the last ones of the cache. Predicted nodes
   * of scores up to `floor` are not needed.
   */
  private take(
    growth: Growth,
    frontier: readonly number[],
    spare: readonly SpareRow[],
    logits: Float32Array,
    floor: number,
  ): number {
    const first = growth.used - spare.length;
    for (const [row, node] of frontier.entries()) this.propose(growth, node, logits, row);
    const nodes: (number | null)[] = [...frontier];
    for (const [at, { token, above }] of spare.entries()) {
      const parent = nodes[above];
      const child = parent === null ? null : growth.child(parent, token);
      const needed = child !== null && growth.slots[child] < 0 && growth.scores[child] > floor;
      nodes.push(needed ? child : null);
      if (!needed) continue;
      growth.slots[child] = first + at;
      this.propose(growth, child, logits, frontier.length + at);
    }
    return nodes.filter(node => node !== null).length;
  }

  /** Add the best children of `parent`; row `row` of the logits [n, draftVocab] belongs to it. */
  private propose(growth: Growth, parent: number, logits: Float32Array, row: number): void {
    const path = growth.text(parent);
    const amounts = this.constraint?.amounts([...this.cached, ...path]);
    const children = this.candidates.best(logits, row, path, growth.base + path.length, this.sampling, amounts);
    for (const { token, logProb } of children.best) growth.add(parent, token, logProb);
    if (children.best.length) this.likeliest.set((path.length ? path : this.cached).at(-1)!, children.likeliest);
  }

  /** Run the engine on the frontier nodes and on spare rows; a node sees the text, its ancestors and itself. */
  private expand(growth: Growth, frontier: readonly number[], spare: readonly SpareRow[]): Promise<Float32Array> {
    const { base } = growth;
    const past = growth.used;
    const width = past + frontier.length;
    growth.used = width + spare.length;
    const mask = new Float32Array(frontier.length * width).fill(MASKED);
    for (const [row, node] of frontier.entries()) {
      growth.slots[node] = past + row;
      mask.fill(0, row * width, row * width + base);
      for (const seen of growth.path(node)) mask[row * width + growth.slots[seen]] = 0;
    }
    const tokens = frontier.map(node => growth.tokens[node]);
    const positions = frontier.map(node => base - 1 + growth.depths[node]);
    const rows = withSpareRows({ tokens, positions, mask }, frontier.length, spare);
    return this.step(rows, [...rows.tokens.keys()], past);
  }
}
