/** Events that an answer yields while it grows, and the statistics it ends with. */
package dev.outrider.core.events

import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.session.SessionStats
import dev.outrider.core.session.Span
import dev.outrider.core.session.Writer

/**
 * One change of the text that a user sees: verified text, the target's, and behind it provisional text, written without
 * it. [added] joins the end of the verified text, the last [dropped] characters of the provisional text go, and
 * [appended] takes their place. No event may be left out; [Shown] puts them together.
 */
public sealed interface Event {
    /** Joins the end of the verified text, which is never taken back. */
    public val added: String

    /** Characters that leave the end of the provisional text. */
    public val dropped: Int

    /** Joins the end of the provisional text then. */
    public val appended: String
}

/** The text that a user sees, put together from all events of an answer. Not thread-safe. */
public class Shown {
    private val verifiedText = StringBuilder()
    private val provisionalText = StringBuilder()

    /** The target's own text, and what was adopted. */
    public val verified: String get() = verifiedText.toString()

    /** Text written offline, which may be rolled back. */
    public val provisional: String get() = provisionalText.toString()

    /** Take up the next event; returns this. */
    public fun add(event: Event): Shown {
        verifiedText.append(event.added)
        provisionalText.setLength(provisionalText.length - event.dropped)
        provisionalText.append(event.appended)
        return this
    }
}

/** [tokens] joined the verified text; [confirmed] of them stood there as provisional before. */
public data class Verified(
    override val added: String, override val dropped: Int, override val appended: String, val tokens: List<Int>,
    val confirmed: Int,
) : Event

/** [writer], the drafter or the understudy, wrote [token] alone; a later event verifies it or takes it back. */
public data class Provisional(
    override val added: String, override val dropped: Int, override val appended: String, val token: Int,
    val writer: Writer,
) : Event

/** The last [count] provisional tokens were withdrawn: the target, or the understudy, writes something else. */
public data class RolledBack(
    override val added: String, override val dropped: Int, override val appended: String, val count: Int,
) : Event

/** [tokens], written on the device alone, stay: they are verified text from here on, but nobody verified them. */
public data class Adopted(
    override val added: String, override val dropped: Int, override val appended: String, val tokens: List<Int>,
) : Event

/** From here on [writer] writes alone. [detail]: why the understudy does not, where it failed; else "". */
public data class HandedOver(
    override val added: String, override val dropped: Int, override val appended: String, val writer: Writer,
    val detail: String,
) : Event

/** The link changed to [state]. [detail]: why, in words that an app can show. */
public data class LinkChange(
    override val added: String, override val dropped: Int, override val appended: String, val state: LinkState,
    val detail: String,
) : Event

/**
 * The answer's end, and always its last event. [detail]: why, where the verifier or an engine did not write all of it;
 * else "". [spans]: who wrote which of [tokenIds].
 */
public data class Finished(
    override val added: String,
    override val dropped: Int,
    override val appended: String,
    val reason: FinishReason,
    val tokenIds: List<Int>,
    val stats: AnswerStats,
    val detail: String = "",
    val spans: List<Span> = emptyList(),
) : Event

/** The state of the target. */
public enum class LinkState {
    /** Nothing is known of it yet. */
    CONNECTING,

    /** It answers. */
    VERIFIED,

    /** The device writes on without it. */
    ALONE,

    /** It is silent and nothing is written. */
    WAITING,
}

/** Statistics of one answer. Seconds and bytes as measured; bytes count WebSocket frames of this answer. */
public class AnswerStats internal constructor(
    /** The session's counts: rounds, stalls, offline tokens. */
    public val counts: SessionStats,
    /** Verified. */
    public val tokens: Int,
    /** Accepted and bonus tokens per tree round. */
    public val tau: Double,
    public val seconds: Double,
    public val tokensPerSecond: Double,
    public val firstTokenSeconds: Double,
    public val bytesUp: Long,
    public val bytesDown: Long,
    /** Between asking for a tree or a token and having it. */
    public val draftSeconds: Double,
    /** Nodes expanded while a verdict was awaited. */
    public val aheadNodes: Int,
    /** Per stall: seconds from the moment the verdict was due to the first provisional token. */
    public val stallSeconds: List<Double>,
)
