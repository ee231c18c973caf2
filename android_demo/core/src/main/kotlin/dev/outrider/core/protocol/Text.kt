/** Turns tokens into text as they arrive, without half characters, and cuts at stop strings. */
package dev.outrider.core.protocol

/** Decoders write this for bytes that are not, or not yet, a character. */
internal const val REPLACEMENT = '\uFFFD'

/** A UTF-8 character has at most four bytes, so more tokens than this never wait for one character. */
private const val CHARACTER_TOKENS = 4

/** The window is cut once more tokens than this end in a possible half character. */
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

    /** Return an independent copy of the present state. */
    fun fork(): Detokeniser {
        val copy = Detokeniser(decode)
        copy.context = context
        copy.pending = pending
        copy.sent = sent
        return copy
    }

    /** Return the text that [token] completes, "" if it ends inside a character. */
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

    /** Return the rest at the end of the answer. Bytes that never became a character are dropped. */
    fun flush(): String = decode(context + pending).trimEnd(REPLACEMENT).drop(sent)

    /** Keep the last token alone if a character begins with it, so that the window stays short. */
    private fun cut(text: String) {
        val last = decode(pending.takeLast(1))
        if (last.endsWith(REPLACEMENT) && decode(context + pending.dropLast(1)) + last == text) {
            context = emptyList()
            pending = pending.takeLast(1)
            sent = last.length - 1
        }
    }
}

/** Cuts text at the stop string that is complete first, wherever it is split into pieces. */
internal class StopStrings(private val stops: List<String> = emptyList()) {
    /** A stop string was found: no more text comes. */
    var hit = false
        private set

    private var held = ""

    /** Return an independent copy of the present state. */
    fun fork(): StopStrings {
        val copy = StopStrings(stops)
        copy.hit = hit
        copy.held = held
        return copy
    }

    /** Return text that can no longer belong to a stop string; "" once one was found. */
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

    /** Return the text held back, once no more can come. */
    fun flush(): String = held.also { held = "" }
}

/** Return the length of the longest end of [text] that begins [stop], less than all of [stop]. */
private fun overlap(text: String, stop: String): Int =
    (minOf(text.length, stop.length - 1) downTo 1).firstOrNull { text.endsWith(stop.take(it)) } ?: 0
