package dev.outrider.core.bundle

import java.text.Normalizer
import java.util.PriorityQueue

/** Text to token ids and back. */
internal interface Tokenizer {
    /** Tokens that stand for themselves wherever their content occurs in a text. */
    val addedTokens: List<AddedToken> get() = emptyList()

    /** Token ids of [text]. Special tokens that stand in it are recognised, none are added. */
    fun encode(text: String): List<Int>

    /**
     * Token ids of [text], in which [mark] stands inside what looks like one of the added tokens [contents] and is
     * plain text; the marks are left out.
     */
    fun encodeMarked(text: String, mark: Char, contents: Set<String>): List<Int> = encode(text.without(mark))

    /** Text of [ids], special tokens left out. Bytes that are not a character become U+FFFD. */
    fun decode(ids: List<Int>): String
}

/** tokenizer.json holds something that this reader does not know. */
internal class TokenizerError(message: String) : IllegalArgumentException(message)

/** A token that stands for itself wherever its [content] occurs. normalized: it is looked for in normalised text. */
internal class AddedToken(val id: Int, val content: String, val special: Boolean, val normalized: Boolean)

/**
 * Byte-level byte-pair encoding, as GPT-2 and most models since have it, read from Hugging Face's tokenizer.json.
 *
 * The text is cut at added tokens, normalised, cut into words ([PreTokenizer]); in each word's bytes the pair of lowest
 * rank is joined again and again.
 */
internal class BytePairTokenizer private constructor(
    private val vocab: Map<String, Int>,
    private val merges: Map<Long, Merge>,
    override val addedTokens: List<AddedToken>,
    private val words: PreTokenizer,
    private val compose: Boolean,
    private val wholeWords: Boolean,
) : Tokenizer {
    /** Two neighbouring tokens become [id]; lower ranks first. */
    internal class Merge(val rank: Int, val id: Int)

    private val byteIds = IntArray(256) { vocab[ByteLevel.char(it).toString()] ?: ABSENT }
    private val texts = HashMap<Int, String>().apply { for ((token, id) in vocab) put(id, token) }
    private val addedById = addedTokens.associateBy { it.id }
    private val all = Cutter(addedTokens)

    override fun encode(text: String): List<Int> = all.encode(text)

    override fun encodeMarked(text: String, mark: Char, contents: Set<String>): List<Int> {
        val (controls, others) = addedTokens.partition { it.content in contents }
        val names = controls.associate { it.id to it.content }
        val plain = Cutter(others)
        val ids = ArrayList<Int>()
        Finder(controls).cut(text, ids::add) { piece ->
            for (id in plain.encode(piece.without(mark))) {
                val name = names[id] // a vocabulary of whole words knows it all the same
                if (name == null) ids += id else name.flatMapTo(ids) { plain.encode(it.toString()) }
            }
        }
        return ids
    }

    /** Encodes what stands between some of the added tokens. */
    private inner class Cutter(tokens: List<AddedToken>) {
        private val rawTokens = Finder(tokens.filter { !it.normalized })
        private val normalizedTokens = Finder(tokens.filter { it.normalized })

        fun encode(text: String): List<Int> {
            val ids = ArrayList<Int>()
            rawTokens.cut(text, ids::add) { piece ->
                val normal = if (compose) Normalizer.normalize(piece, Normalizer.Form.NFC) else piece
                normalizedTokens.cut(normal, ids::add) { rest -> words.split(rest).forEach { join(it, ids) } }
            }
            return ids
        }
    }

    override fun decode(ids: List<Int>): String {
        val bytes = ByteBuffer8()
        for (id in ids) {
            val token = addedById[id]
            if (token == null || !token.special) ByteLevel.bytes(token?.content ?: texts[id] ?: continue, bytes)
        }
        return decodeUtf8(bytes.array, bytes.size)
    }

    /** The tokens of one word. */
    private fun join(word: String, out: MutableList<Int>) {
        val bytes = word.toByteArray()
        if (wholeWords) {
            val whole = vocab[String(CharArray(bytes.size) { ByteLevel.char(bytes[it].toInt() and 0xFF) })]
            if (whole != null) {
                out += whole
                return
            }
        }
        val ids = bytes.map { byteIds[it.toInt() and 0xFF] }.filter { it != ABSENT }.toIntArray()
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
            // what stood there may have been joined otherwise meanwhile
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
        private const val ABSENT = -1

        private fun key(one: Int, other: Int) = one.toLong() shl 32 or other.toLong()

        /** From the text of tokenizer.json. Raises [TokenizerError] or [JsonError]. */
        fun parse(json: String): BytePairTokenizer {
            val root = Json.parse(json)
            for (name in listOf("truncation", "padding")) refuse(root.field<Any?>(name) != null) { "sets $name" }
            val model = root.field<Map<*, *>>("model")
            refuse(model["type"] != "BPE") { "has model ${model["type"]}, not BPE" }
            for (name in listOf("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")) {
                refuse(model[name] != null && model[name] != "") { "sets $name" }
            }
            refuse(model["byte_fallback"] == true) { "falls back to bytes" }
            val vocab = model.field<Map<String, Any?>>("vocab").mapValues { (_, id) -> (id as Long).toInt() }
            val decoder = root.field<Any>("decoder").field<String>("type")
            refuse(decoder != "ByteLevel") { "has decoder $decoder, not ByteLevel" }
            return BytePairTokenizer(
                vocab, merges(model.field("merges"), vocab), root.field<List<Any?>>("added_tokens").map(::addedToken),
                PreTokenizer.of(root.field("pre_tokenizer")), composes(root.field("normalizer")),
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

        private fun addedToken(row: Any?): AddedToken {
            for (name in listOf("single_word", "lstrip", "rstrip")) {
                refuse(row.field<Boolean>(name)) { "has an added token with $name" }
            }
            return AddedToken(row.int("id"), row.field("content"), row.field("special"), row.field("normalized"))
        }

        private fun composes(normalizer: Any?): Boolean {
            if (normalizer == null) return false
            val type = normalizer.field<String>("type")
            refuse(type != "NFC") { "has normalizer $type, not NFC" }
            return true
        }

        internal inline fun refuse(wrong: Boolean, what: () -> String) {
            if (wrong) throw TokenizerError("tokenizer.json ${what()}, which is not known here")
        }
    }
}

internal fun String.without(mark: Char) = replace(mark.toString(), "")

/** Finds added tokens in a text, the leftmost first and there the longest. */
private class Finder(tokens: List<AddedToken>) {
    private val byStart = tokens.filter { it.content.isNotEmpty() }.groupBy { it.content[0] }
        .mapValues { (_, same) -> same.sortedByDescending { it.content.length } }

    fun cut(text: String, token: (Int) -> Unit, rest: (String) -> Unit) {
        var from = 0
        var at = 0
        while (at < text.length) {
            val found = byStart[text[at]]?.firstOrNull { text.startsWith(it.content, at) }
            if (found == null) {
                at++
                continue
            }
            if (from < at) rest(text.substring(from, at))
            token(found.id)
            at += found.content.length
            from = at
        }
        if (from < text.length) rest(text.substring(from))
    }
}
