package dev.outrider.core.protocol

/** Length of the longest common prefix of two texts, in tokens. */
internal fun commonPrefix(a: List<Int>, b: List<Int>): Int {
    val end = minOf(a.size, b.size)
    return (0 until end).firstOrNull { a[it] != b[it] } ?: end
}
