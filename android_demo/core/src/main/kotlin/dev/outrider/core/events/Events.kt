/** Events that an answer yields while it grows, and the statistics it ends with. */
package dev.outrider.core.events

import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.session.SessionStats
import dev.outrider.core.session.Span
import dev.outrider.core.session.Writer

/** After it a user sees [verified] text, the target's, and behind it [provisional] text, written without it. */
sealed class Event {
    abstract val verified: String
    abstract val provisional: String
}

/** [tokens] joined the verified text; [confirmed] of them stood there as provisional before. */
class Verified(
    override val verified: String, override val provisional: String, val tokens: List<Int>, val confirmed: Int,
) : Event()

/** [writer], the drafter or the understudy, wrote [token] alone; a later event verifies it or takes it back. */
class Provisional(
    override val verified: String, override val provisional: String, val token: Int, val writer: Writer,
) : Event()

/** The last [count] provisional tokens were withdrawn: the target, or the understudy, writes something else. */
class RolledBack(override val verified: String, override val provisional: String, val count: Int) : Event()

/** [tokens], written on the device alone, stay: they stand in `verified` now, but nobody verified them. */
class Adopted(override val verified: String, override val provisional: String, val tokens: List<Int>) : Event()

/** From here on [writer] writes alone. [detail]: why the understudy does not, where it failed; else "". */
class HandedOver(
    override val verified: String, override val provisional: String, val writer: Writer, val detail: String,
) : Event()

/** [detail]: in words. */
class LinkChange(
    override val verified: String, override val provisional: String, val state: LinkState, val detail: String,
) : Event()

/**
 * The answer's end, and always its last event. [detail]: why, where the verifier or an engine did not write all of it;
 * else "". [spans]: who wrote which tokens.
 */
class Finished(
    override val verified: String,
    override val provisional: String,
    val reason: FinishReason,
    val tokenIds: List<Int>,
    val stats: AnswerStats,
    val detail: String = "",
    val spans: List<Span> = emptyList(),
) : Event()

/** What the target does. */
enum class LinkState {
    CONNECTING,

    /** It answers. */
    VERIFIED,

    /** The device writes on without it. */
    ALONE,

    /** It is silent and nothing is written. */
    WAITING,
}

/** Statistics of one answer. Seconds and bytes as measured; bytes count WebSocket frames of this answer. */
class AnswerStats internal constructor(
    /** What the session counted: rounds, stalls, tokens written alone. */
    val counts: SessionStats,
    /** Verified. */
    val tokens: Int,
    /** Accepted and bonus tokens per tree round. */
    val tau: Double,
    val seconds: Double,
    val tokensPerSecond: Double,
    val firstTokenSeconds: Double,
    val bytesUp: Long,
    val bytesDown: Long,
    /** Between asking for a tree or a token and having it. */
    val draftSeconds: Double,
    /** Nodes expanded while a verdict was awaited. */
    val aheadNodes: Int,
    /** Per stall: seconds from the moment the verdict was due to the first provisional token. */
    val stallSeconds: List<Double>,
)
