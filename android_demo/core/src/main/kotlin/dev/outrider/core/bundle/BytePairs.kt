package dev.outrider.core.bundle

import dev.outrider.core.bundle.SubwordTokenizer.Companion.refuse
import java.util.Locale
import java.util.PriorityQueue

private const val ABSENT = -1

/** Ids of `<0x00>` to `<0xFF>`, the tokens of single bytes, or [ABSENT]. */
internal fun byteTokens(vocab: Map<String, Int>): IntArray =
    IntArray(256) { vocab["<0x%02X>".format(Locale.ROOT, it)] ?: ABSENT }

/** Return the tokens of [text]'s bytes, or null if the vocabulary lacks any of them. */
internal fun IntArray.spell(text: String): List<Int>? =
    text.toByteArray().map { this[it.toInt() and 0xFF] }.takeIf { ABSENT !in it }

/**
 * Byte-pair encoding: in each word the pair of lowest rank is joined again and again.
 *
 * ofBytes: a word begins as its bytes in GPT-2's alphabet, otherwise as its characters. bytes: the tokens of bytes,
 * which replace a character without a token; null: [unknown] does. fuse: one [unknown] replaces several such
 * characters. wholeWords: a word that is a token is not cut.
 */
internal class BytePairs private constructor(
    private val vocab: Map<String, Int>,
    private val merges: Map<Long, Merge>,
    private val ofBytes: Boolean,
    override val unknown: Int?,
    private val bytes: IntArray?,
    private val fuse: Boolean,
    private val wholeWords: Boolean,
) : SubwordModel {
    /** Two neighbouring tokens become [id]; lower ranks first. */
    private class Merge(val rank: Int, val id: Int)

    private val byteIds = IntArray(256) { vocab[ByteLevel.char(it).toString()] ?: ABSENT }

    override fun cut(word: String, out: MutableList<Int>) {
        if (wholeWords) {
            val whole = vocab[if (ofBytes) ByteLevel.written(word) else word]
            if (whole != null) {
                out += whole
                return
            }
        }
        join(if (ofBytes) ofBytes(word) else ofCharacters(word), out)
    }

    private fun ofBytes(word: String): IntArray =
        word.toByteArray().map { byteIds[it.toInt() and 0xFF] }.filter { it != ABSENT }.toIntArray()

    private fun ofCharacters(word: String): IntArray {
        val ids = ArrayList<Int>(word.length)
        var missing = false // characters that [unknown] will replace
        for (character in characters(word)) {
            val id = vocab[character]
            val spelled = if (id == null) bytes?.spell(character) else null
            if (spelled != null) {
                ids += spelled
            } else if (id == null && unknown != null) {
                if (missing && !fuse) ids += unknown
                missing = true
            } else if (id != null) {
                if (missing) ids += unknown!!
                missing = false
                ids += id
            }
        }
        if (missing) ids += unknown!!
        return ids.toIntArray()
    }

    /** Join pairs among [ids] until none is left. */
    private fun join(ids: IntArray, out: MutableList<Int>) {
        val next = IntArray(ids.size) { it + 1 }
        val previous = IntArray(ids.size) { it - 1 }
        val queue = PriorityQueue<Pair>(ids.size + 1, compareBy({ it.merge.rank }, { it.left }))
        fun offer(left: Int) {
            val right = next.getOrElse(left) { ids.size }
            if (left < 0 || right >= ids.size) return
            val merge = merges[key(ids[left], ids[right])] ?: return
            queue.add(Pair(left, ids[left], ids[right], merge))
        }
        ids.indices.forEach(::offer)
        while (true) {
            val pair = queue.poll() ?: break
            val right = next[pair.left]
            // another join may have changed that place meanwhile
            if (ids[pair.left] != pair.one || right >= ids.size || ids[right] != pair.other) continue
            ids[pair.left] = pair.merge.id
            ids[right] = ABSENT
            next[pair.left] = next[right]
            if (next[right] < ids.size) previous[next[right]] = pair.left
            offer(previous[pair.left])
            offer(pair.left)
        }
        ids.filterTo(out) { it != ABSENT }
    }

    private class Pair(val left: Int, val one: Int, val other: Int, val merge: Merge)


    companion object {
        private fun key(one: Int, other: Int) = one.toLong() shl 32 or other.toLong()

        /** From tokenizer.json's `model`. Raises [TokenizerError]. */
        fun of(model: Map<String, Any?>, vocab: Map<String, Int>, ofBytes: Boolean): BytePairs {
            for (name in listOf("dropout", "continuing_subword_prefix", "end_of_word_suffix")) {
                refuse(model[name] != null && model[name] != "") { "sets $name" }
            }
            val unknown = (model["unk_token"] as String?)?.ifEmpty { null }
            refuse(unknown != null && ofBytes) { "has an unk_token beside bytes" }
            return BytePairs(
                vocab, merges(model.field("merges"), vocab), ofBytes, unknown?.let(vocab::get),
                if (model["byte_fallback"] == true) byteTokens(vocab) else null, model["fuse_unk"] == true,
                model["ignore_merges"] == true,
            )
        }

        private fun merges(rows: List<Any?>, vocab: Map<String, Int>): Map<Long, Merge> {
            val merges = HashMap<Long, Merge>(2 * rows.size)
            for ((rank, row) in rows.withIndex()) {
                // a pair, or as one text with a space between
                val (one, other) = (row as? List<*>)?.map { it as String } ?: (row as String).split(' ', limit = 2)
                val ids = listOf(one, other, one + other)
                    .map { vocab[it] ?: throw TokenizerError("tokenizer.json joins $it, which is not a token") }
                merges[key(ids[0], ids[1])] = Merge(rank, ids[2])
            }
            return merges
        }
    }
}

/** The characters of a text, each as a text. */
internal fun characters(text: String): List<String> = buildList {
    var at = 0
    while (at < text.length) {
        val width = Character.charCount(text.codePointAt(at))
        add(text.substring(at, at + width))
        at += width
    }
}
