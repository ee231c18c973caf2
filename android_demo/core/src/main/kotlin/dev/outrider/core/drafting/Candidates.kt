package dev.outrider.core.drafting

import dev.outrider.core.protocol.Noise
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.normalise
import kotlin.math.exp
import kotlin.math.ln
import kotlin.math.ln1p

/** Children kept of an expanded node: at least this many, up to [CHILDREN] if a verdict is likely to end there. */
private const val LEAST_CHILDREN = 16
private const val CHILDREN = 64
private val LIKELY_CHILD = ln(0.002)

/** Likeliest tokens of a node that noise may reorder; less likely ones are left out. */
private const val CANDIDATES = 512

/** A possible child of a node, and its log-probability; with sampling: among all candidates, given the noise. */
internal class Candidate(val token: Int, val logProb: Double)

/** The best children of a node, best first. likeliest: the token that comes first before noise is added. */
internal class Children(val best: List<Candidate>, val likeliest: Int)

/** Ranks possible children of a tree's nodes: the drafter's distribution, lookup's guess and the noise of the draw. */
internal class Candidates(
    private val draftIds: IntArray,
    private val lookup: Lookup?,
    private val confidenceTemperature: Double,
) {
    /** Token id -> row of the LM head, or -1. */
    private val columns = IntArray(draftIds.max() + 1) { -1 }

    /** Scratch `[draftVocab]`: the logits of one row over the temperature. */
    private val x = FloatArray(draftIds.size)
    private val top = Likeliest(draftIds.size)

    /** Return the divisor of logits; for greedy decoding, probabilities then tell how often a token is chosen. */
    fun temperature(sampling: Sampling) = if (sampling.greedy) confidenceTemperature else sampling.temperature

    /** Return the row of [token] in the LM head, or -1. */
    fun columnOf(token: Int): Int = columns.getOrElse(token) { -1 }

    init {
        for ((column, token) in draftIds.withIndex()) columns[token] = column
    }

    /**
     * Return the best children, best first, of row [row] of [logits] `[n, draftVocab]`.
     *
     * path: tokens below the root; position: of the token that is proposed; amounts: added to logits, by token.
     */
    fun best(
        logits: FloatArray,
        row: Int,
        path: List<Int>,
        position: Int,
        sampling: Sampling,
        amounts: Map<Int, Double> = emptyMap(),
    ): Children {
        val vocab = draftIds.size
        val scale = temperature(sampling).toFloat()
        for (column in 0 until vocab) x[column] = logits[row * vocab + column]
        for ((token, amount) in amounts) columnOf(token).let { if (it >= 0) x[it] = (x[it] + amount).toFloat() }
        if (scale != 1f) for (column in 0 until vocab) x[column] /= scale
        var high = x[0]
        for (value in x) high = maxOf(high, value)
        var sum = 0.0
        for (value in x) sum += quickExp((value - high).toDouble())
        val total = if (high > Float.NEGATIVE_INFINITY) high + ln(sum) else 0.0
        val likeliest = top.largest(x, high, minOf(if (sampling.greedy) CHILDREN else CANDIDATES, vocab))
        val ids = IntArray(likeliest.size + 1) { draftIds[likeliest.getOrElse(it) { 0 }] }
        val scores = DoubleArray(ids.size) { Double.NEGATIVE_INFINITY }
        for ((index, column) in likeliest.withIndex()) scores[index] = x[column] - total
        lookup?.guess(path)?.let { mix(it, ids, scores) { column -> x[column] - total } }
        val foremost = ids[scores.indices.maxBy { scores[it] }]
        if (!sampling.greedy) {
            val noise = Noise(sampling.seed, position)
            for (index in scores.indices) scores[index] += noise.gumbel(ids[index])
            val most = scores.max()
            for (index in scores.indices) scores[index] -= most
            normalise(scores)
        }
        // one place more than children, so that an empty last place is not one of them
        val best = largest(scores, minOf(CHILDREN, vocab)).sortedByDescending { scores[it] }
        val possible = best.filter { scores[it] > Double.NEGATIVE_INFINITY }
        val known = possible.filterIndexed { rank, it -> rank < LEAST_CHILDREN || scores[it] > LIKELY_CHILD }
        return Children(known.map { Candidate(ids[it], scores[it]) }, foremost)
    }

    /**
     * Mix a guess into [scores]: it gets the probability of [Lookup.Guess.probability], the drafter's other tokens
     * share the rest. The last place is for a guess that is not a candidate of the drafter; [logQ]: the drafter's
     * log-probabilities.
     */
    private inline fun mix(guess: Lookup.Guess, ids: IntArray, scores: DoubleArray, logQ: (Int) -> Double) {
        val column = columnOf(guess.token)
        val q = if (column >= 0) exp(logQ(column)) else null
        val p = guess.probability(q)
        val rest = ln1p(-p) - ln1p(-minOf(Lookup.SUREST, q ?: 0.0))
        for (index in scores.indices) scores[index] += rest
        val at = ids.indexOf(guess.token).takeIf { it in 0 until ids.lastIndex } ?: ids.lastIndex
        ids[at] = guess.token
        scores[at] = ln(p)
    }
}
