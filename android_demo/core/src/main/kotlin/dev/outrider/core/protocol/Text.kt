/** Tokens in, text out while they arrive: no half characters, nothing of a stop string or behind it. */
package dev.outrider.core.protocol

/** Decoders write this for bytes that are not, or not yet, a character. */
internal const val REPLACEMENT = '\uFFFD'

/** A UTF-8 character has at most four bytes, so more tokens than this never wait for one character. */
private const val CHARACTER_TOKENS = 4

/** Tokens that end in what may be a half character, above which the window is cut. */
private const val WINDOW_TOKENS = 64

/**
 * Decodes one answer token by token.
 *
 * decode is the tokenizer's, without special tokens. Decoding one token alone loses bytes and spaces, so a window is
 * decoded: the tokens of the last piece, whose text is known, then those still unsent.
 */
internal class Detokeniser(private val decode: (List<Int>) -> String) {
    private var context = emptyList<Int>()
    private var pending = emptyList<Int>()

    /** Characters of the window's text that were returned. */
    private var sent = 0

    /** A copy that goes on from here on its own. */
    fun fork(): Detokeniser {
        val copy = Detokeniser(decode)
        copy.context = context
        copy.pending = pending
        copy.sent = sent
        return copy
    }

    /** The text that [token] completes, "" where it ends inside a character. */
    fun push(token: Int): String {
        pending = pending + token
        val text = decode(context + pending)
        val complete = !text.endsWith(REPLACEMENT)
        if (!complete && pending.size <= CHARACTER_TOKENS) return ""
        val piece = (if (complete) text else text.dropLast(1)).drop(sent)
        if (complete && piece.isNotEmpty()) {
            context = pending
            pending = emptyList()
            sent = decode(context).length
        } else {
            sent += piece.length
            if (pending.size > WINDOW_TOKENS) cut(text)
        }
        return piece
    }

    /** The rest at the end of the answer. Bytes that never became a character are dropped. */
    fun flush(): String = decode(context + pending).trimEnd(REPLACEMENT).drop(sent)

    /** Keep the last token alone where a character begins with it, so that the window stays short. */
    private fun cut(text: String) {
        val last = decode(pending.takeLast(1))
        if (last.endsWith(REPLACEMENT) && decode(context + pending.dropLast(1)) + last == text) {
            context = emptyList()
            pending = pending.takeLast(1)
            sent = last.length - 1
        }
    }
}

/** Cuts text at the stop string that is complete first, wherever the borders of the pieces lie. */
internal class StopStrings(private val stops: List<String> = emptyList()) {
    /** A stop string was found: no more text comes. */
    var hit = false
        private set

    private var held = ""

    /** A copy that goes on from here on its own. */
    fun fork(): StopStrings {
        val copy = StopStrings(stops)
        copy.hit = hit
        copy.held = held
        return copy
    }

    /** Text that cannot belong to a stop string any more; "" once one was hit. */
    fun push(piece: String): String {
        if (hit) return ""
        val text = held + piece
        val found = stops.map { text.indexOf(it) to it.length }.filter { it.first >= 0 }
        if (found.isNotEmpty()) {
            hit = true
            held = ""
            return text.take(found.minWith(compareBy({ it.first + it.second }, { it.first })).first)
        }
        val sure = text.length - (stops.maxOfOrNull { overlap(text, it) } ?: 0)
        held = text.drop(sure)
        return text.take(sure)
    }

    /** The text held back, once no more can come. */
    fun flush(): String = held.also { held = "" }
}

/** Length of the longest end of [text] that [stop] begins with, less than the whole of it. */
private fun overlap(text: String, stop: String): Int =
    (minOf(text.length, stop.length - 1) downTo 1).firstOrNull { text.endsWith(stop.take(it)) } ?: 0
