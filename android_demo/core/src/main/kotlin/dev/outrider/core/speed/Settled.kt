/** A request to the verifier after its verdict: the request, its outcome and its duration. */
package dev.outrider.core.speed

import dev.outrider.core.protocol.TokenTree

/** The kind of a request: to verify a drafter's tree, an understudy's chain or provisional text; to stream. */
internal enum class RequestKind { TREE, CHAIN, CATCH_UP, STREAM }

/**
 * How well the verdicts of a stream have timed its tokens so far: no token has come; tokens have come, without a time;
 * the first one carried its step's time; so did a later one.
 */
internal enum class StreamClock { SILENT, UNTIMED, FIRST, RUNNING }

/**
 * Seconds throughout. tree: what was sent; empty for a stream. scores: log path probabilities of its nodes. accepted:
 * node numbers of the accepted path. tokens: those of the path and the one that the target drew after it. wait: since
 * the request was sent, or since a stream's last token. engine, queue: the verifier's own part of it. ended: the answer
 * has ended after the tokens. afterOpen: the verifier may have had to read the whole text first. late: it came when it
 * was overdue, so an outage or a suspended device delayed it, not the verifier. clock: a stream's, before this token.
 * sameStep: a stream's token came from the same step as the token before.
 */
internal class Settled(
    val kind: RequestKind,
    val tree: TokenTree,
    val scores: List<Double>,
    val accepted: List<Int>,
    val tokens: List<Int>,
    val wait: Double,
    val engine: Double,
    val queue: Double,
    val ended: Boolean,
    val afterOpen: Boolean,
    val late: Boolean,
    val clock: StreamClock,
    val sameStep: Boolean,
) {
    /** The device drafted the verified tokens, so the wait is that of a round. */
    val drafted: Boolean get() = (kind == RequestKind.TREE || kind == RequestKind.CHAIN) && !afterOpen
}
