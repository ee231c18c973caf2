/**
 * Feature rows on the wire: 4 bits a value, with one float16 scale per (token, K|V, head).
 *
 * A block of n rows is the scales [n, 2, heads] float16, then the values [n, 2, heads, ceil(headDim / 2)] bytes, both
 * little-endian and row-major. A byte holds two values of a head, the first in its low half, -7..7 in two's complement.
 */

/** heads: the drafter's cross-attention KV heads; headDim: values per head. */
export class RowShape {
  constructor(
    readonly heads: number,
    readonly headDim: number,
  ) {}

  /** Numbers in one row: keys and values. */
  get values(): number {
    return 2 * this.heads * this.headDim;
  }

  /** Bytes of one packed row. */
  get bytes(): number {
    return 2 * this.heads * (2 + ((this.headDim + 1) >> 1));
  }
}

/** Unpack float32 rows [n, 2, heads, headDim]. Throws RangeError on a wrong length. */
export function unpackRows(data: Uint8Array, shape: RowShape): Float32Array {
  const count = data.length / shape.bytes;
  if (!Number.isInteger(count)) {
    throw new RangeError(`${data.length} bytes of rows are not a multiple of ${shape.bytes}`);
  }
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  const [groups, width] = [count * 2 * shape.heads, (shape.headDim + 1) >> 1];
  const rows = new Float32Array(count * shape.values);
  for (let group = 0, at = 0; group < groups; group++) {
    const scale = halfToFloat(view.getUint16(2 * group, true));
    for (let index = 0; index < shape.headDim; index++, at++) {
      const pair = view.getUint8(2 * groups + group * width + (index >> 1));
      rows[at] = ((index & 1 ? pair << 24 : pair << 28) >> 28) * scale;
    }
  }
  return rows;
}

/** Return the float16 number of these 16 bits. */
export function halfToFloat(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}
