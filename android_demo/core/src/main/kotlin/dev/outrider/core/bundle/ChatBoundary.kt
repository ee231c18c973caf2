package dev.outrider.core.bundle

import java.text.Normalizer
import java.util.Locale

/** Candidates for the mark, of which the text must lack one: for private use, so templates do not change them. */
private val MARKS = '\uE000'..'\uF8FF'
private val ROLE = Regex("""[\w.-]+""")

/**
 * Keeps content apart from a chat template: content is text, never one of the template's own tokens.
 *
 * If content holds the text of such a token, a mark is inserted before the template is rendered, which keeps it apart
 * from the tokens that the template writes, and it is encoded as plain text. Content without such text is encoded as
 * always. Tokens of the boundary are the special ones, and others that the template itself writes, such as
 * `<tool_response>`. An assistant's turn may hold the latter: models write them as text (`<think>`), and templates look
 * for them there.
 */
internal class ChatBoundary(private val tokenizer: Tokenizer, private val template: String) {
    private val special = tokenizer.addedTokens.filter { it.special && it.content.isNotEmpty() }.map { it.content }
    private val written = tokenizer.addedTokens.map { it.content }.filter { it.isNotEmpty() && it in template }
    private val everyone = Breaker((special + written).toSet())
    private val assistant = Breaker(special.toSet())

    /**
     * Return token ids of a conversation as [render] writes it. Raises [IllegalArgumentException] on an invalid role.
     */
    fun encode(messages: List<ChatMessage>, render: (List<ChatMessage>) -> String): List<Int> {
        for (message in messages) {
            require(ROLE.matches(message.role)) {
                "a role is a plain name such as user or assistant, not \"${message.role}\""
            }
        }
        val used = (messages.map { it.content } + template).flatMapTo(HashSet()) { it.asIterable() }
        val mark = requireNotNull(MARKS.firstOrNull { it !in used }) {
            "the conversation uses every character of the private use area; leave some out"
        }
        val text = render(
            messages.map {
                val breaker = if (it.role == "assistant") assistant else everyone
                it.copy(content = breaker.marked(it.content, mark))
            },
        )
        return if (mark in text) tokenizer.encodeMarked(text, mark, everyone.contents) else tokenizer.encode(text)
    }
}

/** Breaks tokens, by their [contents], wherever they occur, begin or end in a text, in any case and before a trim. */
private class Breaker(val contents: Set<String>) {
    private val byStart = contents.groupBy { it[0].lowercaseChar() }
    private val heads = contents.flatMapTo(HashSet()) { one -> (1 until one.length).map { folded(one.take(it)) } }
    private val tails = contents.flatMapTo(HashSet()) { one -> (1 until one.length).map { folded(one.drop(it)) } }
    private val longest = contents.maxOfOrNull { it.length } ?: 0

    fun marked(text: String, mark: Char): String {
        val places = tokensIn(text).mapTo(sortedSetOf()) { it + 1 }
        places += ends(text, 0, text.length)
        val begin = text.indexOfFirst { !it.isWhitespace() }
        if (begin >= 0) places += ends(text, begin, text.trimEnd().length)
        if (places.isEmpty() && tokensIn(Normalizer.normalize(text, Normalizer.Form.NFC)).any()) places += text.length
        val marked = StringBuilder(text)
        for (place in places.reversed()) marked.insert(place, mark)
        return marked.toString()
    }

    private fun tokensIn(text: String) = text.indices.asSequence().filter { at ->
        byStart[text[at].lowercaseChar()].orEmpty().any { text.startsWith(it, at, ignoreCase = true) }
    }

    /** Return the places where a mark breaks a token that may begin or end in the text from [begin] to [end]. */
    private fun ends(text: String, begin: Int, end: Int): Set<Int> {
        val places = HashSet<Int>()
        for (length in 1 until minOf(longest, end - begin + 1)) {
            if (folded(text.substring(end - length, end)) in heads) places += end - length + 1
            if (folded(text.substring(begin, begin + length)) in tails) places += begin + length - 1
        }
        return places
    }

    private fun folded(text: String) = text.lowercase(Locale.ROOT)
}
