package dev.outrider.core.runtime

import dev.outrider.core.protocol.Cancel
import dev.outrider.core.protocol.ERR_BUSY
import dev.outrider.core.protocol.ERR_GOING_AWAY
import dev.outrider.core.protocol.ERR_TOO_LONG
import dev.outrider.core.protocol.ERR_UNKNOWN
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.Features
import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.protocol.Open
import dev.outrider.core.protocol.Opened
import dev.outrider.core.protocol.Resync
import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.packIds

/** A request whose reply is awaited. tree: null for a GENERATE. */
internal class Flight(val seq: Long, val tree: TokenTree?, val sent: Double, val due: Double, val afterOpen: Boolean)

/**
 * One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.
 *
 * One rule covers late verdicts, catching up after an outage and the normal round. A verdict commits the accepted path
 * and the bonus token. If these agree with the provisional tokens, the agreeing part becomes verified; at the first
 * difference the provisional rest is rolled back ([OnReturn.REPAIR]) or stays as it is ([OnReturn.KEEP]). While
 * provisional tokens remain, the next VERIFY is the chain of them instead of a drafted tree.
 *
 * Feed events by calling the methods; each returns the actions to carry out, in order. Times are seconds on any
 * monotonic clock, handed in with each event. One thread calls; only [version] may be read from another.
 *
 * prompt: token ids of the conversation so far. maxNew: committed tokens at most. sessionId (16 bytes), stream: as on
 * the wire. rowShape: the drafter's. rowsSeen: of the prompt, as far as the drafter holds its rows.
 */
