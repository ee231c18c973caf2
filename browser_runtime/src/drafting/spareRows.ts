/**
 * Fills the spare rows of a drafter's step with likely continuations.
 *
 * If memory bandwidth decides, a step of few rows takes nearly as long as one of a tree's breadth. So beside the nodes that
 * it expands, a step runs tokens that probably follow them, before that is known: lookup's guesses, or the drafter's
 * likeliest token after the same token before. If such a token becomes a child, it is expanded already and its level costs
 * no step; otherwise a row of the step and the cache is lost. How likely a token must be depends on the row cost. A tree
 * that is drafted to its end (a gain of 0) stays the same; others may end a little earlier or later.
 */

import type { Guess } from "./lookup.js";

/** Additive mask value that hides a key from a query. */
export const MASKED = -1e9;
/** How often the likeliest next token of a token is the same again, roughly. */
export const SEEN_RATE = 0.4;
/** Paths less likely than this never get a row. */
const FAINTEST = 0.03;
/** Nor does one below this multiple of the row's cost; less than 1, because a correct row would have been run anyway. */
const FAINTEST_SHARE = 0.65;

/** A token, and the row that it follows: one of the nodes that the step expands, or an earlier spare row. */
export interface SpareRow {
  token: number;
  above: number;
}

interface WaitingRow extends SpareRow {
  score: number;
  path: readonly number[];
}

/** Return the least log-probability of a path that is worth a row; rowCost: as `RowCost.value`. */
export function leastScore(rowCost: number): number {
  return Math.log(Math.max(FAINTEST, FAINTEST_SHARE * rowCost));
}

/**
 * Choose the tokens of `most` spare rows, likeliest first, so that every row comes after the one that it follows.
 *
 * paths, scores: tokens from below the root down to each node that the step expands, and their log-probabilities. depth:
 * tokens at this level and below are not expanded. least: log-probability that a path must exceed. predict: the next token
 * of a path.
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
 * Return a step extended by spare rows. nodes: how many of its own rows, the last ones, are nodes that it expands. A spare
 * row sees what the row above it sees, and itself.
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
