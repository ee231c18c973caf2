/**
 * The messages between device and verifier. Fields are in the order of the wire.
 *
 * The device decodes a verifier's messages and encodes its own; `Wire.kt` does both, frames included.
 */
package dev.outrider.core.protocol

/** The message in one frame; [type] is its first value. */
internal sealed interface Message {
    val type: Int
}

/** A message of a device. */
internal sealed interface ClientMessage : Message

/** A message of a verifier. */
internal sealed interface ServerMessage : Message

/**
 * Comes first. targetHash, drafterHash: the bundle's; client: name of the client, for logs; arithmetic: of the answer's
 * beginning, "" for none; only a verifier with the same one may continue it.
 */
internal data class Hello(
    val protocol: Int,
    val targetHash: String,
    val drafterHash: String,
    val client: String = "",
    val arithmetic: String = "",
) : ClientMessage {
    override val type get() = 1
}

/**
 * The verifier's answer to [Hello].
 *
 * maxContext: committed and drafted tokens; maxNodes: of one tree; treeBudget: nodes that the server would like a tree
 * to have at most, now; costs: for [CostCurve.unpack], empty if unknown; constraints: those it supports, OBEYS_*;
 * arithmetic: such as "torch-float32", "" if unknown; streamTokens: that a step of its streams brought lately, in
 * hundredths, 0 if unknown; queueUs: time that a round lately waited for the engine, 0 if none or unknown.
 */
internal class Welcome(
    val protocol: Long,
    val targetHash: String,
    val drafterHash: String,
    val vocabSize: Int,
    val maxContext: Int,
    val maxNodes: Int,
    val treeBudget: Int,
    val server: String = "",
    val costs: ByteArray = EMPTY,
    val constraints: Int = 0,
    val arithmetic: String = "",
    val streamTokens: Int = 0,
    val queueUs: Int = 0,
) : ServerMessage {
    override val type get() = 2

    /** Whether it may continue an answer begun in [arithmetic]: yes if one of the two is unknown. */
    fun computesIn(arithmetic: String): Boolean =
        arithmetic.isEmpty() || this.arithmetic.isEmpty() || this.arithmetic == arithmetic
}

/** Say why a verifier that computes in [here] may not continue an answer begun in [begun], for people. */
internal fun otherArithmetic(begun: String, here: String): String =
    "the answer was begun in $begun arithmetic, and this verifier computes in $here; " +
        "another one at this address may continue it"

/** Whether [text] may name an arithmetic: printable ASCII, as people read it. */
internal fun isArithmetic(text: String): Boolean = text.length <= 64 && text.all { it in ' '..'~' }

/**
 * Begin or resume: the verifier needs nothing else to take a session over from another replica.
 *
 * session: 16 random bytes, chosen by the device; seq: the last VERIFY that is settled for the device; tokens: uint32
 * ids of prompt and committed text; rows 0..featuresHave-1 need not be sent; constraint: only if the verifier supports
 * it.
 */
internal class Open(
    val stream: Int,
    val session: ByteArray,
    val seq: Long,
    val tokens: ByteArray,
    val featuresHave: Int,
    val sampling: Sampling,
    val constraint: Constraint? = null,
) : ClientMessage {
    override val type get() = 3
}

/** cached: rows of key/value found alive (0 after a restart or an eviction). */
internal data class Opened(val stream: Int, val committed: Int, val cached: Int) : ServerMessage {
    override val type get() = 4
}

/** Rows ([unpackRows]) of the positions start and on that the device lacks; the newest are sent first. */
internal class Features(val stream: Int, val start: Int, val rows: ByteArray) : ServerMessage {
    override val type get() = 5
}

/** A tree below baseLen committed tokens: uint32 token ids, and a parent byte per node, 255 = root. */
internal class Verify(
    val stream: Int,
    val seq: Long,
    val baseLen: Int,
    val tokens: ByteArray,
    val parents: ByteArray,
) : ClientMessage {
    override val type get() = 6
}

/**
 * The reply to a [Verify], or one token of a [Generate].
 *
 * baseLen: committed tokens before it; accepted: node numbers of the accepted path; bonus: the target's own next token;
 * finish: [FINISH_NONE] or why the text ends; rows: of positions `baseLen-1 .. baseLen-1+accepted.size`; queueUs,
 * engineUs: microseconds that the round waited for the engine, and of the engine.
 */
internal class Verdict(
    val stream: Int,
    val seq: Long,
    val baseLen: Int,
    val accepted: ByteArray,
    val bonus: Int,
    val finish: Int,
    val rows: ByteArray,
    val treeBudget: Int = 0,
    val queueUs: Int = 0,
    val engineUs: Int = 0,
) : ServerMessage {
    override val type get() = 7

    /** Node numbers of the accepted path. */
    val path: List<Int> get() = accepted.map { it.toInt() and 0xFF }
}

internal const val FINISH_NONE = 0
internal const val FINISH_EOS = 1
internal const val FINISH_LENGTH = 2

/** The VERIFY was based on another length than the verifier's: OPEN again with the committed tokens. */
internal data class Resync(val stream: Int, val committed: Int) : ServerMessage {
    override val type get() = 8
}

/** Let the target decode: VERDICTs with empty paths, one per token. rows: each with that of position baseLen-1. */
internal data class Generate(
    val stream: Int,
    val seq: Long,
    val baseLen: Int,
    val maxNew: Int,
    val rows: Boolean = false,
) : ClientMessage {
    override val type get() = 9
}

/** Stop a [Generate], or drop a waiting [Verify]. The session stays. */
internal data class Cancel(val stream: Int) : ClientMessage {
    override val type get() = 10
}

/** The session is over; the verifier may forget it. (A lost socket is not a CLOSE.) */
internal data class Close(val stream: Int) : ClientMessage {
    override val type get() = 11
}

/** code: one of ERR_*; stream -1: the connection. */
internal data class Error(
    val code: Int,
    val text: String,
    val stream: Int = -1,
    val retryAfterMs: Int = 0,
) : ServerMessage {
    override val type get() = 12
}

/** Return whether it is for [stream], or for all. */
internal fun ServerMessage.concerns(stream: Int): Boolean = when (this) {
    is Opened -> this.stream == stream
    is Features -> this.stream == stream
    is Verdict -> this.stream == stream
    is Resync -> this.stream == stream
    is Error -> this.stream == stream || this.stream == -1
    is Welcome -> true
}

/** The frame was not understood; the connection stays open. */
internal const val ERR_MALFORMED = 1

/** Protocol, target, drafter, or the arithmetic that HELLO asks for differ; the connection is closed. */
internal const val ERR_MISMATCH = 2

/** A field is out of the model's range. */
internal const val ERR_BOUNDS = 3

/** No such stream on this connection: OPEN first. */
internal const val ERR_UNKNOWN = 4

/** No room now; retry after retryAfterMs. */
internal const val ERR_BUSY = 6

/** The context is full. */
internal const val ERR_TOO_LONG = 7

/** The verifier stops after the requests in progress: OPEN elsewhere, or again after retryAfterMs. */
internal const val ERR_GOING_AWAY = 9

internal val EMPTY = ByteArray(0)
