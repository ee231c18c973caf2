package dev.outrider.core.drafting

import kotlin.math.pow

/** The [n]-th largest of [values], 1 being the largest: a heap of the n largest so far, the least of them on top. */
internal fun nthLargest(values: DoubleArray, n: Int): Double {
    val heap = values.copyOf(n)
    for (place in n / 2 - 1 downTo 0) sink(heap, place)
    for (index in n until values.size) {
        if (values[index] > heap[0]) {
            heap[0] = values[index]
            sink(heap, 0)
        }
    }
    return heap[0]
}

/** The places of the [count] largest of [values], ascending; of equals the first. */
internal fun largest(values: DoubleArray, count: Int): IntArray {
    val bound = nthLargest(values, count)
    var equals = count
    for (value in values) if (value > bound) equals--
    val places = IntArray(count)
    var found = 0
    for (place in values.indices) {
        if (values[place] > bound || (values[place] == bound && equals-- > 0)) places[found++] = place
    }
    return places
}

/** Buckets of [Likeliest], and how many of them the logits of one unit fall into. */
private const val BUCKETS = 1024
private const val BUCKETS_PER_UNIT = 32f

/**
 * Finds the largest of many values, such as the logits of a whole vocabulary; used again and again for [size] values.
 *
 * Values are counted by their distance from the largest one. The bucket of the last place is a bound, below which
 * values are skipped.
 */
internal class Likeliest(size: Int) {
    private val counts = IntArray(BUCKETS)
    private val places = IntArray(size)

    /** The places of the [count] largest of [values] `[size]`, ascending; of equals the first. high: the largest. */
    fun largest(values: FloatArray, high: Float, count: Int): IntArray {
        counts.fill(0)
        for (value in values) counts[bucket(high - value)]++
        var last = 0
        var covered = counts[0]
        while (covered < count) covered += counts[++last]
        var found = 0
        for (place in values.indices) if (bucket(high - values[place]) <= last) places[found++] = place
        val near = DoubleArray(found) { values[places[it]].toDouble() }
        return largest(near, count).also { best -> for (index in best.indices) best[index] = places[best[index]] }
    }

    private fun bucket(below: Float) = minOf((below * BUCKETS_PER_UNIT).toInt(), BUCKETS - 1)
}

private fun sink(heap: DoubleArray, from: Int) {
    val value = heap[from]
    var place = from
    while (true) {
        var child = 2 * place + 1
        if (child >= heap.size) break
        if (child + 1 < heap.size && heap[child + 1] < heap[child]) child++
        if (heap[child] >= value) break
        heap[place] = heap[child]
        place = child
    }
    heap[place] = value
}

/**
 * e^[x] for x <= 0 to eight digits, faster than the library's: for every node a distribution is summed over the whole
 * vocabulary.
 */
internal fun quickExp(x: Double): Double {
    if (x < -700) return 0.0
    val parts = (x * PARTS_PER_E - 0.5).toInt()
    val rest = x - parts * (1 / PARTS_PER_E)
    val whole = ((parts shr PART_BITS) + 1023L) shl 52
    return (1 + rest * (1 + rest * 0.5)) * POWERS[parts and PARTS - 1] * Double.fromBits(whole)
}

private const val PART_BITS = 8
private const val PARTS = 1 shl PART_BITS
private const val PARTS_PER_E = 1.4426950408889634 * PARTS

/** 2^(index / PARTS). */
private val POWERS = DoubleArray(PARTS) { 2.0.pow(it / PARTS.toDouble()) }
