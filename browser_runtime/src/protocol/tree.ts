/**
 * Draft trees: tokens with parents, hanging below the committed sequence's last token (the root).
 *
 * The root is implicit. Nodes are numbered 0..n-1, parents always before children; ROOT (-1 in memory, 255 on the wire)
 * marks children of the root.
 */

export const ROOT = -1;
/** A parent is one byte on the wire and 255 means the root. */
export const MAX_NODES = 255;

/** A list of tokens and parents is not a valid tree. */
export class TreeError extends Error {}

/** tokens[i] is node i's token id, parents[i] its parent node or ROOT. Throws TreeError. */
export class TokenTree {
  static readonly EMPTY = new TokenTree();
  /** The level of each node; children of the root are on level 1. */
  readonly depths: readonly number[];
  /** Token -> node: for the root's children at 0, for node i's at i + 1. */
  private readonly children: readonly ReadonlyMap<number, number>[];

  constructor(
    readonly tokens: readonly number[] = [],
    readonly parents: readonly number[] = [],
  ) {
    if (tokens.length !== parents.length) throw new TreeError(`${tokens.length} tokens but ${parents.length} parents`);
    if (tokens.length > MAX_NODES) throw new TreeError(`${tokens.length} nodes, at most ${MAX_NODES}`);
    const children = Array.from({ length: tokens.length + 1 }, () => new Map<number, number>());
    const depths: number[] = [];
    for (let node = 0; node < tokens.length; node++) {
      const [token, parent] = [tokens[node], parents[node]];
      if (!(ROOT <= parent && parent < node)) {
        throw new TreeError(`node ${node} has parent ${parent}; parents must come before their children`);
      }
      if (children[parent + 1].has(token)) {
        throw new TreeError(`node ${node} repeats token ${token} under parent ${parent}`);
      }
      children[parent + 1].set(token, node);
      depths.push(parent === ROOT ? 1 : depths[parent] + 1);
    }
    this.children = children;
    this.depths = depths;
  }

  /** A tree of one path from the root. */
  static chain(tokens: readonly number[]): TokenTree {
    return new TokenTree(
      tokens,
      tokens.map((_, node) => node - 1),
    );
  }

  get size(): number {
    return this.tokens.length;
  }

  /** The first `nodes` nodes of at most `depth` levels; parents are included, as they come first. */
  pruned(nodes: number, depth: number): TokenTree {
    const kept = this.tokens.map((_, node) => node).filter(node => this.depths[node] <= depth);
    kept.length = Math.min(kept.length, Math.max(0, nodes));
    if (kept.length === this.size) return this;
    return new TokenTree(
      kept.map(node => this.tokens[node]),
      renumbered(kept, this.parents),
    );
  }

  /** The child of `parent` (a node or ROOT) that carries `token`, or undefined. */
  child(parent: number, token: number): number | undefined {
    return this.children[parent + 1].get(token);
  }

  /** Nodes from the root's child down to `node`; [] for ROOT. */
  path(node: number): number[] {
    return pathTo(node, this.parents);
  }

  /** The path that `tokens`, below the root, took through the tree; null while they have not left it. */
  foreseen(tokens: readonly number[]): number[] | null {
    const path: number[] = [];
    for (const token of tokens) {
      const child = this.child(path.at(-1) ?? ROOT, token);
      if (child === undefined) return path;
      path.push(child);
    }
    return null;
  }
}

/** Nodes from the root's child down to `node`. */
export function pathTo(node: number, parents: readonly number[]): number[] {
  const nodes: number[] = [];
  for (; node !== ROOT; node = parents[node]) nodes.push(node);
  return nodes.reverse();
}

/** Return the parents of the nodes `kept`, as indices into `kept`. */
export function renumbered(kept: readonly number[], parents: readonly number[]): number[] {
  const place = new Map<number, number>([[ROOT, ROOT]]);
  for (const [index, node] of kept.entries()) place.set(node, index);
  return kept.map(node => place.get(parents[node])!);
}
