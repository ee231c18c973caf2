package dev.outrider.core.bundle

import java.text.Normalizer

/** Text to token ids and back. */
internal interface Tokenizer {
    /** Tokens that match wherever their content occurs in a text. */
    val addedTokens: List<AddedToken> get() = emptyList()

    /**
     * Return token ids of [text]. Special tokens in it are recognised, none are added. Half a surrogate pair is U+FFFD.
     */
    fun encode(text: String): List<Int>

    /**
     * Return token ids of [text], without its marks. Text with a [mark] that looks like one of the added tokens
     * [contents] is plain text.
     */
    fun encodeMarked(text: String, mark: Char, contents: Set<String>): List<Int> = encode(text.without(mark))

    /** Return the text of [ids], without special tokens. Bytes that are not a character become U+FFFD. */
    fun decode(ids: List<Int>): String
}

private val HALF = Regex("\\p{Cs}") // a whole pair is one code point, of another category

/** Replace each half of a surrogate pair by U+FFFD. */
private fun wellFormed(text: String): String = HALF.replace(text, "\uFFFD")

/** tokenizer.json has something that this reader does not support. */
internal class TokenizerError(message: String) : IllegalArgumentException(message)

/** A token that matches wherever its [content] occurs. normalized: it is searched for in normalised text. */
internal class AddedToken(val id: Int, val content: String, val special: Boolean, val normalized: Boolean)

/** Cuts a word into tokens. */
internal interface SubwordModel {
    /** The token for text that the vocabulary lacks, if there is one. */
    val unknown: Int?

    fun cut(word: String, out: MutableList<Int>)
}

/**
 * A tokenizer from Hugging Face's tokenizer.json: byte pairs or Unigram, over bytes or over SentencePiece's text, in
 * which U+2581 replaces a space.
 *
 * The text is cut at added tokens, normalised, cut into words ([PreTokenizer]) and these into tokens ([SubwordModel]).
 */
