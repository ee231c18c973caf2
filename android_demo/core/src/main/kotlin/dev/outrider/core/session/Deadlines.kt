/** All that a session waits for, in one list: what, and until when. */
package dev.outrider.core.session

/** What is waited for, the most important first. [Session.tick] says what happens when its time has passed. */
enum class Deadline {
    /** The first link of an answer. */
    CONNECT,

    /** The target's return, where nothing more can be written. */
    GIVE_UP,

    /** The moment that the verifier named when it refused a request. */
    RETRY,

    /** The reply to a request. */
    REPLY,

    /** Any message at all, before another connection is made. */
    RENEW,
}

/** Moments on the session's clock; null: not waited for. [silence]: seconds past a reply's deadline until RENEW. */
internal class Deadlines(private val silence: Double) {
    var connect: Double? = null
    var giveUp: Double? = null
    var retry: Double? = null

    /** When the link last said something. */
    var heard = 0.0

    /** What is waited for beside [flight]. alone: its reply is overdue already. */
    fun pending(flight: Flight?, alone: Boolean): List<Pair<Deadline, Double>> = buildList {
        connect?.let { add(Deadline.CONNECT to it) }
        giveUp?.let { add(Deadline.GIVE_UP to it) }
        retry?.let { add(Deadline.RETRY to it) }
        if (flight == null) return@buildList
        if (!alone) add(Deadline.REPLY to flight.due)
        add(Deadline.RENEW to maxOf(heard, flight.due) + silence)
    }
}
