package dev.outrider.core.answer

import dev.outrider.core.protocol.Detokeniser
import dev.outrider.core.protocol.StopStrings

/** The answer as text, kept up token by token; provisional text is decoded behind the verified one. */
internal class AnswerText(decode: (List<Int>) -> String, stops: List<String>) {
    private val decoder = Detokeniser(decode)
    private val stops = StopStrings(stops)
    private var decoderAhead = decoder.fork()
    private var stopsAhead = this.stops.fork()
    var verified = ""
        private set
    var provisional = ""
        private set

    /** Add verified tokens; returns how many of them there were up to the end of a stop string, if one came. */
    fun commit(tokens: List<Int>): Int? {
        for ((index, token) in tokens.withIndex()) {
            verified += stops.push(decoder.push(token))
            if (stops.hit) return index + 1
        }
        return null
    }

    /** Add a provisional token; false where a stop string ended the text. */
    fun provide(token: Int): Boolean {
        provisional += stopsAhead.push(decoderAhead.push(token))
        return !stopsAhead.hit
    }

    /** The provisional text stands behind the verified one as it is now. */
    fun rebase(tokens: List<Int>) {
        decoderAhead = decoder.fork()
        stopsAhead = stops.fork()
        provisional = ""
        tokens.forEach(::provide)
    }

    /** No more comes: what was held back as the beginning of a character or a stop string is shown. */
    fun end() {
        if (provisional.isNotEmpty()) {
            provisional += stopsAhead.push(decoderAhead.flush()) + stopsAhead.flush()
        } else {
            verified += stops.push(decoder.flush()) + stops.flush()
        }
    }
}