class Session(
    val prompt: List<Int>,
    val sampling: Sampling,
    internal val eosIds: Set<Int>,
    private val maxNew: Int,
    internal val maxContext: Int,
    internal val rowShape: RowShape,
    private val sessionId: ByteArray,
    val stream: Int = 0,
    val rowsSeen: RowsSeen = RowsSeen(),
    internal val patience: Patience = Patience(),
    internal val timer: RoundTimer = RoundTimer(),
    val policy: Policy = Policy(),
) {
    val stats = SessionStats()
    internal val text = AnswerTokens(prompt, stats)
    val committed: List<Int> get() = text.committed
    val provisional: List<Int> get() = text.provisional

    /** What the user sees: the answer's verified and provisional tokens. */
    val textIds: List<Int> get() = text.answer + text.provisional

    var mode = Mode.TREE
        internal set
    var finished: Ending? = null
        private set

    /** The target is silent. */
    var alone = false
        internal set

    /** Why nothing is written alone, where that is so. */
    var paused: PauseReason? = null
        internal set

    /** The drafter has a job of ours. */
    var busy = false
        internal set

    /** Changes whenever what was asked of the drafter is not wanted any more. */
    @Volatile
    var version = 0
        internal set
    internal var flight: Flight? = null
    internal var connectBy: Double? = null
        private set

    internal var textOver = false // see `enough`
    internal var linked = false
    internal var readyTree: TokenTree? = null
    internal var seq = 0L
    internal var freshOpen = false // an OPEN was sent and no VERIFY since
    private var heard = 0.0
    internal var retryAt: Double? = null
    internal var giveUpAt: Double? = null
    internal var maxNodes = 64
    internal var treeBudget = MAX_NODES // what the verifier asks for now; larger trees it may prune
    internal var limit = minOf(prompt.size + maxNew, maxContext)
    internal val gaps = RoundTimer(timer.floor, timer.ceiling, timer.first) // between streamed tokens
    internal val confidence = ArrayDeque<Double>()

    // --- events ---

    /** Begin. Drafting starts at once, so that the first tree is ready when the link is. */
    fun start(now: Double): List<Action> {
        heard = now
        if (over()) return finish(if (ended()) Ending.STOP else Ending.LENGTH)
        if (policy.writer == Writer.DEVICE_ONLY) return goOnAlone(now, now)
        if (!linked) connectBy = now + patience.connect
        return work(now)
    }

    /** The link is up and the hashes agree: OPEN with everything committed, and go on. */
    fun linkUp(welcome: Welcome, now: Double): List<Action> {
        linked = true
        heard = now
        maxNodes = minOf(welcome.maxNodes, MAX_NODES)
        treeBudget = welcome.treeBudget.orAll()
        limit = minOf(limit, welcome.maxContext)
        return open(now)
    }

    fun linkDown(now: Double): List<Action> {
        linked = false
        flight = null
        retryAt = null
        if (finished != null || connectBy != null) return emptyList() // before a first link `connectBy` decides
        return goOnAlone(now, now)
    }

    /** A message for this stream arrived. */
    fun message(message: ServerMessage, now: Double): List<Action> {
        heard = now
        if (finished != null) return emptyList()
        return when (message) {
            is Verdict -> verdict(message, now)
            is Features -> addRows(message.start, message.rows)
            is Resync -> if (flight != null) open(now) else emptyList()
            is Error -> error(message, now)
            is Opened, is Welcome -> emptyList()
        }
    }

    /** The drafter finished a tree (its answer to [DraftTree]). */
    fun treeReady(tree: TokenTree, version: Int, now: Double): List<Action> {
        busy = false
        if (version == this.version) readyTree = tree
        return work(now)
    }

    /** The drafter wrote a token, to which it gives the probability [sure] (its answer to [WriteToken]). */
    fun tokenWritten(token: Int, sure: Double, version: Int, now: Double): List<Action> {
        busy = false
        val actions = mutableListOf<Action>()
        if (version == this.version && mayWrite() && finished == null) {
            text.provide(token)
            this.version++
            actions += Provide(token)
            actions += weigh(sure)
        }
        return actions + work(now)
    }

    /** Time passed; see [wakeAt]. */
    fun tick(now: Double): List<Action> {
        if (finished != null) return emptyList()
        val waiting = flight
        return when {
            connectBy.passed(now) -> {
                val due = connectBy!!
                connectBy = null
                goOnAlone(due, now)
            }
            giveUpAt.passed(now) ->
                finish(if (policy.writer == Writer.CLOUD_ONLY) Ending.UNREACHABLE else Ending.UNVERIFIED)
            retryAt.passed(now) -> {
                retryAt = null
                open(now)
            }
            waiting == null -> emptyList()
            now >= waiting.due && !alone -> goOnAlone(waiting.due, now)
            now >= renewAt(waiting) -> {
                heard = now
                listOf(Reconnect)
            }
            else -> emptyList()
        }
    }

    /** From now on draft trees, or let the target write alone and stream. */
    fun changeMode(mode: Mode, now: Double): List<Action> {
        if (mode == this.mode || finished != null) return emptyList()
        this.mode = mode
        version++
        readyTree = null
        val generating = flight.let { it != null && it.tree == null }
        // a GENERATE ends by CANCEL; OPEN says how much of it arrived
        return if (generating) listOf(Send(Cancel(stream))) + open(now) else work(now)
    }

    /** Write nothing alone until [proceed]: the battery is low, or the user said so. */
    fun pause(now: Double): List<Action> {
        if (finished != null || paused == PauseReason.ASKED) return emptyList()
        return listOf(pauseFor(PauseReason.ASKED)) + work(now)
    }

    /** Write alone again where the policy lets. */
    fun proceed(now: Double): List<Action> {
        if (finished != null || paused == null) return emptyList()
        paused = null
        giveUpAt = null
        confidence.clear()
        return work(now)
    }

    fun cancel(): List<Action> = if (finished != null) emptyList() else finish(Ending.CANCELLED)

    /** A stop string ended the text [surplus] committed tokens ago; even if they ended the answer themselves. */
    fun stop(surplus: Int): List<Action> {
        text.withdraw(surplus)
        return finish(Ending.STOP)
    }

    /** A stop string came in the provisional text: nothing more is written, unless it is taken back. */
    fun enough() {
        textOver = true
    }

    /** When [tick] wants to be called, or null. */
    fun wakeAt(): Double? {
        if (finished != null) return null
        val reply = flight?.let { if (alone) renewAt(it) else minOf(renewAt(it), it.due) }
        return listOfNotNull(connectBy, giveUpAt, retryAt, reply).minOrNull()
    }

    // --- a record that survives the process ---

    /** What [restore] needs. target: the bundle's hash; stop: the strings that end the answer. */
    fun record(target: String, stop: List<String>) = AnswerRecord(
        prompt, text.answer, text.provisional, text.adopted, sampling, maxNew, seq, stream, sessionId, target, stop,
    )

    /** Take up a recorded answer, before [start]. The session was made with the record's prompt and settings. */
    fun restore(record: AnswerRecord) {
        text.restore(record)
        seq = record.seq
    }

    // --- inside ---

    /** When an open but silent link may be dead. */
    private fun renewAt(flight: Flight) = maxOf(heard, flight.due) + patience.silence

    private fun error(message: Error, now: Double): List<Action> = when {
        // what is under way is still answered; then the link goes down and comes up elsewhere
        message.code == ERR_GOING_AWAY && message.stream == -1 -> emptyList()
        message.code == ERR_UNKNOWN -> open(now)
        message.code == ERR_TOO_LONG -> finish(Ending.LENGTH)
        else -> {
            val told = message.code == ERR_BUSY || message.code == ERR_GOING_AWAY
            flight = null
            retryAt = now + if (told) maxOf(0.05, message.retryAfterMs / 1000.0) else 1.0
            goOnAlone(now, now)
        }
    }

    internal fun open(now: Double): List<Action> {
        flight = null
        freshOpen = true
        retryAt = null
        connectBy = null
        val actions = if (policy.onReturn == OnReturn.KEEP) adopt() else emptyList()
        if (over()) return actions + finish(if (ended()) Ending.STOP else Ending.LENGTH)
        stats.opens++
        val have = minOf(rowsSeen.leading, committed.size - 1)
        return actions + Send(Open(stream, sessionId, seq, packIds(committed), have, sampling)) + work(now)
    }

    internal fun pauseFor(reason: PauseReason): Pause {
        paused = reason
        stats.pauses++
        version++ // a token under way is not wanted any more
        return Pause(reason)
    }

    internal fun ended() = committed.last() in eosIds && committed.size > prompt.size

    private fun over() = ended() || committed.size >= limit

    /** The target is silent: go on without it. */
    private fun goOnAlone(due: Double, now: Double): List<Action> {
        if (alone) return work(now)
        alone = true
        readyTree = null
        version++
        stats.stalls++
        return listOf(Stall(due)) + work(now)
    }

    internal fun finish(reason: Ending): List<Action> = buildList {
        finished = reason
        if (flight.let { it != null && it.tree == null } && linked) add(Send(Cancel(stream))) // else it would write on
        val whole = reason == Ending.STOP || reason == Ending.LENGTH
        if (whole && provisional.isNotEmpty()) add(RollBack(text.rollBack()))
        add(Done(reason))
    }

    private fun Double?.passed(now: Double) = this != null && now >= this

    private fun Int.orAll() = if (this > 0) this else MAX_NODES
}
