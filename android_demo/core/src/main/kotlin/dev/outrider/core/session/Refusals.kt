/** What a verifier's refusals do to an answer: it waits, asks anew, or goes on alone. No text is lost by them. */
package dev.outrider.core.session

import dev.outrider.core.protocol.ERR_BOUNDS
import dev.outrider.core.protocol.ERR_BUSY
import dev.outrider.core.protocol.ERR_GOING_AWAY
import dev.outrider.core.protocol.ERR_MALFORMED
import dev.outrider.core.protocol.ERR_TOO_LONG
import dev.outrider.core.protocol.ERR_UNKNOWN
import dev.outrider.core.protocol.Error

/** Seconds that an answer waits at its end for a verifier that accepts it, where the last one dialled did not. */
internal const val REFUSED_SECONDS = 10.0

/** Seconds until OPEN is sent again where the verifier names no time, and at least. */
private const val RETRY_SECONDS = 1.0
private const val SHORTEST_RETRY = 0.05

/** The verifier refused what it was asked last, or says that it ends. */
internal fun Session.refusal(error: Error, now: Double): List<Action> {
    // what is under way is still answered; then the link goes down and comes up elsewhere
    if (error.code == ERR_GOING_AWAY && error.stream == -1) return emptyList()
    if (error.code == ERR_UNKNOWN) return askAnew(now)
    if (error.code == ERR_TOO_LONG) return finish(noRoom())
    complaint = error.text
    requests.flight = null
    deadlines.retry = null
    if (error.code == ERR_MALFORMED || error.code == ERR_BOUNDS) { // so it would be refused again
        refused = true
        expectReturn(0.0, now)
    } else {
        val advised = error.code == ERR_BUSY || error.code == ERR_GOING_AWAY
        deadlines.retry = now + if (advised) maxOf(SHORTEST_RETRY, error.retryAfterMs / 1000.0) else RETRY_SECONDS
    }
    return goOnAlone(now, now)
}

/** The verifier knows another text, or none: OPEN. Not at once where that has just been of no help. */
internal fun Session.askAnew(now: Double): List<Action> {
    val asked = flight ?: return emptyList() // what it says so of was given up: the OPEN before it was refused
    if (!asked.afterOpen) return open(now)
    requests.flight = null
    deadlines.retry = now + RETRY_SECONDS
    return goOnAlone(now, now)
}

/** This link's verifier does not know the answer's constraint, and would pass over it: it is not asked. */
internal fun Session.disobeyed(now: Double): List<Action> {
    refused = true
    requests.flight = null
    deadlines.connect = null
    deadlines.retry = null
    complaint = "this verifier cannot obey the answer's constraint; update it, or ask without one"
    expectReturn(0.0, now)
    return goOnAlone(now, now)
}

/** Where nothing more can be written, wait no longer than [seconds] for the target. */
internal fun Session.expectReturn(seconds: Double, now: Double) {
    returnWait = seconds
    if (solo.paused == null) deadlines.giveUp = deadlines.giveUp?.let { minOf(it, now + seconds) }
}

/** The verifier's context is full: what was written alone stays as it is. */
internal fun Session.noRoom(): FinishReason {
    complaint = "the verifier's context holds $context tokens; this conversation needs more"
    return if (provisional.isEmpty()) FinishReason.LENGTH else FinishReason.UNVERIFIED
}
