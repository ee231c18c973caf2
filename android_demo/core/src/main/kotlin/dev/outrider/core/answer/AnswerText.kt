package dev.outrider.core.answer

import dev.outrider.core.protocol.Detokeniser
import dev.outrider.core.protocol.StopStrings

/** The change of an event: text added to the verified text, and the new end of the provisional text. */
internal class Change(val added: String, val dropped: Int, val appended: String)

/** The answer as text, updated token by token; provisional text is decoded after the verified text. */
internal class AnswerText(decode: (List<Int>) -> String, stops: List<String>) {
    private val decoder = Detokeniser(decode)
    private val stops = StopStrings(stops)
    private var decoderAhead = decoder.fork()
    private var stopsAhead = this.stops.fork()
    private val verified = StringBuilder()
    private val provisional = StringBuilder()
    private var told = 0 // characters of the verified text that [change] has returned
    private val toldBehind = StringBuilder() // the provisional text that it has returned
    private var rebased = false // since the last [change]

    /** No text is provisional. */
    val settled: Boolean get() = provisional.isEmpty()

    /** The changes since the last call. */
    fun change(): Change {
        val added = verified.substring(told)
        told = verified.length
        var same = toldBehind.length
        if (rebased) same = toldBehind.commonPrefixWith(provisional).length
        val change = Change(added, toldBehind.length - same, provisional.substring(same))
        toldBehind.setLength(same)
        toldBehind.append(change.appended)
        rebased = false
        return change
    }

    /** The verified and the provisional text. */
    override fun toString(): String = "$verified$provisional"

    /** Add verified tokens; return how many there were up to the end of a stop string, if one came. */
    fun commit(tokens: List<Int>): Int? {
        for ((index, token) in tokens.withIndex()) {
            verified.append(stops.push(decoder.push(token)))
            if (stops.hit) return index + 1
        }
        return null
    }

    /** Add a provisional token; return false if a stop string ended the text. */
    fun provide(token: Int): Boolean {
        provisional.append(stopsAhead.push(decoderAhead.push(token)))
        return !stopsAhead.hit
    }

    /** Decode the provisional text again, after the verified text as it is now. */
    fun rebase(tokens: List<Int>) {
        decoderAhead = decoder.fork()
        stopsAhead = stops.fork()
        provisional.setLength(0)
        rebased = true
        tokens.forEach(::provide)
    }

    /** End the text: show what was held back as a possible beginning of a character or a stop string. */
    fun end() {
        if (provisional.isNotEmpty()) {
            provisional.append(stopsAhead.push(decoderAhead.flush())).append(stopsAhead.flush())
        } else {
            verified.append(stops.push(decoder.flush())).append(stops.flush())
        }
    }
}
