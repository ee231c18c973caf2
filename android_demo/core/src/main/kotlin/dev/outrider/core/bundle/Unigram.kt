package dev.outrider.core.bundle

import dev.outrider.core.bundle.SubwordTokenizer.Companion.refuse

/** The cost of an unknown character beyond the least likely piece, as in SentencePiece. */
private const val UNKNOWN_PENALTY = 10.0

/**
 * SentencePiece's Unigram: of all ways to cut a word into pieces, the likeliest. scores: log probabilities of [pieces].
 * Characters without a piece become [unknown], several together one, or their bytes with byte_fallback.
 */
internal class Unigram(
    private val pieces: List<String>,
    private val scores: List<Double>,
    model: Map<String, Any?>,
    private val vocab: Map<String, Int>,
) : SubwordModel {
    override val unknown: Int = (model["unk_id"] as Long?)?.toInt()
        ?: throw TokenizerError("tokenizer.json has a Unigram model without unk_id, which is not known here")
    private val bytes = if (model["byte_fallback"] == true) byteTokens(vocab) else null
    private val sorted = vocab.keys.filter { it.isNotEmpty() }.toTypedArray().also { it.sort() }
    private val unknownScore = scores.min() - UNKNOWN_PENALTY

    init {
        refuse(unknown !in pieces.indices) { "has unk_id $unknown beyond its vocabulary" }
    }

    override fun cut(word: String, out: MutableList<Int>) {
        val best = DoubleArray(word.length + 1)
        val from = IntArray(word.length + 1) { -1 } // begin of the last piece on the likeliest way to here
        val ids = IntArray(word.length + 1)
        fun offer(begin: Int, end: Int, id: Int, score: Double) {
            if (from[end] >= 0 && best[begin] + score <= best[end]) return
            best[end] = best[begin] + score
            from[end] = begin
            ids[end] = id
        }
        var at = 0
        while (at < word.length) {
            val width = Character.charCount(word.codePointAt(at))
            var known = false
            eachPiece(word, at) { end ->
                val id = vocab.getValue(word.substring(at, end))
                offer(at, end, id, scores[id])
                if (end == at + width) known = true
            }
            if (!known) offer(at, at + width, unknown, unknownScore)
            at += width
        }
        val ends = ArrayList<Int>()
        var end = word.length
        while (end > 0) {
            ends += end
            val fused = ids[end] == unknown
            end = from[end]
            while (fused && end > 0 && ids[end] == unknown) end = from[end]
        }
        var begin = 0
        for (stop in ends.reversed()) {
            val piece = word.substring(begin, stop)
            val id = vocab[piece]
            if (id != null) out += id else out += bytes?.spell(piece) ?: listOf(unknown)
            begin = stop
        }
    }

    /** [found] gets the end of each piece that begins at [at], the shortest first. */
    private inline fun eachPiece(word: String, at: Int, found: (Int) -> Unit) {
        var low = 0
        var high = sorted.size // pieces from low to high begin as the word does from `at` to `end`
        for (end in at until word.length) {
            low = firstNotBelow(low, high, end - at, word[end].code)
            high = firstNotBelow(low, high, end - at, word[end].code + 1)
            if (low == high) return
            if (sorted[low].length == end + 1 - at) found(end + 1)
        }
    }

    /** The first of the sorted pieces from [low] to [high] whose character at [place] is [code] or more. */
    private fun firstNotBelow(low: Int, high: Int, place: Int, code: Int): Int {
        var (below, above) = low - 1 to high
        while (above - below > 1) {
            val middle = (below + above) / 2
            val character = sorted[middle].getOrNull(place)?.code ?: -1
            if (character < code) below = middle else above = middle
        }
        return above
    }
}
