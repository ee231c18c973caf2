package dev.outrider.core.drafting

/**
 * What one row more costs in a step of an engine, as a share of the time that a step of one row takes.
 *
 * Where the weights' way through memory decides (processors with instructions for dot products, probably phones),
 * eight rows take hardly longer than one; elsewhere a row takes nearly a time of its own. It is learnt from the steps
 * that are taken anyway; fixed: it is not learnt.
 */
internal class RowCost(private val fixed: Double? = null) {
    /** By rows of a step: how many there were, and the seconds of the fastest. */
    private val steps = IntArray(WIDEST + 1)
    private val fastest = DoubleArray(WIDEST + 1) { Double.POSITIVE_INFINITY }

    var value = fixed ?: USUAL
        private set

    /** A step of [rows] rows took so long. The fastest ones count: others waited for a processor, or read more. */
    fun took(rows: Int, seconds: Double) {
        if (fixed != null || rows > WIDEST) return
        steps[rows]++
        fastest[rows] = minOf(fastest[rows], seconds)
        val narrow = steps.indexOfFirst { it >= ENOUGH }
        val wide = steps.indexOfLast { it >= ENOUGH }
        if (narrow < 1 || wide < 2 * narrow) return // of two that are nearer, chance would decide
        val row = maxOf(0.0, (fastest[wide] - fastest[narrow]) / (wide - narrow))
        val one = fastest[narrow] - row * (narrow - 1)
        value = when {
            fastest[narrow] <= 0.0 -> USUAL // by a clock that is too coarse
            one > 0.0 -> minOf(1.0, row / one)
            else -> 1.0
        }
    }

    companion object {
        /**
         * Until it is known: low enough to save steps where rows are cheap, high enough to lose nothing where they are
         * dear.
         */
        private const val USUAL = 0.3

        /** Wider steps say little of those of trees. */
        private const val WIDEST = 16

        /** Steps of a width behind which the fastest of them is believed. */
        private const val ENOUGH = 3
    }
}
