/** Time limits of the device. Seconds on any monotonic clock. */
package dev.outrider.core.session

import kotlin.math.abs

/**
 * Time until a reply is overdue: smoothed round time plus four deviations (as TCP does, RFC 6298), within [floor] and
 * [ceiling]. first: before any measurement.
 */
internal class RoundTimer(val floor: Double = 0.25, val ceiling: Double = 3.0, val first: Double = 2.0) {
    private var smoothed: Double? = null
    private var deviation = 0.0

    fun add(seconds: Double) {
        val before = smoothed
        if (before == null) {
            smoothed = seconds
            deviation = seconds / 2
            return
        }
        deviation += 0.25 * (abs(seconds - before) - deviation)
        smoothed = before + 0.125 * (seconds - before)
    }

    fun timeout(): Double {
        val usual = smoothed ?: return first
        return minOf(ceiling, maxOf(floor, usual + 4 * deviation))
    }
}

/**
 * Limits in seconds. open: extra time for a verdict right after OPEN, when the server may have to prefill the whole
 * conversation; connect: wait of a new answer for a first link; silence: time past the deadline before a silent link is
 * replaced; offline: wait of an answer for the target once offline writing has stopped.
 */
public data class Patience(
    val open: Double = 3.0,
    val connect: Double = 1.0,
    val silence: Double = 1.0,
    val offline: Double = 300.0,
)
