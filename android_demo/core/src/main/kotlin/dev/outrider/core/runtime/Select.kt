package dev.outrider.core.runtime

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
 * e^[x] for x <= 0 to eight digits, with less work than the library's: a law is summed over the whole vocabulary
 * behind every node.
 */
internal fun quickExp(x: Double): Double {
    if (x < -700) return 0.0
    val twos = (x * LOG2_E - 0.5).toInt()
    val rest = x - twos * LN_2
    val series = 1 + rest * (1 + rest * (0.5 + rest * (C3 + rest * (C4 + rest * (C5 + rest * (C6 + rest * C7))))))
    return series * Double.fromBits((twos + 1023L) shl 52)
}

private const val LN_2 = 0.6931471805599453
private const val LOG2_E = 1.4426950408889634
private const val C3 = 1 / 6.0
private const val C4 = 1 / 24.0
private const val C5 = 1 / 120.0
private const val C6 = 1 / 720.0
private const val C7 = 1 / 5040.0
