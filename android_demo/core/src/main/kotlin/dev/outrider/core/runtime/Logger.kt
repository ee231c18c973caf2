package dev.outrider.core.runtime

import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.HandedOver
import dev.outrider.core.link.Arrived
import dev.outrider.core.link.LinkDown
import dev.outrider.core.link.LinkEvent
import dev.outrider.core.link.LinkUp

/**
 * Takes what a developer wants to know of a runtime in the field: links, ends of answers, engines that failed.
 *
 * Called from any thread, in the order of events; must be quick. No message holds text of a conversation.
 *
 *     Options(logger = { message, error -> Log.w("outrider", message, error) })
 */
public fun interface Logger {
    /** Takes one line. [error]: what failed, where something did. */
    public fun log(message: String, error: Throwable?)
}

/** What a log says of a link's event; null: nothing. */
internal fun logged(event: LinkEvent): String? = when (event) {
    is LinkUp -> "link up: round trip ${(1000 * event.rtt).toInt()} ms, ${event.welcome.arithmetic}"
    is LinkDown -> "link down: ${event.reason}"
    is Arrived -> null
}

/** What a log says of an answer's event; null: nothing. */
internal fun logged(event: Event): String? = when (event) {
    is HandedOver -> "offline: the ${event.writer.name.lowercase()} writes${because(event.detail)}"
    is Finished -> with(event.stats) {
        "answer ended: ${event.reason.name.lowercase()}, $tokens tokens in ${(1000 * seconds).toInt()} ms, " +
            "${counts.provisional} offline, ${counts.stalls} stalls${because(event.detail)}"
    }
    else -> null
}

private fun because(detail: String) = if (detail.isEmpty()) "" else "; $detail"
