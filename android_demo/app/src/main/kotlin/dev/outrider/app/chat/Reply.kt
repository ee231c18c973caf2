package dev.outrider.app.chat

import dev.outrider.core.events.Adopted
import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.HandedOver
import dev.outrider.core.events.LinkChange
import dev.outrider.core.events.LinkState
import dev.outrider.core.events.Provisional
import dev.outrider.core.events.RolledBack
import dev.outrider.core.events.Verified
import dev.outrider.core.session.Writer

/** The status of a piece of text; each has its own colour and shape on the screen. */
enum class Kind {
    /** The target's own. */
    VERIFIED,

    /** Written offline, not verified yet. */
    PROVISIONAL,

    /** Written offline; it stays unverified, as the user chose. */
    KEPT,

    /** Rolled back: the target wrote something else. */
    WITHDRAWN,
}

data class Piece(val kind: Kind, val text: String)

/** [text] stood at offset [at] until the target wrote something else there. */
data class Withdrawn(val at: Int, val text: String)

/**
 * An answer in progress, built from its events. Immutable: [after] returns the next state.
 *
 * kept: ranges of [verified] that are unverified. why: why the target, or the understudy, does not write, in words.
 * writer: who writes offline. tokens: verified ones. before: the text shown before a rollback whose correction has not
 * arrived yet.
 */
data class Reply(
    val verified: String = "",
    val provisional: String = "",
    val kept: List<IntRange> = emptyList(),
    val withdrawn: Withdrawn? = null,
    val tokens: Int = 0,
    val rolledBack: Int = 0,
    val link: LinkState? = null,
    val why: String = "",
    val writer: Writer = Writer.DRAFTER,
    val end: Finished? = null,
    private val before: String? = null,
) {
    private val shown get() = verified + provisional

    fun after(event: Event): Reply {
        val next = copy(
            verified = verified + event.added, provisional = provisional.dropLast(event.dropped) + event.appended,
        )
        return when (event) {
            is Verified -> next.copy(tokens = tokens + event.tokens.size).corrected(before).copy(before = null)
            is Provisional -> next.copy(before = null, writer = event.writer)
            is HandedOver -> next.copy(writer = event.writer, why = event.detail.ifEmpty { why })
            is RolledBack -> (before ?: shown).let { next.corrected(it).copy(before = it) }
                .copy(rolledBack = rolledBack + event.count)
            is Adopted -> next.copy(kept = kept + listOf(verified.length until next.verified.length))
            is LinkChange -> next.copy(
                link = event.state, why = event.detail,
                writer = if (event.state == LinkState.VERIFIED) Writer.DRAFTER else writer,
            )
            is Finished -> next.copy(withdrawn = null, before = null, end = event)
        }
    }

    /** The text from left to right; no piece is empty. */
    fun pieces(): List<Piece> {
        val pieces = mutableListOf<Piece>()
        fun put(from: Int, to: Int) {
            var at = from
            for (range in kept) {
                pieces.add(Kind.VERIFIED, verified, at, minOf(range.first, to))
                at = maxOf(at, minOf(range.first, to))
                pieces.add(Kind.KEPT, verified, at, minOf(range.last + 1, to))
                at = maxOf(at, minOf(range.last + 1, to))
            }
            pieces.add(Kind.VERIFIED, verified, at, minOf(verified.length, to))
            at = maxOf(at, verified.length)
            pieces.add(Kind.PROVISIONAL, shown, at, to)
        }
        val at = withdrawn?.at?.coerceAtMost(shown.length) ?: shown.length
        put(0, at)
        withdrawn?.let { pieces += Piece(Kind.WITHDRAWN, it.text) }
        put(at, shown.length)
        return pieces
    }

    /** Return the reply with the missing part of [old] marked as withdrawn. */
    private fun corrected(old: String?): Reply {
        if (old == null) return this
        val same = old.commonPrefixWith(shown).length
        return copy(withdrawn = if (same < old.length) Withdrawn(same, old.substring(same)) else null)
    }
}

private fun MutableList<Piece>.add(kind: Kind, text: String, from: Int, to: Int) {
    if (from < to) add(Piece(kind, text.substring(from, to)))
}
