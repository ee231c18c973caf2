/** A request to the verifier after its verdict: its outcome and its duration. */
package dev.outrider.core.session

import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.speed.Arm

/**
 * Seconds throughout. arm: null: provisional text was verified. tree: what was sent; empty for a stream. scores: log
 * path probabilities of its nodes. accepted: node numbers of the accepted path. tokens: those of the path and the one
 * that the target drew after it. wait: since the request was sent, or since a stream's last token. engine: the
 * verifier's own part of it. ended: the answer has ended after the tokens. afterOpen: the verifier may have had to read
 * the whole text first. late: it came when it was overdue, so an outage or a suspended device delayed it, not the
 * verifier. sameStep: a stream's token came from the same step as the token before. askedFor: a stream's token came of
 * its first step, which had to be asked for.
 */
internal class Settled(
    val arm: Arm?,
    val tree: TokenTree,
    val scores: List<Double>,
    val accepted: List<Int>,
    val tokens: List<Int>,
    val wait: Double,
    val engine: Double,
    val ended: Boolean,
    val afterOpen: Boolean,
    val late: Boolean,
    val sameStep: Boolean,
    val askedFor: Boolean,
) {
    /** The device drafted the verified tokens, so the wait is that of a round. */
    val drafted: Boolean get() = (arm == Arm.TREE || arm == Arm.CHAIN) && !afterOpen
}
