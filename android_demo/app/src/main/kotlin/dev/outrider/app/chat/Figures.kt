package dev.outrider.app.chat

import java.text.NumberFormat
import java.util.Locale

/** Figures of one answer. tokens: verified; bytes: WebSocket frames; roundTrip: seconds, null: never connected. */
data class Figures(
    val tokens: Int,
    val seconds: Double,
    val bytesUp: Long,
    val bytesDown: Long,
    val roundTrip: Double?,
    val rolledBack: Int,
) {
    val tokensPerSecond: Double get() = if (seconds > 0) tokens / seconds else 0.0
}

/** Formats numbers in the digits and marks of a locale. The caller adds the units' names. */
class Numbers(private val locale: Locale) {
    fun rate(value: Double): String = format(value, if (value < 10) 1 else 0)

    fun millis(seconds: Double): String = format(1000 * seconds, 0)

    /** Return the number, and the power of 1,000 of its unit: 0 for B, 1 for kB, 2 for MB, 3 for GB. */
    fun bytes(count: Long): Pair<String, Int> {
        var value = count.toDouble()
        var power = 0
        while (value >= 999.5 && power < 3) {
            value /= 1000
            power++
        }
        return format(value, if (power > 0 && value < 9.95) 1 else 0) to power
    }

    fun count(value: Int): String = format(value.toDouble(), 0)

    private fun format(value: Double, digits: Int): String = NumberFormat.getNumberInstance(locale).run {
        minimumFractionDigits = digits
        maximumFractionDigits = digits
        format(value)
    }
}
