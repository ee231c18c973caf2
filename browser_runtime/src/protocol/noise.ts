/**
 * Keyed Gumbel noise, specified bit for bit, so that every port and replica draws the same token.
 *
 * Arithmetic is modulo 2^32; `fmix32` is MurmurHash3's finaliser.
 *
 *     k = fmix32(seed_low + 0x9E3779B9)
 *     k = fmix32(k ^ seed_high)
 *     k = fmix32(k ^ fmix32(position + 0x7F4A7C15))
 *     h = fmix32(k ^ fmix32(token + 0x9E3779B9))
 *     u = (h + 0.5) / 2^32            never 0 or 1
 *     g = -ln(-ln(u))
 */

const GOLDEN = 0x9e3779b9;

/** MurmurHash3's 32-bit finaliser; arguments and results count modulo 2^32. */
export function fmix32(h: number): number {
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
}

/** The noise of one `position`, the absolute index of the token being drawn, under a `seed` of 63 bits. */
export class Noise {
  private readonly key: number;

  constructor(seed: bigint, position: number) {
    let k = fmix32(Number(seed & 0xffffffffn) + GOLDEN);
    k = fmix32(k ^ Number((seed >> 32n) & 0xffffffffn));
    this.key = fmix32(k ^ fmix32(position + 0x7f4a7c15));
  }

  /** 32 bits for `token`. */
  hash(token: number): number {
    return fmix32(this.key ^ fmix32(token + GOLDEN));
  }

  /** Standard Gumbel noise for `token`. */
  gumbel(token: number): number {
    return -Math.log(-Math.log((this.hash(token) + 0.5) / 4294967296));
  }
}
