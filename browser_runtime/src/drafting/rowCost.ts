/** The value until it is known: low enough to save steps if rows are cheap, high enough to lose nothing if they are not. */
const USUAL = 0.3;
/** Wider steps predict little about those of trees. */
const WIDEST = 16;
/** Steps of one width before their fastest is trusted. */
const ENOUGH = 3;

/**
 * The row cost of one engine, as a share of the time of a step with one row.
 *
 * If memory bandwidth decides (processors with instructions for dot products, probably phones), eight rows take hardly
 * longer than one; elsewhere each row takes nearly as long as a step of its own. It is learnt from the steps that the engine
 * takes anyway; fixed: it is not learnt.
 */
export class RowCost {
  value: number;
  /** By rows of a step: how many there were, and the seconds of the fastest. */
  private readonly steps = new Array<number>(WIDEST + 1).fill(0);
  private readonly fastest = new Array<number>(WIDEST + 1).fill(Number.POSITIVE_INFINITY);

  constructor(private readonly fixed: number | null = null) {
    this.value = fixed ?? USUAL;
  }

  /** Note the time of a step of `rows` rows. The fastest ones count: others waited for a processor, or read more. */
  took(rows: number, seconds: number): void {
    const { steps, fastest } = this;
    if (this.fixed !== null || rows > WIDEST) return;
    steps[rows]++;
    fastest[rows] = Math.min(fastest[rows], seconds);
    const narrow = steps.findIndex(count => count >= ENOUGH);
    const wide = steps.findLastIndex(count => count >= ENOUGH);
    if (narrow < 1 || wide < 2 * narrow) return; // closer widths differ by chance
    const row = Math.max(0, (fastest[wide] - fastest[narrow]) / (wide - narrow));
    const one = fastest[narrow] - row * (narrow - 1);
    this.value = one > 0 ? Math.min(1, row / one) : 1;
    if (fastest[narrow] <= 0) this.value = USUAL; // the clock is too coarse
  }
}
