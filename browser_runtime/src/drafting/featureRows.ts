/** The feature rows that the drafter holds, laid out so that cross-attention reads one slice. */

import type { RowShape } from "../protocol/rows.js";

/**
 * The row of position p is stored at p + 1; the slot before the first visible row takes the null row.
 *
 * nullRow: [2 (K, V), heads, headDim], or null: the drafter has none, and reads one row of zeros until the first row
 * arrives.
 */
export class FeatureRows {
  private readonly keys: Float32Array;
  private readonly values: Float32Array;
  private readonly filled: Uint8Array;
  private readonly width: number;

  constructor(
    shape: RowShape,
    maxContext: number,
    private readonly nullRow: Float32Array | null,
  ) {
    this.width = shape.values / 2;
    this.keys = new Float32Array((1 + maxContext) * this.width);
    this.values = new Float32Array((1 + maxContext) * this.width);
    this.filled = new Uint8Array(maxContext);
  }

  get empty(): boolean {
    return !this.filled.includes(1);
  }

  /** Forget the rows of positions `length` and above. */
  keep(length: number): void {
    this.filled.fill(0, length);
  }

  /** Add rows [n, 2, heads, headDim] of the tokens at `positions` [n]. */
  add(positions: readonly number[], rows: Float32Array): void {
    const { width } = this;
    for (const [index, position] of positions.entries()) {
      const at = 2 * index * width;
      this.keys.set(rows.subarray(at, at + width), (position + 1) * width);
      this.values.set(rows.subarray(at + width, at + 2 * width), (position + 1) * width);
      this.filled[position] = 1;
    }
  }

  /** Return the null row and the newest rows, back to the first gap (the verifier sends the newest first). */
  visible(): { rows: number; rowKeys: Float32Array; rowValues: Float32Array } {
    const end = this.filled.lastIndexOf(1) + 1;
    const start = end ? this.filled.lastIndexOf(0, end - 1) + 1 : 0;
    if (end && !this.nullRow) return this.slice(start + 1, end + 1);
    const { width } = this;
    if (this.nullRow) {
      this.keys.set(this.nullRow.subarray(0, width), start * width);
      this.values.set(this.nullRow.subarray(width), start * width);
    } else {
      this.keys.fill(0, 0, width);
      this.values.fill(0, 0, width);
    }
    return this.slice(start, end + 1);
  }

  private slice(from: number, to: number) {
    const [begin, end] = [from * this.width, to * this.width];
    return { rows: to - from, rowKeys: this.keys.subarray(begin, end), rowValues: this.values.subarray(begin, end) };
  }
}
