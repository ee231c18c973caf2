/** Until it is known: low enough to save steps where rows are cheap, high enough to lose nothing where they are dear. */
const USUAL = 0.3;
/** Wider steps say little of those of trees. */
const WIDEST = 16;
/** Steps of a width behind which the fastest of them is believed. */
const ENOUGH = 3;

/**
 * What one row more costs in a step of an engine, as a share of the time that a step of one row takes.
 *
 * Where the weights' way through memory decides (processors with instructions for dot products, probably phones), eight rows
 * take hardly longer than one; elsewhere a row takes nearly a time of its own. It is learnt from the steps that are taken
 * anyway; fixed: it is not learnt.
 */
export class RowCost {
  value: number;
  /** By rows of a step: how many there were, and the seconds of the fastest. */
  private readonly steps = new Array<number>(WIDEST + 1).fill(0);
  private readonly fastest = new Array<number>(WIDEST + 1).fill(Number.POSITIVE_INFINITY);

  constructor(private readonly fixed: number | null = null) {
    this.value = fixed ?? USUAL;
  }

  /** A step of `rows` rows took so long. The fastest ones count: others waited for a processor, or read more. */
  took(rows: number, seconds: number): void {
    const { steps, fastest } = this;
    if (this.fixed !== null || rows > WIDEST) return;
    steps[rows]++;
    fastest[rows] = Math.min(fastest[rows], seconds);
    const narrow = steps.findIndex(count => count >= ENOUGH);
    const wide = steps.findLastIndex(count => count >= ENOUGH);
    if (narrow < 1 || wide < 2 * narrow) return; // of two that are nearer, chance would decide
    const row = Math.max(0, (fastest[wide] - fastest[narrow]) / (wide - narrow));
    const one = fastest[narrow] - row * (narrow - 1);
    this.value = one > 0 ? Math.min(1, row / one) : 1;
    if (fastest[narrow] <= 0) this.value = USUAL; // by a clock that is too coarse
  }
}