internal class SubwordTokenizer private constructor(
    vocab: Map<String, Int>,
    private val model: SubwordModel,
    override val addedTokens: List<AddedToken>,
    private val normalize: (String) -> String,
    private val words: PreTokenizer,
    private val decoder: TokenDecoder,
) : Tokenizer {
    private val texts = HashMap<Int, String>().apply { for ((token, id) in vocab) put(id, token) }
    private val addedById = addedTokens.associateBy { it.id }
    private val all = Cutter(addedTokens)

    override fun encode(text: String): List<Int> = all.encode(wellFormed(text))

    override fun encodeMarked(text: String, mark: Char, contents: Set<String>): List<Int> {
        val (controls, others) = addedTokens.partition { it.content in contents }
        val names = controls.filter { it.id != model.unknown }.associate { it.id to it.content }
        val plain = Cutter(others)
        val ids = ArrayList<Int>()
        Finder(controls).cut(wellFormed(text), ids::add) { piece, first ->
            for (id in plain.encode(piece.without(mark), first)) {
                val name = names[id] // a vocabulary of whole words may hold it all the same
                if (name == null) ids += id
                else name.flatMap { plain.encode(it.toString()) }.filterTo(ids) { it !in names }
            }
        }
        return ids
    }

    /** Encodes text around some of the added tokens. */
    private inner class Cutter(tokens: List<AddedToken>) {
        private val rawTokens = Finder(tokens.filter { !it.normalized })
        private val normalizedTokens = Finder(
            tokens.filter { it.normalized }.map { AddedToken(it.id, normalize(it.content), it.special, true) },
        )

        /** first: [text] is at the beginning. */
        fun encode(text: String, first: Boolean = true): List<Int> {
            val ids = ArrayList<Int>()
            rawTokens.cut(text, ids::add) { piece, begins ->
                normalizedTokens.cut(normalize(piece), ids::add) { rest, leads ->
                    words.split(rest, first && begins && leads).forEach { model.cut(it, ids) }
                }
            }
            return ids
        }
    }

    override fun decode(ids: List<Int>): String {
        val tokens = ids.filter { addedById[it]?.special != true }.mapNotNull { addedById[it]?.content ?: texts[it] }
        return decoder.decode(tokens).joinToString("")
    }

    companion object {
        /** Parse the text of tokenizer.json. Raises [TokenizerError] or [JsonError]. */
        fun parse(json: String): SubwordTokenizer {
            val root = Json.parse(json)
            for (name in listOf("truncation", "padding")) refuse(root.field<Any?>(name) != null) { "sets $name" }
            val fields = root.field<Map<String, Any?>>("model")
            val words = root.field<Map<String, Any?>?>("pre_tokenizer")
            val vocab: Map<String, Int>
            val model = when (val type = fields["type"]) {
                "BPE" -> {
                    vocab = fields.field<Map<String, Any?>>("vocab").mapValues { (_, id) -> (id as Long).toInt() }
                    BytePairs.of(fields, vocab, ofBytes(words))
                }
                "Unigram" -> {
                    val pieces = fields.field<List<List<Any?>>>("vocab")
                    vocab = pieces.withIndex().associate { (id, piece) -> piece[0] as String to id }
                    Unigram(pieces.map { it[0] as String }, pieces.map { (it[1] as Number).toDouble() }, fields, vocab)
                }
                else -> throw TokenizerError("tokenizer.json has model $type, which is not known here")
            }
            return SubwordTokenizer(
                vocab, model, root.field<List<Any?>>("added_tokens").map(::addedToken),
                normalizer(root.field("normalizer")),
                words?.let(PreTokenizer::of) ?: PreTokenizer { text, _ -> listOf(text) },
                TokenDecoder.of(root.field("decoder")),
            )
        }

        /** Whether words are bytes in GPT-2's alphabet. */
        private fun ofBytes(words: Map<*, *>?): Boolean = words?.get("type") == "ByteLevel" ||
            (words?.get("pretokenizers") as? List<*>).orEmpty().any { ofBytes(it as? Map<*, *>) }

        private fun addedToken(row: Any?): AddedToken {
            for (name in listOf("single_word", "lstrip", "rstrip")) {
                refuse(row.field<Boolean>(name)) { "has an added token with $name" }
            }
            return AddedToken(row.int("id"), row.field("content"), row.field("special"), row.field("normalized"))
        }

        /** Return the normalisation that is applied to a text first. */
        private fun normalizer(row: Any?): (String) -> String {
            if (row == null) return { it }
            return when (val type = row.field<String>("type")) {
                "Sequence" -> {
                    val steps = row.field<List<Any?>>("normalizers").map(::normalizer);
                    { text -> steps.fold(text) { piece, step -> step(piece) } }
                }
                "NFC", "NFD", "NFKC", "NFKD" -> {
                    val form = Normalizer.Form.valueOf(type);
                    { Normalizer.normalize(it, form) }
                }
                "Prepend" -> row.field<String>("prepend").let { prefix -> { if (it.isEmpty()) it else prefix + it } }
                "Replace" -> {
                    val pattern = PreTokenizer.pattern(row)
                    val content = Regex.escapeReplacement(row.field("content"));
                    { pattern.replace(it, content) }
                }
                else -> throw TokenizerError("tokenizer.json has normalizer $type, which is not known here")
            }
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

    /** Cut a text at the tokens. [rest] gets each text between them, and whether it is the beginning. */
    fun cut(text: String, token: (Int) -> Unit, rest: (String, Boolean) -> Unit) {
        var from = 0
        var at = 0
        while (at < text.length) {
            val found = byStart[text[at]]?.firstOrNull { text.startsWith(it.content, at) }
            if (found == null) {
                at++
                continue
            }
            if (from < at) rest(text.substring(from, at), from == 0)
            token(found.id)
            at += found.content.length
            from = at
        }
        if (from < text.length) rest(text.substring(from), from == 0)
    }
}
