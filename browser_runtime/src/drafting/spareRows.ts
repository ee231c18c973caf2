/**
 * The rows that a step of the drafter has to spare, and what runs in them.
 *
 * Where the weights' way through memory decides, a step of few rows takes nearly as long as one of a tree's breadth. So
 * behind the nodes that it expands run tokens that probably follow them, before anybody knows whether they do: what lookup
 * guesses, or what the drafter found likeliest when it last stood behind the same token. One that turns out to be a child is
 * expanded already, and its level costs no step; of another a row is lost, of the step and of the cache. How likely a token
 * must be depends on what a row costs. A tree that is drafted to its end (a gain of 0) stays the same; others may end a
 * little earlier or later.
 */

import type { Guess } from "./lookup.js";

/** Added to the score of what a query must not see. */
export const MASKED = -1e9;
/** How often the likeliest next token of a token is the same again, roughly. */
export const SEEN_RATE = 0.4;
/** No row is worth its cost for a path that is less likely than this. */
const FAINTEST = 0.03;
/**
 * Nor for one below this multiple of the row's cost; less than 1, because a row that comes true would have been run anyway.
 */
const FAINTEST_SHARE = 0.65;

/** A token, and the row above it: one of the nodes that the step expands, or behind these another spare row. */
export interface SpareRow {
  token: number;
  above: number;
}

interface WaitingRow extends SpareRow {
  score: number;
  path: readonly number[];
}

/** The least log-probability of a path that is worth a row; rowCost: as `RowCost.value`. */
export function leastScore(rowCost: number): number {
  return Math.log(Math.max(FAINTEST, FAINTEST_SHARE * rowCost));
}

/**
 * What to run in `most` spare rows, what is likelier first, so that every row stands behind the one above it.
 *
 * paths, scores: tokens from below the root down to each node that the step expands, and their log-probabilities. depth:
 * tokens at this level and below are not expanded. least: log-probability that a path must exceed. predict: what may follow
 * a path.
 */
export function spareRows(
  paths: readonly (readonly number[])[],
  scores: readonly number[],
  most: number,
  depth: number,
  least: number,
  predict: (path: readonly number[]) => Guess | null,
): SpareRow[] {
  const rows: SpareRow[] = [];
  const waiting: WaitingRow[] = [];
  const wait = (path: readonly number[], above: number, row: number) => {
    const guess = path.length + 1 < depth ? predict(path) : null;
    if (!guess) return;
    const score = above + Math.log(guess.rate);
    if (score > least) waiting.push({ score, token: guess.token, above: row, path });
  };
  for (const [row, path] of paths.entries()) wait(path, scores[row], row);
  while (rows.length < most && waiting.length) {
    const best = waiting.reduce((likelier, each) => (each.score > likelier.score ? each : likelier));
    waiting.splice(waiting.indexOf(best), 1);
    rows.push({ token: best.token, above: best.above });
    wait([...best.path, best.token], best.score, paths.length + rows.length - 1);
  }
  return rows;
}

/** The inputs of an engine's step: tokens [n], positions [n], mask [n, past + n]. */
export interface StepRows {
  tokens: readonly number[];
  positions: readonly number[];
  mask: Float32Array;
}

/**
 * A step with spare rows behind its own. nodes: how many of these, the last ones, are of nodes that it expands. A spare row
 * sees what the row above it sees, and itself.
 */
export function withSpareRows(step: StepRows, nodes: number, spare: readonly SpareRow[]): StepRows {
  if (!spare.length) return step;
  const count = step.tokens.length;
  const seen = step.mask.length / count;
  const width = seen + spare.length;
  const positions = [...step.positions];
  const mask = new Float32Array((count + spare.length) * width).fill(MASKED);
  for (let row = 0; row < count; row++) mask.set(step.mask.subarray(row * seen, (row + 1) * seen), row * width);
  for (const [at, { above }] of spare.entries()) {
    const row = count + at;
    const over = count - nodes + above;
    mask.copyWithin(row * width, over * width, (over + 1) * width);
    mask[row * width + seen + at] = 0;
    positions.push(positions[over] + 1);
  }
  return { tokens: [...step.tokens, ...spare.map(({ token }) => token)], positions, mask };
}
