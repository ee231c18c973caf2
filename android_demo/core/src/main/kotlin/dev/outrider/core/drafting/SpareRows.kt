package dev.outrider.core.drafting

import kotlin.math.ln

/** Additive mask value that hides a key from a query. */
internal const val MASKED = -1e9f

/** How often the likeliest next token of a token is the same again, roughly. */
internal const val SEEN_RATE = 0.4

/** Paths less likely than this never get a row. */
private const val FAINTEST = 0.03

/**
 * Nor does one below this multiple of the row's cost; less than 1, because a correct row would have been run anyway.
 */
private const val FAINTEST_SHARE = 0.65

/** Return the least log-probability of a path that is worth a row; rowCost: as [RowCost.value]. */
internal fun leastScore(rowCost: Double) = ln(maxOf(FAINTEST, FAINTEST_SHARE * rowCost))

/** A token, and the row that it follows: one of the nodes that the step expands, or an earlier spare row. */
internal data class SpareRow(val token: Int, val above: Int)

private class WaitingRow(val score: Double, val row: SpareRow, val path: List<Int>)

/**
 * Choose the tokens of the [most] spare rows of a step: those that probably follow the nodes that it expands, before
 * that is known. If such a token becomes a child, it is expanded already and its level costs no step; otherwise a row
 * of the step and the cache is lost. The likeliest come first, so that every row comes after the one that it follows.
 *
 * paths, scores: tokens from below the root down to each node that the step expands, and their log-probabilities.
 * depth: tokens at this level and below are not expanded. least: log-probability that a path must exceed. predict: the
 * next token of a path.
 */
internal fun spareRows(
    paths: List<List<Int>>, scores: List<Double>, most: Int, depth: Int, least: Double,
    predict: (List<Int>) -> Lookup.Guess?,
): List<SpareRow> {
    fun next(path: List<Int>, above: Double, row: Int): WaitingRow? {
        val guess = if (path.size + 1 < depth) predict(path) else null
        val score = above + ln(guess?.rate ?: return null)
        return if (score > least) WaitingRow(score, SpareRow(guess.token, row), path) else null
    }
    val rows = ArrayList<SpareRow>()
    val waiting = paths.indices.mapNotNullTo(ArrayList()) { next(paths[it], scores[it], it) }
    while (rows.size < most) {
        val best = waiting.maxByOrNull { it.score } ?: break
        waiting -= best
        rows += best.row
        next(best.path + best.row.token, best.score, paths.size + rows.lastIndex)?.let { waiting += it }
    }
    return rows
}

/** The inputs of an engine's step. */
internal class StepRows(val tokens: LongArray, val positions: LongArray, val mask: FloatArray)

/**
 * Return a step's tokens `[n]`, positions `[n]` and mask `[n, past + n]`, extended by spare rows. nodes: how many of
 * the rows, the last ones, are nodes that the step expands. A spare row sees what the row above it sees, and itself.
 */
internal fun StepRows.withSpareRows(nodes: Int, spare: List<SpareRow>): StepRows {
    if (spare.isEmpty()) return this
    val count = tokens.size
    val seen = mask.size / count
    val width = seen + spare.size
    val places = positions.copyOf(count + spare.size)
    val wide = FloatArray(places.size * width) { MASKED }
    for (row in 0 until count) mask.copyInto(wide, row * width, row * seen, (row + 1) * seen)
    for ((at, each) in spare.withIndex()) {
        val row = count + at
        val over = count - nodes + each.above
        wide.copyInto(wide, row * width, over * width, (over + 1) * width)
        wide[row * width + seen + at] = 0f
        places[row] = places[over] + 1
    }
    return StepRows(tokens + spare.map { it.token.toLong() }, places, wide)
}
