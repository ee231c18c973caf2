/** A request to the verifier that its verdict has settled: what was asked, what came of it, and what it took. */
package dev.outrider.core.speed

import dev.outrider.core.protocol.TokenTree

/** What the target is asked for: to verify a drafter's tree, an understudy's chain or provisional text; to write. */
internal enum class RequestKind { TREE, CHAIN, CATCH_UP, STREAM }

/**
 * What the verdicts of a stream have told so far of the time that its tokens take: no token has come; tokens have,
 * without a time; the first one told its step's time; a later one did too.
 */
internal enum class StreamClock { SILENT, UNTIMED, FIRST, RUNNING }

/**
 * Seconds throughout. tree: what was sent; empty for a stream. scores: log path probabilities of its nodes. accepted:
 * node numbers of the accepted path. tokens: those of the path and the one that the target drew behind it. wait: since
 * the request was sent, or since a stream's last token. engine, queue: the verifier's own part of it. ended: behind the
 * tokens the answer has ended. afterOpen: the verifier may have had to read the whole text first. late: it came when it
 * was overdue, so that an outage or a suspended device made it wait, not the verifier. clock: a stream's, before this
 * token. sameStep: a stream's token came of one step with the token before.
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
    /** The device drafted what was verified, so that its wait is a round's. */
    val drafted: Boolean get() = (kind == RequestKind.TREE || kind == RequestKind.CHAIN) && !afterOpen
}
