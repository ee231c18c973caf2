/** A draft tree while it grows: nodes with scores and cache rows, and the part that survives a verdict. */

import { pathTo, ROOT, renumbered, TokenTree } from "../protocol/tree.js";
import { nthLargest } from "./select.js";

/** Probability of a node's likeliest child, roughly. */
const BEST_CHILD = 0.65;
/** Each node's share of the gain that a step must promise: a further row of a step is not free. */
const NODE_SHARE = 0.15;

/**
 * Nodes below the text's last token, parents first. An expanded node has been run: its children are known.
 *
 * base: tokens of the text. scores: log-probabilities of the paths to the nodes. slots: the cache row of an expanded node,
 * -1 for the others. used: the next free cache row.
 */
export class Growth {
  readonly tokens: number[] = [];
  readonly parents: number[] = [];
  readonly depths: number[] = [];
  readonly scores: number[] = [];
  readonly slots: number[] = [];
  used: number;
  /** Nodes that are not expanded, and some that were expanded by another way: a heap, the likeliest on top. */
  private readonly open: number[] = [];

  constructor(readonly base: number) {
    this.used = base;
  }

  get size(): number {
    return this.tokens.length;
  }

  /** Add a child of `parent`; logProb: of the last token of the path alone. */
  add(parent: number, token: number, logProb: number): void {
    const [depth, above] = parent === ROOT ? [1, 0] : [this.depths[parent] + 1, this.scores[parent]];
    this.addNode(token, parent, depth, above + logProb, -1);
  }

  /** Take the `most` likeliest nodes above level `depth` that are not expanded yet and score above `floor`. */
  frontier(most: number, depth: number, floor: number): number[] {
    const taken: number[] = [];
    const tooDeep: number[] = [];
    while (this.open.length && taken.length < most && this.scores[this.open[0]] > floor) {
      const node = this.pop();
      if (this.slots[node] >= 0) continue;
      (this.depths[node] < depth ? taken : tooDeep).push(node);
    }
    this.putBack(tooDeep);
    return taken;
  }

  /** Return `nodes` that were not expanded after all. */
  putBack(nodes: readonly number[]): void {
    for (const node of nodes) this.push(node);
  }

  /**
   * Return how many nodes of `frontier`, likeliest first, promise `gain` accepted tokens, and each its share of it; or 0.
   *
   * A node promises the gain of its likeliest child, which replaces one of score `worst`.
   */
  worthExpanding(frontier: readonly number[], worst: number, gain: number): number {
    const least = Math.exp(worst);
    const promised = frontier.map(node => Math.max(0, BEST_CHILD * Math.exp(this.scores[node]) - least));
    if (!frontier.length || promised.reduce((sum, each) => sum + each) < gain) return 0;
    return Math.max(1, promised.filter(each => each >= NODE_SHARE * gain).length);
  }

  /** The score to exceed for a place among the `nodes` best down to level `depth`; -Infinity while there are fewer. */
  worstOfBest(nodes: number, depth: number): number {
    const shallow = Float64Array.from(this.scores.filter((_, node) => this.depths[node] <= depth));
    return shallow.length < nodes ? Number.NEGATIVE_INFINITY : nthLargest(shallow, nodes);
  }

  /** Nodes from below the root down to `node`. */
  path(node: number): number[] {
    return pathTo(node, this.parents);
  }

  /** Tokens from below the root down to `node`. */
  text(node: number): number[] {
    return this.path(node).map(each => this.tokens[each]);
  }

  /** The child of `parent` that carries `token`, or null. */
  child(parent: number, token: number): number | null {
    for (let node = this.size - 1; node > parent; node--) {
      if (this.tokens[node] === token && this.parents[node] === parent) return node;
    }
    return null;
  }

  /** Return the nodes that carry `wanted` from the root down, up to the first that is missing. */
  find(wanted: readonly number[]): number[] {
    const found: number[] = [];
    let at = ROOT;
    for (const token of wanted) {
      let node = at + 1;
      while (node < this.size && !(this.tokens[node] === token && this.parents[node] === at)) node++;
      if (node === this.size) break;
      found.push((at = node));
    }
    return found;
  }

  /**
   * Return the tree below the last node of `path`, its new root, and the cache rows to keep, in new order.
   *
   * The rows of `path` come first, as its tokens now belong to the text. All of `path` must be expanded.
   */
  below(path: readonly number[]): [Growth, number[]] {
    const root = path[path.length - 1];
    const kept = new Growth(this.base + path.length);
    const rows = path.map(node => this.slots[node]);
    const place = new Map([[root, ROOT]]);
    for (let node = root + 1; node < this.size; node++) {
      const parent = place.get(this.parents[node]);
      if (parent === undefined) continue;
      place.set(node, kept.size);
      const expanded = this.slots[node] >= 0;
      const slot = expanded ? this.base + rows.length : -1;
      if (expanded) rows.push(this.slots[node]);
      const [depth, score] = [this.depths[node] - this.depths[root], this.scores[node] - this.scores[root]];
      kept.addNode(this.tokens[node], parent, depth, score, slot);
    }
    kept.used = this.base + rows.length;
    return [kept, rows];
  }

  /**
   * The `nodes` likeliest nodes down to level `depth` and their scores.
   *
   * Best first, so that a verifier that prunes cuts the least likely. Scores fall along a path, so parents are included and
   * precede their children.
   */
  best(nodes: number, depth: number): [TokenTree, number[]] {
    const kept = Array.from(this.tokens.keys()).filter(node => this.depths[node] <= depth);
    kept.sort((one, other) => this.compare(one, other));
    kept.length = Math.min(kept.length, nodes);
    const tokens = kept.map(node => this.tokens[node]);
    return [new TokenTree(tokens, renumbered(kept, this.parents)), kept.map(node => this.scores[node])];
  }

  private addNode(token: number, parent: number, depth: number, score: number, slot: number): void {
    this.tokens.push(token);
    this.parents.push(parent);
    this.depths.push(depth);
    this.scores.push(score);
    this.slots.push(slot);
    if (slot < 0) this.push(this.size - 1);
  }

  /** Below 0 if `one` comes first: the likelier node, of equals the older. */
  private compare(one: number, other: number): number {
    return this.scores[other] - this.scores[one] || one - other;
  }

  private push(node: number): void {
    const { open } = this;
    let place = open.push(node) - 1;
    while (place > 0) {
      const above = (place - 1) >> 1;
      if (this.compare(open[above], node) <= 0) break;
      open[place] = open[above];
      place = above;
    }
    open[place] = node;
  }

  private pop(): number {
    const { open } = this;
    const top = open[0];
    const node = open.pop()!;
    if (!open.length) return top;
    let place = 0;
    for (;;) {
      let child = 2 * place + 1;
      if (child >= open.length) break;
      if (child + 1 < open.length && this.compare(open[child + 1], open[child]) < 0) child++;
      if (this.compare(node, open[child]) <= 0) break;
      open[place] = open[child];
      place = child;
    }
    open[place] = node;
    return top;
  }
}
