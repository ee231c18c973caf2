/** Seconds on the clock of sessions. */
export function clock(): number {
  return performance.now() / 1000;
}
