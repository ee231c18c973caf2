/** An answer's view of its verifier: the link, its limits, the request in flight, refusals and deadlines. */
package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.protocol.Cancel
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.ERR_BOUNDS
import dev.outrider.core.protocol.ERR_BUSY
import dev.outrider.core.protocol.ERR_GOING_AWAY
import dev.outrider.core.protocol.ERR_MALFORMED
import dev.outrider.core.protocol.ERR_TOO_LONG
import dev.outrider.core.protocol.ERR_UNKNOWN
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.FINISH_NONE
import dev.outrider.core.protocol.Generate
import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.protocol.Open
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Verify
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.packIds
import dev.outrider.core.protocol.packParents
import dev.outrider.core.speed.Arm

/** Least seconds until OPEN is sent again, and the number if the verifier names none. */
private const val RETRY_SECONDS = 1.0
private const val SHORTEST_RETRY = 0.05

/**
 * An awaited event, the most important first: the first link of an answer; the target's return, once offline writing
 * has stopped; the time that the verifier named when it refused a request; the reply to a request; any message at all,
 * before another connection is made. [Session.tick] acts when one's time has passed.
 */
internal enum class Deadline { CONNECT, GIVE_UP, RETRY, REPLY, RENEW }

/** The consequence of a verifier's refusal. None loses text. */
internal enum class Refusal {
    /** Nothing: it concerns a cancelled request, or a link that ends after its replies. */
    IGNORE,

    /** It knows another text, or none: OPEN again. */
    REOPEN,

    /** OPEN again later. */
    RETRY,

    /** It would refuse again: this link's verifier is not asked any more. */
    FATAL,

    /** Its context is full. */
    FULL,
}

/**
 * How well the verdicts of a stream have timed its tokens so far: no token has come; tokens have come, without a time;
 * the first one carried its step's time; so did a later one.
 */
internal enum class StreamClock { SILENT, UNTIMED, FIRST, RUNNING }

/**
 * A request whose reply is awaited. sent, due: when it was sent, and when its reply is overdue; [sent] of a running
 * stream is when its last token came. Other fields: see [Settled].
 */
internal data class InFlight(
    val seq: Long,
    val arm: Arm?,
    val tree: TokenTree,
    val sent: Double,
    val due: Double,
    val afterOpen: Boolean,
    val scores: List<Double> = emptyList(),
    val clock: StreamClock = StreamClock.SILENT,
)

/**
 * The present verifier of one answer. stream, sessionId, sampling, constraint: as on the wire. context: tokens that its
 * answers may hold. timer: of rounds; it outlives the answer.
 */
