/** The inputs of a target's graph for one text that begins at the pool's first row (`outrider_core/targets/batch.py`). */

import type { TargetShape } from "../bundle/understudyStore.js";

/** Rows in a block of the pool; within a block, rows of one head are contiguous. */
export const POOL_BLOCK = 64;

/** An input of a graph, row-major. */
export type Input =
  | { type: "int64"; data: BigInt64Array; dims: number[] }
  | { type: "float32"; data: Float32Array; dims: number[] }
  | { type: "float64"; data: Float64Array; dims: number[] };

/** A step's inputs beside the pool, by name. blocks: the part of the pool that it reads and writes. */
export interface Feed {
  blocks: number;
  inputs: Record<string, Input>;
}

/** Return the inputs for `tokens` after `past` positions; the step returns logits of the last `wanted` of them. */
export function feedOf(shape: TargetShape, past: number, tokens: readonly number[], wanted: number): Feed {
  const { heads, kvHeads, window } = shape;
  const group = heads / kvHeads;
  const count = tokens.length;
  const blocks = Math.ceil((past + count) / POOL_BLOCK);
  const ints = (dims: number[], value: (index: number) => number): Input => {
    const size = dims.reduce((product, each) => product * each);
    return { type: "int64", data: BigInt64Array.from({ length: size }, (_, index) => BigInt(value(index))), dims };
  };
  const slot = (index: number) => {
    const row = past + (Math.trunc(index / 3) % count);
    if (index % 3 === 0) return Math.trunc(row / POOL_BLOCK);
    return index % 3 === 1 ? Math.trunc(index / (3 * count)) : row % POOL_BLOCK;
  };
  const masked = (window: number): Input => {
    const data = maskOf(past, count, blocks, group, window);
    return { type: "float32", data, dims: [blocks, 1, group * count, POOL_BLOCK] };
  };
  const inputs: Record<string, Input> = {
    ids: ints([count], index => tokens[index]),
    positions: ints([1, count], index => past + index),
    wanted: ints([wanted], index => count - wanted + index),
    mask: masked(Number.POSITIVE_INFINITY),
    ...(window && { window_mask: masked(window) }),
    slots: ints([1, kvHeads, count, 3], slot),
    // as there is only one text, every block gets all queries, and all sums belong to it
    queries: ints([1, kvHeads, group * count], index => index),
    part_of_block: ints([1], () => 0),
    blocks_of_part: ints([1, blocks], index => index),
    answers: ints([count, heads], index => (index % heads) * count + Math.trunc(index / heads)),
    shares_of_blocks: { type: "float64", data: new Float64Array(blocks).fill(1), dims: [1, blocks] },
  };
  return { blocks, inputs };
}

/** Return 0 for the last `window` tokens up to the query's own, else -inf: [blocks, 1, group * count, POOL_BLOCK]. */
function maskOf(past: number, count: number, blocks: number, group: number, window: number): Float32Array {
  const mask = new Float32Array(blocks * group * count * POOL_BLOCK).fill(Number.NEGATIVE_INFINITY);
  let at = 0;
  for (let block = 0; block < blocks; block++) {
    for (let query = 0; query < group * count; query++, at += POOL_BLOCK) {
      const visible = past + (query % count) + 1 - block * POOL_BLOCK;
      const [first, end] = [visible - window, visible].map(row => Math.max(0, Math.min(POOL_BLOCK, row)));
      mask.fill(0, at + first, at + end);
    }
  }
  return mask;
}
