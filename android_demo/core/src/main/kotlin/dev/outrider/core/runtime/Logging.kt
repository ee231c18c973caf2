package dev.outrider.core.runtime

import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.HandedOver
import dev.outrider.core.link.Arrived
import dev.outrider.core.link.LinkDown
import dev.outrider.core.link.LinkEvent
import dev.outrider.core.link.LinkUp

/** Return the log message of a link's event; null: none. */
internal fun logged(event: LinkEvent): String? = when (event) {
    is LinkUp -> "link up: round trip ${(1000 * event.rtt).toInt()} ms, ${event.welcome.arithmetic}"
    is LinkDown -> "link down: ${event.reason}"
    is Arrived -> null
}

/** Return the log message of an answer's event; null: none. */
internal fun logged(event: Event): String? = when (event) {
    is HandedOver -> "offline: the ${event.writer.name.lowercase()} writes${because(event.detail)}"
    is Finished -> with(event.stats) {
        "answer ended: ${event.reason.name.lowercase()}, $tokens tokens in ${(1000 * seconds).toInt()} ms, " +
            "${counts.provisional} offline, ${counts.stalls} stalls${because(event.detail)}"
    }
    else -> null
}

private fun because(detail: String) = if (detail.isEmpty()) "" else "; $detail"
