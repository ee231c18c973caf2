package dev.outrider.core.drafting

/**
 * The row cost of one engine, as a share of the time of a step with one row.
 *
 * If memory bandwidth decides (processors with instructions for dot products, probably phones), eight rows take hardly
 * longer than one; elsewhere each row takes nearly as long as a step of its own. It is learnt from the steps that the
 * engine takes anyway; fixed: it is not learnt.
 */
internal class RowCost(private val fixed: Double? = null) {
    /** By rows of a step: how many there were, and the seconds of the fastest. */
    private val steps = IntArray(WIDEST + 1)
    private val fastest = DoubleArray(WIDEST + 1) { Double.POSITIVE_INFINITY }

    var value = fixed ?: USUAL
        private set

    /** Note the time of a step of [rows] rows. The fastest ones count: others waited for a processor, or read more. */
    fun took(rows: Int, seconds: Double) {
        if (fixed != null || rows > WIDEST) return
        steps[rows]++
        fastest[rows] = minOf(fastest[rows], seconds)
        val narrow = steps.indexOfFirst { it >= ENOUGH }
        val wide = steps.indexOfLast { it >= ENOUGH }
        if (narrow < 1 || wide < 2 * narrow) return // closer widths differ by chance
        val row = maxOf(0.0, (fastest[wide] - fastest[narrow]) / (wide - narrow))
        val one = fastest[narrow] - row * (narrow - 1)
        value = when {
            fastest[narrow] <= 0.0 -> USUAL // the clock is too coarse
            one > 0.0 -> minOf(1.0, row / one)
            else -> 1.0
        }
    }

    companion object {
        /**
         * The value until it is known: low enough to save steps if rows are cheap, high enough to lose nothing if they
         * are not.
         */
        private const val USUAL = 0.3

        /** Wider steps predict little about those of trees. */
        private const val WIDEST = 16

        /** Steps of one width before their fastest is trusted. */
        private const val ENOUGH = 3
    }
}
