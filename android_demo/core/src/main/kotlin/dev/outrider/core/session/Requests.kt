package dev.outrider.core.session

import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.Generate
import dev.outrider.core.protocol.Open
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Verify
import dev.outrider.core.protocol.packIds
import dev.outrider.core.protocol.packParents

/**
 * A request whose reply is awaited. sent, due: when it was sent, and when its reply is overdue.
 *
 * tree: null for a GENERATE. scores: log path probabilities of the tree's nodes. chain: the understudy drafted it.
 * catchingUp: it is the chain of provisional tokens. afterOpen: the reply may take longer, as the verifier may have to
 * read the whole text first. streaming: of a GENERATE that brought a token already; [sent] is when the last one came.
 * tellsTimes: a token of it told what its step took. measured: one behind its first token did.
 */
internal class Flight(
    val seq: Long,
    val tree: TokenTree?,
    val sent: Double,
    val due: Double,
    val afterOpen: Boolean,
    val scores: List<Double> = emptyList(),
    val catchingUp: Boolean = false,
    val streaming: Boolean = false,
    val chain: Boolean = false,
    val tellsTimes: Boolean = false,
    val measured: Boolean = false,
) {
    /** Whether a stream's [verdict] came of one step with the verdict before, which told its time. */
    fun sameStep(verdict: Verdict): Boolean = tellsTimes && verdict.engineUs == 0
}

/**
 * One answer's requests: their numbers, the one under way, and when its reply is overdue. stream, sessionId,
 * constraint: as on the wire. timer: of rounds; it outlives the answer.
 */
internal class Requests(
    private val stream: Int,
    private val sessionId: ByteArray,
    private val sampling: Sampling,
    private val patience: Patience,
    private val timer: RoundTimer,
    private val stats: SessionStats,
    private val constraint: Constraint? = null,
) {
    private val gaps = RoundTimer(timer.floor, timer.ceiling, timer.first) // between streamed tokens
    private var freshOpen = false // an OPEN was sent and no request since
    var flight: Flight? = null
    var seq = 0L

    /** OPEN with everything committed. Whatever was under way is forgotten. */
    fun open(committed: List<Int>, rowsHeld: Int): Send {
        flight = null
        freshOpen = true
        val held = minOf(rowsHeld, committed.size - 1)
        return Send(Open(stream, sessionId, seq, packIds(committed), held, sampling, constraint))
    }

    /** VERIFY [tree] below the first [base] tokens. */
    fun verify(
        tree: TokenTree,
        base: Int,
        now: Double,
        scores: List<Double> = emptyList(),
        catchingUp: Boolean = false,
        chain: Boolean = false,
    ): Send {
        fly(tree, now, scores, catchingUp, chain)
        return Send(Verify(stream, seq, base, packIds(tree.tokens), packParents(tree)))
    }

    /** GENERATE at most [most] tokens behind the first [base]. */
    fun generate(base: Int, most: Int, now: Double): Send {
        fly(null, now)
        return Send(Generate(stream, seq, base, most, rows = true))
    }

    /** [verdict] on [answered] came. A GENERATE stays under way: its next token is awaited. */
    fun answered(answered: Flight, verdict: Verdict, now: Double) {
        val generating = answered.tree == null
        val usual = !answered.afterOpen && !answered.sameStep(verdict)
        if (usual) (if (generating) gaps else timer).add(now - answered.sent)
        val timed = verdict.engineUs > 0
        flight = if (!generating) null else {
            Flight(
                answered.seq, null, now, now + gaps.timeout(), false, streaming = true,
                tellsTimes = answered.tellsTimes || timed,
                measured = answered.measured || (answered.streaming && timed),
            )
        }
    }

    private fun fly(
        tree: TokenTree?,
        now: Double,
        scores: List<Double> = emptyList(),
        catchingUp: Boolean = false,
        chain: Boolean = false,
    ) {
        seq++
        stats.calls++
        val wait = if (freshOpen) maxOf(timer.timeout(), patience.open) else timer.timeout()
        flight = Flight(seq, tree, now, now + wait, freshOpen, scores, catchingUp, chain = chain)
        freshOpen = false
    }
}