internal class VerifierState(
    private val stream: Int,
    private val sessionId: ByteArray,
    private val sampling: Sampling,
    private val constraint: Constraint?,
    context: Int,
    private val patience: Patience,
    private val timer: RoundTimer,
    private val stats: SessionStats,
) {
    private val gaps = RoundTimer(timer.floor, timer.ceiling, timer.first) // between streamed tokens

    /** This link's verifier permanently refused a request. */
    var refused = false
        private set
    private var freshOpen = false // OPEN was sent and no request since
    private var treeBudget = MAX_NODES // its present wish; it may prune larger trees
    private var offered = "" // arithmetic of the link's verifier; "" if unknown
    private var retryAt: Double? = null // nothing is requested before
    var context = context
        private set
    var maxNodes = 64
        private set
    var linked = false
        private set
    var inFlight: InFlight? = null
        private set

    /** Number of the last request. */
    var seq = 0L

    /** Why it refused the last request, in words for people; "" once it has answered. */
    var complaint = ""

    /** The arithmetic of the answer's verified text; "" without any, or if unknown. */
    var pinned = ""

    /** The first link is waited for until then. */
    var connectBy: Double? = null

    /** When the link last delivered something. */
    var heard = 0.0

    /** A request may be sent. */
    val canAsk: Boolean get() = linked && !refused && inFlight == null && retryAt == null

    /** The target streams: its next token is awaited. */
    val streams: Boolean get() = inFlight?.arm == Arm.STREAM

    /** The arithmetic that the link should look for. */
    val wanted: List<Action> get() = if (pinned.isEmpty()) emptyList() else listOf(Pin(pinned))

    /** Most nodes of the next tree. */
    val nodeLimit: Int get() = minOf(maxNodes, treeBudget)

    // --- the link ---

    /**
     * Take a new link. Returns whether its verifier supports the answer's constraint. One that does not would ignore
     * it, so it is not asked.
     */
    fun linkUp(welcome: Welcome, now: Double): Boolean {
        offered = welcome.arithmetic
        linked = true
        heard = now
        maxNodes = minOf(welcome.maxNodes, MAX_NODES)
        treeBudget = if (welcome.treeBudget > 0) welcome.treeBudget else MAX_NODES
        context = welcome.maxContext
        refused = false
        complaint = ""
        if (constraint == null || constraint.needs and welcome.constraints.inv() == 0) return true
        connectBy = null
        refuseForGood("this verifier does not support the answer's constraint; update it, or ask without one")
        return false
    }

    /** Handle a lost link. */
    fun linkDown() {
        linked = false
        inFlight = null
        retryAt = null
    }

    /** Pin the arithmetic, as the link's verifier has written some of the answer. */
    fun pin(): List<Action> {
        if (pinned.isNotEmpty() || offered.isEmpty()) return emptyList()
        pinned = offered
        return wanted
    }

    // --- requests ---

    /** Return OPEN with everything committed; the drafter holds the first [rowsHeld] feature rows. */
    fun open(committed: List<Int>, rowsHeld: Int): Send {
        freshOpen = true
        val held = minOf(rowsHeld, committed.size - 1)
        return Send(Open(stream, sessionId, seq, packIds(committed), held, sampling, constraint))
    }

    /** Forget every request and wait. */
    fun forgetRequest() {
        inFlight = null
        retryAt = null
        connectBy = null
    }

    /** VERIFY [draft] below the first [base] tokens, if the text has [room] levels. */
    fun verify(arm: Arm, draft: Draft, room: Int, base: Int, now: Double): Send {
        val tree = draft.tree.pruned(maxNodes, room) // it may be older than the limits
        return verify(arm, tree, base, now, draft.scores)
    }

    /** VERIFY [provisional] text after the first [base] tokens. */
    fun catchUp(provisional: List<Int>, base: Int, now: Double): Send {
        val chain = TokenTree.chain(provisional.take(minOf(maxNodes, context - base).coerceAtLeast(0)))
        return verify(null, chain, base, now)
    }

    private fun verify(
        arm: Arm?, tree: TokenTree, base: Int, now: Double, scores: List<Double> = emptyList(),
    ): Send {
        start(arm, tree, now, scores)
        return Send(Verify(stream, seq, base, packIds(tree.tokens), packParents(tree)))
    }

    /** GENERATE at most [limit] tokens after the first [base]. */
    fun generate(base: Int, limit: Int, now: Double): Send {
        start(Arm.STREAM, TokenTree(), now)
        return Send(Generate(stream, seq, base, limit, rows = true))
    }

    /** CANCEL a stream, which would continue otherwise. */
    fun cancel(): List<Action> = if (streams && linked) listOf(Send(Cancel(stream))) else emptyList()

    /**
     * Settle a verdict when [base] tokens are committed. null: it is stale, as its request was cancelled. A GENERATE
     * stays in flight, as its next token is awaited.
     */
    fun settle(verdict: Verdict, base: Int, now: Double): Settled? {
        val request = inFlight
        if (request == null || verdict.seq != request.seq || verdict.baseLen != base) return null
        val timed = verdict.engineUs > 0
        val sameStep = !timed && (request.clock == StreamClock.FIRST || request.clock == StreamClock.RUNNING)
        if (!request.afterOpen && !sameStep) (if (streams) gaps else timer).add(now - request.sent)
        inFlight = if (streams) awaitingMore(request, timed, now) else null
        complaint = ""
        if (verdict.treeBudget > 0) treeBudget = verdict.treeBudget
        val tokens = verdict.path.mapNotNull(request.tree.tokens::getOrNull) + verdict.bonus
        return Settled(
            request.arm, request.tree, request.scores, verdict.path, tokens, now - request.sent,
            1e-6 * verdict.engineUs, verdict.finish != FINISH_NONE, request.afterOpen, now >= request.due, sameStep,
            request.clock == StreamClock.SILENT || (sameStep && request.clock == StreamClock.FIRST),
        )
    }

    /** Return the stream after one more token; [timed]: it carried its step's time. */
    private fun awaitingMore(request: InFlight, timed: Boolean, now: Double): InFlight {
        val clock = when {
            request.clock == StreamClock.SILENT -> if (timed) StreamClock.FIRST else StreamClock.UNTIMED
            timed -> StreamClock.RUNNING
            else -> request.clock
        }
        return request.copy(sent = now, due = now + gaps.timeout(), afterOpen = false, clock = clock)
    }

    private fun start(arm: Arm?, tree: TokenTree, now: Double, scores: List<Double> = emptyList()) {
        seq++
        stats.calls++
        val wait = if (freshOpen) maxOf(timer.timeout(), patience.open) else timer.timeout()
        inFlight = InFlight(seq, arm, tree, now, now + wait, freshOpen, scores)
        freshOpen = false
    }

    // --- refusals ---

    /** Handle an error: a refusal of the last request, or the verifier's end. */
    fun refuse(error: Error, now: Double): Refusal {
        // requests in flight are still answered; then the link comes up elsewhere
        if (error.code == ERR_GOING_AWAY && error.stream == -1) return Refusal.IGNORE
        if (error.code == ERR_UNKNOWN) return resync(now)
        if (error.code == ERR_TOO_LONG) return Refusal.FULL
        if (error.code == ERR_MALFORMED || error.code == ERR_BOUNDS) {
            refuseForGood(error.text)
            return Refusal.FATAL
        }
        val advised = error.code == ERR_BUSY || error.code == ERR_GOING_AWAY
        complaint = error.text
        inFlight = null
        retryAt = now + if (advised) maxOf(SHORTEST_RETRY, error.retryAfterMs / 1000.0) else RETRY_SECONDS
        return Refusal.RETRY
    }

    /** Handle a verifier that has another text, or none. */
    fun resync(now: Double): Refusal {
        val request = inFlight ?: return Refusal.IGNORE // the OPEN before was refused
        if (!request.afterOpen) return Refusal.REOPEN
        inFlight = null
        retryAt = now + RETRY_SECONDS // OPEN has just not helped
        return Refusal.RETRY
    }

    private fun refuseForGood(why: String) {
        refused = true
        complaint = why
        inFlight = null
        retryAt = null
    }

    // --- deadlines ---

    /**
     * Return all deadlines, the most important first. offline: the reply is overdue already. giveUpAt: end of the wait
     * for the target's return.
     */
    fun deadlines(offline: Boolean, giveUpAt: Double?): List<Pair<Deadline, Double>> = buildList {
        connectBy?.let { add(Deadline.CONNECT to it) }
        giveUpAt?.let { add(Deadline.GIVE_UP to it) }
        retryAt?.let { add(Deadline.RETRY to it) }
        val due = inFlight?.due ?: return@buildList
        if (!offline) add(Deadline.REPLY to due)
        add(Deadline.RENEW to maxOf(heard, due) + patience.silence)
    }
}
