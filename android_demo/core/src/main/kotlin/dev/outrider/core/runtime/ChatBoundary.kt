package dev.outrider.core.runtime

/** Characters of which one that nobody wrote is the mark: for private use, so nothing changes them on the way. */
private val MARKS = '\uE000'..'\uF8FF'
private val ROLE = Regex("""[\w.-]+""")

/**
 * The boundary between a chat template and what people say: content is text, never one of the template's own tokens.
 *
 * Where content holds the text of such a token, a mark is set into it before the template is rendered: so it stays
 * apart from the tokens that the template writes, and is encoded as plain text. Content without such text is encoded
 * as it always was. Tokens of the boundary are the special ones, and others that the template itself writes, such as
 * `<tool_response>`. An assistant's turn may hold the latter: models write them as text (`<think>`), and templates look
 * for them there.
 */
internal class ChatBoundary(private val tokenizer: Tokenizer, private val template: String) {
    private val special = tokenizer.addedTokens.filter { it.special && it.content.isNotEmpty() }.map { it.content }
    private val written = tokenizer.addedTokens.map { it.content }.filter { it.isNotEmpty() && it in template }
    private val everyone = Breaker((special + written).toSet())
    private val assistant = Breaker(special.toSet())

    /** Token ids of a conversation as [render] writes it. Raises [IllegalArgumentException] on an odd role. */
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

/** Breaks the [contents] of tokens wherever they stand, or begin or end, in a text. */
private class Breaker(val contents: Set<String>) {
    private val byStart = contents.groupBy { it[0] }
    private val heads = contents.flatMapTo(HashSet()) { one -> (1 until one.length).map { one.substring(0, it) } }
    private val tails = contents.flatMapTo(HashSet()) { one -> (1 until one.length).map { one.substring(it) } }
    private val longest = contents.maxOfOrNull { it.length } ?: 0

    fun marked(text: String, mark: Char): String {
        val places = sortedSetOf<Int>()
        for (at in text.indices) if (byStart[text[at]].orEmpty().any { text.startsWith(it, at) }) places += at + 1
        for (length in 1 until minOf(longest, text.length + 1)) {
            if (text.takeLast(length) in heads) places += text.length - length + 1
            if (text.take(length) in tails) places += length - 1
        }
        val marked = StringBuilder(text)
        for (place in places.reversed()) marked.insert(place, mark)
        return marked.toString()
    }
}
