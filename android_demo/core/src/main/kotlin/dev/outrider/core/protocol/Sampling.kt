package dev.outrider.core.protocol

import kotlin.math.exp
import kotlin.math.ln

/**
 * Sampling parameters under the names users know. temperature 0 is greedy.
 *
 * temperature 0..100; topK = 0 keeps every token; topP in (0, 1]; minP in 0..1, relative to the most likely token;
 * seed: 63 bits. Raises [IllegalArgumentException] outside these bounds.
 */
public data class Sampling(
    val temperature: Double = 0.0,
    val topK: Long = 0,
    val topP: Double = 1.0,
    val minP: Double = 0.0,
    val seed: Long = 0,
) {
    init {
        require(temperature in 0.0..100.0) { "temperature $temperature is not in 0..100" }
        require(topK in 0 until (1L shl 32)) { "topK $topK is not in 0..2^32-1" }
        require(topP > 0.0 && topP <= 1.0) { "topP $topP is not in (0, 1]" }
        require(minP in 0.0..1.0) { "minP $minP is not in 0..1" }
        require(seed >= 0) { "seed $seed is negative" }
    }

    val greedy: Boolean get() = temperature == 0.0
}

/**
 * Return the distribution tokens are drawn from: log-probabilities `[vocab]`, -inf if cut off.
 *
 * Temperature first, then top-k, then top-p, then min-p, each on what the one before left. For greedy parameters: the
 * log-softmax at temperature 1.
 */
internal fun logProbs(logits: FloatArray, sampling: Sampling): DoubleArray = logProbs(doubles(logits), sampling)

/** The same of logits in [Double]. */
internal fun logProbs(logits: DoubleArray, sampling: Sampling): DoubleArray {
    val high = logits.max()
    val scale = if (sampling.greedy) 1.0 else sampling.temperature
    val x = DoubleArray(logits.size) { (logits[it] - high) / scale }
    normalise(x)
    if (sampling.greedy) return x
    var cut = Double.NEGATIVE_INFINITY
    if (sampling.topK in 1 until x.size) cut = x.sortedArray()[x.size - sampling.topK.toInt()]
    if (sampling.topP < 1.0) {
        val total = x.sumOf { if (it >= cut) exp(it) else 0.0 }
        // rarer tokens together have less than half of the mass that top-p cuts off: only the others are sorted
        val least = maxOf(cut, ln(total * (1 - sampling.topP) / (2 * x.size)))
        val order = x.indices.filter { x[it] >= least }.sortedByDescending { x[it] }
        val mass = order.runningFold(0.0) { sum, token -> sum + exp(x[token]) }.drop(1)
        val needed = minOf(sampling.topP * total, mass.last()) // rounding may miss it by a little
        cut = maxOf(cut, x[order[mass.indexOfFirst { it >= needed }]])
    }
    if (sampling.minP > 0.0) cut = maxOf(cut, x.max() + ln(sampling.minP))
    if (cut == Double.NEGATIVE_INFINITY) return x
    for (token in x.indices) if (x[token] < cut) x[token] = Double.NEGATIVE_INFINITY
    normalise(x)
    return x
}

/**
 * Draw the token at absolute index [position]: argmax of log p + Gumbel noise; ties go to the lowest id.
 *
 * The verifier draws by this rule, so its output depends on logits, parameters, seed and position and on nothing else:
 * no draft tree, batch or outage can change it.
 */
internal fun draw(logits: FloatArray, sampling: Sampling, position: Int): Int =
    draw(doubles(logits), sampling, position)

/** The same from logits in [Double]. */
internal fun draw(logits: DoubleArray, sampling: Sampling, position: Int): Int {
    if (sampling.greedy) return logits.indices.maxBy { logits[it] }
    val noise = Noise(sampling.seed, position)
    val distribution = logProbs(logits, sampling)
    return distribution.indices.maxBy { distribution[it] + noise.gumbel(it) }
}

private fun doubles(logits: FloatArray) = DoubleArray(logits.size) { logits[it].toDouble() }

/** Subtract the logarithm of the sum of exponentials. */
internal fun normalise(x: DoubleArray) {
    val total = ln(x.sumOf { exp(it) })
    for (index in x.indices) x[index] -= total
}
