package dev.outrider.core.bundle

import dev.outrider.core.bundle.SubwordTokenizer.Companion.refuse

/** Cuts a text into words, each of which a [SubwordModel] cuts into tokens. */
internal fun interface PreTokenizer {
    /** first: [text] is at the beginning. */
    fun split(text: String, first: Boolean): List<String>

    companion object {
        /** GPT-2's words: contractions, and letters, digits or others with at most one space before them. */
        private const val GPT2 = """'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

        /** Make one from tokenizer.json's `pre_tokenizer`. Raises [TokenizerError]. */
        fun of(row: Map<String, Any?>): PreTokenizer = when (val type = row.field<String>("type")) {
            "Sequence" -> {
                val steps = row.field<List<Map<String, Any?>>>("pretokenizers").map(::of)
                PreTokenizer { text, first ->
                    steps.fold(listOf(text)) { pieces, step ->
                        pieces.flatMapIndexed { place, piece -> step.split(piece, first && place == 0) }
                    }
                }
            }
            "ByteLevel" -> {
                val prefix = row.field<Boolean>("add_prefix_space")
                val whole = row.field<Boolean?>("use_regex") == false
                val words = if (whole) PreTokenizer { text, _ -> listOf(text) } else cut(Regex(java(GPT2)))
                PreTokenizer { text, first ->
                    words.split(if (prefix && !text.startsWith(' ')) " $text" else text, first)
                }
            }
            "Digits" -> cut(Regex(if (row.field("individual_digits")) "\\p{N}" else "\\p{N}+"))
            "Split" -> {
                refuse(row.field("invert")) { "inverts a split" }
                val behavior = row.field<String>("behavior")
                when (behavior) {
                    "Isolated" -> cut(pattern(row))
                    "MergedWithPrevious" -> cutBehind(pattern(row))
                    else -> throw TokenizerError("tokenizer.json has a $behavior split, which is not known here")
                }
            }
            "Metaspace" -> metaspace(row.field<String>("replacement").single(), scheme(row), row["split"] != false)
            else -> throw TokenizerError("tokenizer.json has pre-tokenizer $type, which is not known here")
        }

        /** The `pattern` of a split or a replacement. */
        fun pattern(row: Any?): Regex {
            val pattern = row.field<Map<String, String>>("pattern")
            return pattern["Regex"]?.let { Regex(java(it)) } ?: Regex.fromLiteral(pattern.field("String"))
        }

        /** When Metaspace puts its mark before a text: "always", "first" or "never". */
        fun scheme(row: Map<String, Any?>): String =
            if (row["add_prefix_space"] == false) "never" else row["prepend_scheme"] as String? ?: "always"

        /** [mark] replaces each space and, by the [scheme], precedes the text; with [cuts] a word begins at each. */
        private fun metaspace(mark: Char, scheme: String, cuts: Boolean) = PreTokenizer { text, first ->
            val marked = text.replace(' ', mark)
            val prefixed = scheme == "always" || (scheme == "first" && first)
            val whole = if (prefixed && !marked.startsWith(mark)) mark + marked else marked
            if (!cuts) return@PreTokenizer listOf(whole)
            val begins = whole.indices.filter { it == 0 || whole[it] == mark } + whole.length
            begins.zipWithNext { begin, end -> whole.substring(begin, end) }
        }

        /** A word ends after each match. */
        private fun cutBehind(pattern: Regex) = PreTokenizer { text, _ ->
            val ends = pattern.findAll(text).map { it.range.last + 1 } + text.length
            (sequenceOf(0) + ends).distinct().zipWithNext { begin, end -> text.substring(begin, end) }.toList()
        }

        /** Matches and the texts between them are words. */
        private fun cut(pattern: Regex) = PreTokenizer { text, _ ->
            buildList {
                var from = 0
                for (match in pattern.findAll(text)) {
                    if (match.value.isEmpty()) continue
                    if (from < match.range.first) add(text.substring(from, match.range.first))
                    add(match.value)
                    from = match.range.last + 1
                }
                if (from < text.length) add(text.substring(from))
            }
        }

        /**
         * Return the same pattern for Java, where `\s` and `\d` match only ASCII (and Android has no flag to change
         * that), and ignoring case applies only to ASCII by default.
         */
        private fun java(pattern: String): String = buildString {
            var inClass = 0
            var at = 0
            while (at < pattern.length) {
                val two = pattern.substring(at, minOf(at + 2, pattern.length))
                when {
                    two == "\\s" -> append(if (inClass > 0) SPACES else "[$SPACES]")
                    two == "\\S" && inClass == 0 -> append("[^$SPACES]")
                    two == "\\d" -> append("\\p{Nd}")
                    two == "\\S" || two == "\\w" || two == "\\W" || two == "\\D" || two == "\\b" ->
                        throw TokenizerError("tokenizer.json has $two in a pattern, which is not known here")
                    two[0] == '\\' -> append(two)
                    pattern.startsWith("(?i:", at) -> append("(?iu:").also { at += 2 }
                    else -> {
                        if (two[0] == '[') inClass++
                        if (two[0] == ']') inClass--
                        append(two[0]).also { at-- }
                    }
                }
                at += 2
            }
        }

        /** Unicode's white space, for a character class. */
        private const val SPACES = "\\t-\\r \\x85\\xA0\\u1680\\u2000-\\u200A\\u2028\\u2029\\u202F\\u205F\\u3000"
    }
}
