/** The cost curve of a verifier's steps, advertised in WELCOME: devices choose trees and modes by it. */

/** Most points of a curve on the wire. */
export const MAX_POINTS = 16;

/** Seconds of a step by its tokens (of all sessions), ascending; straight lines between the points. */
export class CostCurve {
  constructor(
    readonly tokens: readonly number[],
    readonly seconds: readonly number[],
  ) {}

  /** Return the seconds of a step of [count] tokens; beyond the last point the curve is extrapolated linearly. */
  at(count: number): number {
    const { tokens, seconds } = this;
    if (count <= tokens[0] || tokens.length === 1) return seconds[0];
    const found = tokens.findIndex(point => point >= count);
    const right = found < 0 ? tokens.length - 1 : found;
    const [x0, y0] = [tokens[right - 1], seconds[right - 1]];
    return y0 + ((seconds[right] - y0) * (count - x0)) / (tokens[right] - x0);
  }

  equals(other: CostCurve | null): boolean {
    return other !== null && `${this.tokens}/${this.seconds}` === `${other.tokens}/${other.seconds}`;
  }

  /** Decode uint32 pairs (tokens, microseconds); null for bytes that are not an ascending curve of positive times. */
  static unpack(data: Uint8Array): CostCurve | null {
    if (!data.length || data.length % 8) return null;
    const view = new DataView(data.buffer, data.byteOffset, data.length);
    const [tokens, micros]: number[][] = [[], []];
    for (let at = 0; at < data.length; at += 8) {
      tokens.push(view.getUint32(at, true));
      micros.push(view.getUint32(at + 4, true));
    }
    if (tokens.some((point, i) => i > 0 && point <= tokens[i - 1]) || micros.some(micro => micro < 1)) return null;
    return new CostCurve(
      tokens,
      micros.map(micro => 1e-6 * micro),
    );
  }
}
