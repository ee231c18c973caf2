package dev.outrider.core

import dev.outrider.core.protocol.fmix32
import dev.outrider.core.targets.UnderstudyModel

/**
 * A complete model whose logits are a hash of all that it has read: some [vocab] values below 8.
 *
 * script: a text that it likes to write.
 */
class HashModel(private val vocab: Int, private val script: () -> List<Int> = { emptyList() }) : UnderstudyModel {
    private val held = ArrayList<Int>()
    var steps = 0
        private set
    var closed = false
        private set

    override fun step(past: Int, tokens: List<Int>, wanted: Int): List<FloatArray> {
        check(!closed && past <= held.size && tokens.isNotEmpty() && wanted in 1..tokens.size)
        steps++
        held.subList(past, held.size).clear()
        held += tokens
        return (held.size - wanted until held.size).map(::row)
    }

    override fun close() {
        closed = true
    }

    private fun row(last: Int): FloatArray {
        var h = 1
        val read = held.subList(0, last + 1)
        for ((position, token) in read.withIndex()) h = fmix32(h xor (0x9E3779B1.toInt() * token + position))
        val logits = FloatArray(vocab) { (fmix32(h xor fmix32(it)) ushr 16) / 8192f }
        val written = script()
        val liked = read.size < written.size && written.subList(0, read.size) == read && (h ushr 8) % 10 < 8
        if (liked) logits[written[read.size]] += 30f
        return logits
    }
}
