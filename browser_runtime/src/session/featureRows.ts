/** The feature rows that the drafter holds. */

import { type RowShape, unpackRows } from "../protocol/rows.js";
import type { AddRows } from "./actions.js";

/** Per position of a text, whether the drafter holds its feature row. */
export class RowsSeen {
  constructor(private readonly held: boolean[] = []) {}

  /** Return the record of the first `length` positions. */
  upTo(length: number): RowsSeen {
    return new RowsSeen(this.held.slice(0, length));
  }

  /** Count the first positions that are held without a gap. */
  leading(): number {
    const gap = this.held.indexOf(false);
    return gap < 0 ? this.held.length : gap;
  }

  /**
   * Unpack rows of positions `start` and on, at most `limit` of them.
   *
   * Returns those that are new to the drafter. Rows that do not unpack or lie outside of 0..`maxContext` are ignored: rows
   * only ever cost speed.
   */
  add(start: number, data: Uint8Array, shape: RowShape, maxContext: number, limit?: number): AddRows[] {
    const total = data.length / shape.bytes;
    const count = Math.min(limit ?? total, total);
    if (!Number.isInteger(total)) return [];
    if (start < 0 || start + count > maxContext) return [];
    while (this.held.length < start + count) this.held.push(false);
    const fresh: number[] = [];
    for (let index = 0; index < count; index++) if (!this.held[start + index]) fresh.push(index);
    if (!fresh.length) return [];
    const all = unpackRows(data, shape);
    const rows = new Float32Array(fresh.length * shape.values);
    for (const [place, index] of fresh.entries()) {
      rows.set(all.subarray(index * shape.values, (index + 1) * shape.values), place * shape.values);
      this.held[start + index] = true;
    }
    return [{ type: "AddRows", positions: fresh.map(index => start + index), rows }];
  }
}
