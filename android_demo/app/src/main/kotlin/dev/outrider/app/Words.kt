package dev.outrider.app

import android.content.Context
import android.graphics.Typeface
import android.text.SpannableString
import android.text.Spanned
import android.text.style.ForegroundColorSpan
import android.text.style.StrikethroughSpan
import android.text.style.StyleSpan
import android.text.style.UnderlineSpan
import dev.outrider.app.chat.Badge
import dev.outrider.app.chat.ChatState
import dev.outrider.app.chat.Figures
import dev.outrider.app.chat.Kind
import dev.outrider.app.chat.NoRoom
import dev.outrider.app.chat.Numbers
import dev.outrider.app.chat.Piece
import dev.outrider.app.chat.Room
import dev.outrider.app.chat.Shape
import dev.outrider.app.chat.Turn
import dev.outrider.app.chat.USER
import dev.outrider.app.chat.marked
import dev.outrider.app.chat.shape
import dev.outrider.app.chat.spoken
import java.io.IOException

/** Turns plain values into the app's words, colours and shapes. */
class Words(private val context: Context) {
    private val numbers get() = Numbers(context.resources.configuration.locale)

    /** Describe an error in one line that says what to do, like the library's own errors. */
    fun problem(error: Exception): String = when (error) {
        is NoRoom -> when (val room = error.room) {
            is Room.NoDisk -> context.getString(R.string.no_disk, bytes(room.missing))
            is Room.NoMemory -> context.getString(R.string.no_memory, bytes(room.missing))
            Room.Enough -> ""
        }
        is IOException, is SecurityException -> context.getString(R.string.unreadable, error.message.orEmpty())
        else -> error.message ?: error.javaClass.simpleName
    }

    /** The state of the link, with the reason if it is down. */
    fun badge(state: ChatState): String {
        val why = state.reply?.why.orEmpty()
        return if (why.isEmpty()) status(state) else context.getString(R.string.badge_why, status(state), why)
    }

    private fun status(state: ChatState): String = context.getString(
        when (state.badge) {
            Badge.LOADING -> R.string.badge_loading
            Badge.READY -> R.string.badge_ready
            Badge.CONNECTING -> R.string.badge_connecting
            Badge.VERIFIED -> R.string.badge_verified
            Badge.CATCHING_UP -> R.string.badge_catching_up
            Badge.ALONE -> if (state.online) R.string.badge_alone else R.string.badge_alone_offline
            Badge.UNDERSTUDY -> if (state.online) R.string.badge_understudy else R.string.badge_understudy_offline
            Badge.WAITING -> R.string.badge_waiting
            Badge.DEVICE_ONLY -> R.string.badge_device_only
            Badge.PROBLEM -> R.string.badge_problem
        },
    )

    fun figures(figures: Figures): String = context.getString(
        R.string.figures, numbers.rate(figures.tokensPerSecond), bytes(figures.bytesUp), bytes(figures.bytesDown),
        figures.roundTrip?.let { context.getString(R.string.milliseconds, numbers.millis(it)) }
            ?: context.getString(R.string.unknown),
        numbers.count(figures.rolledBack),
    )

    /** Return the text with every kind in its colour and shape. */
    fun drawn(pieces: List<Piece>): CharSequence {
        val marked = marked(pieces)
        val text = SpannableString(marked.text)
        for (mark in marked.marks) {
            for (span in spans(mark.kind)) text.setSpan(span, mark.start, mark.end, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE)
        }
        return text
    }

    /** Return a line for each kind, in its colour and shape. */
    fun legend(): CharSequence = drawn(
        Kind.entries.flatMapIndexed { index, kind ->
            listOfNotNull(Piece(Kind.VERIFIED, "\n").takeIf { index > 0 }, Piece(kind, name(kind)))
        },
    )

    fun spoken(turn: Turn): String = context.getString(
        if (turn.role == USER) R.string.spoken_user else R.string.spoken_assistant,
        spoken(turn.pieces) { kind, text -> context.getString(R.string.spoken_piece, name(kind), text) },
    )

    private fun name(kind: Kind) = context.getString(
        when (kind) {
            Kind.VERIFIED -> R.string.kind_verified
            Kind.PROVISIONAL -> R.string.kind_provisional
            Kind.KEPT -> R.string.kind_kept
            Kind.WITHDRAWN -> R.string.kind_withdrawn
        },
    )

    private fun spans(kind: Kind): List<Any> = listOfNotNull(
        when (kind) {
            Kind.VERIFIED -> null
            Kind.PROVISIONAL -> R.color.provisional
            Kind.KEPT -> R.color.kept
            Kind.WITHDRAWN -> R.color.withdrawn
        }?.let { ForegroundColorSpan(context.getColor(it)) },
        when (kind.shape) {
            Shape.PLAIN -> null
            Shape.UNDERLINED -> UnderlineSpan()
            Shape.BRACKETED -> StyleSpan(Typeface.ITALIC)
            Shape.STRUCK -> StrikethroughSpan()
        },
    )

    private fun bytes(count: Long): String {
        val (number, power) = numbers.bytes(count)
        val units = listOf(R.string.unit_b, R.string.unit_kb, R.string.unit_mb, R.string.unit_gb)
        return context.getString(units[power], number)
    }
}
