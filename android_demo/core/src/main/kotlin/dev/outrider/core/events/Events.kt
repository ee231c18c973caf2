/** Events that an answer yields while it grows, and the statistics it ends with. */
package dev.outrider.core.events

import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.session.SessionStats
import dev.outrider.core.session.Span
import dev.outrider.core.session.Writer

/**
 * One change of the text that a user sees: the target's verified text, and after it provisional text, written offline.
 * [added] is appended to the verified text, the last [dropped] characters of the provisional text are removed, and
 * [appended] replaces them. Use every event; [Shown] puts them together.
 */
public sealed interface Event {
    /** Appended to the verified text, which is never rolled back. */
    public val added: String

    /** Characters removed from the end of the provisional text. */
    public val dropped: Int

    /** Then appended to the provisional text. */
    public val appended: String
}

/** The text that a user sees, composed of all events of an answer. Not thread-safe. */
public class Shown {
    private val verifiedText = StringBuilder()
    private val provisionalText = StringBuilder()

    /** The target's own text, and adopted text. */
    public val verified: String get() = verifiedText.toString()

    /** Text written offline, which may be rolled back. */
    public val provisional: String get() = provisionalText.toString()

    /** Apply the next event; return this. */
    public fun add(event: Event): Shown {
        verifiedText.append(event.added)
        provisionalText.setLength(provisionalText.length - event.dropped)
        provisionalText.append(event.appended)
        return this
    }
}

/** [tokens] joined the verified text; [confirmed] of them had been shown as provisional. */
public data class Verified(
    override val added: String, override val dropped: Int, override val appended: String, val tokens: List<Int>,
    val confirmed: Int,
) : Event

/** [writer], the drafter or the understudy, wrote [token] offline; a later event verifies it or rolls it back. */
public data class Provisional(
    override val added: String, override val dropped: Int, override val appended: String, val token: Int,
    val writer: Writer,
) : Event

/** The last [count] provisional tokens were rolled back: the target, or the understudy, writes something else. */
public data class RolledBack(
    override val added: String, override val dropped: Int, override val appended: String, val count: Int,
) : Event

/** [tokens], written on the device alone, stay: they are in the verified text now, although unverified. */
public data class Adopted(
    override val added: String, override val dropped: Int, override val appended: String, val tokens: List<Int>,
) : Event

/** From here on [writer] writes offline. [detail]: why the understudy failed, if it did; else "". */
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
 * The end of the answer, always its last event. [detail]: why the verifier or an engine did not write all of it, if so;
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
    /** It has not answered yet. */
    CONNECTING,

    /** It answers. */
    VERIFIED,

    /** The device writes on. */
    ALONE,

    /** It is silent and nothing is written. */
    WAITING,
}

/** Statistics of one answer. Seconds and bytes as measured; bytes count WebSocket frames of this answer. */
public class AnswerStats internal constructor(
    /** The session's counts: rounds, stalls, offline tokens. */
    public val counts: SessionStats,
    /** Verified tokens. */
    public val tokens: Int,
    /** Accepted and bonus tokens per tree round. */
    public val tau: Double,
    public val seconds: Double,
    public val tokensPerSecond: Double,
    public val firstTokenSeconds: Double,
    public val bytesUp: Long,
    public val bytesDown: Long,
    /** From requests for trees or tokens to their arrival. */
    public val draftSeconds: Double,
    /** Nodes expanded while a verdict was awaited. */
    public val aheadNodes: Int,
    /** Per stall: seconds from the moment the verdict was due to the first provisional token. */
    public val stallSeconds: List<Double>,
)
