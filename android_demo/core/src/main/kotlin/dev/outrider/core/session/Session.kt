package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.protocol.Cancel
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.Features
import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.protocol.Opened
import dev.outrider.core.protocol.Resync
import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.speed.Tuning

/**
 * One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.
 *
 * One rule covers late verdicts, catching up after an outage and the normal round. A verdict commits the accepted path
 * and the bonus token. If these agree with the provisional tokens, the agreeing part becomes verified; at the first
 * difference the provisional rest is rolled back ([OnReturn.REPAIR]) or stays as it is ([OnReturn.KEEP]). While
 * provisional tokens remain, the next VERIFY is the chain of them instead of a drafted tree.
 *
 * When the target falls silent the drafter writes at once, and the understudy, where there is one, begins to read the
 * text. Once it has read it, it takes back what it would not have written itself, and writes on.
 *
 * Feed events by calling the methods; each returns the actions to carry out, in order. Times are seconds on any
 * monotonic clock, handed in with each event. One thread calls; only [version] and [reads] are for others too.
 *
 * prompt: token ids of the conversation so far. maxNew: committed tokens at most. sessionId (16 bytes), stream: as on
 * the wire. rowShape: the drafter's. rowsSeen: of the prompt, as far as the drafter holds its rows. [Tuning]: what
 * measurements decide. understudy: there is one. constraint: what tokens are drawn under. obeys: the device's own
 * writers can be held to it; where not, nothing is written alone. sentenceEnds: tokens that end a sentence or a line.
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
    internal val tuning: Tuning = Tuning(),
    understudy: Boolean = false,
    sentenceEnds: Set<Int> = emptySet(),
    obeys: Boolean = true,
    val constraint: Constraint? = null,
) {
    val stats = SessionStats()
    private val ownLimit = minOf(prompt.size + maxNew, maxContext) // whatever the verifier's context
    internal val text = AnswerTokens(prompt, ownLimit, eosIds, stats)
    internal val requests = Requests(stream, sessionId, sampling, patience, timer, stats, constraint)
    internal val deadlines = Deadlines(patience.silence)
    internal val solo = Solo(policy, sentenceEnds).also { it.obeys = obeys }
    internal val handover = Handover(understudy, policy)
    internal val arithmetic = AnswerArithmetic()
    val committed: List<Int> get() = text.committed
    val provisional: List<Int> get() = text.provisional

    /** The request whose reply is awaited. */
    internal val flight: Flight? get() = requests.flight

    /** The target is silent. */
    val alone: Boolean get() = solo.alone

    var mode = Mode.TREE
        internal set

    @Volatile
    var finished: FinishReason? = null
        private set

    /** Why the verifier refused what it was asked last; "" once it has answered. */
    var complaint = ""
        internal set

    /** Who has a job of ours, to draft or to write. */
    internal var busy: Writer? = null

    /** Changes whenever the job under way is not wanted any more. */
    @Volatile
    var version = 0
        internal set
    internal var linked = false
    internal var ready: Draft? = null // the tree to send next
    internal var context = maxContext // the verifier's
    internal var refused = false // this link's verifier will never take what it was asked
    internal var returnWait = patience.offline // for the target's return, where nothing more can be written
    internal var maxNodes = 64
    internal var treeBudget = MAX_NODES // what the verifier asks for now; larger trees it may prune

    /** Trees and streams are alternatives. */
    internal val targetFirst = policy.writer == WhoWrites.PREFER_CLOUD || policy.writer == WhoWrites.CLOUD_ONLY

    val state: State
        get() = when {
            finished != null -> State.FINISHED
            alone -> if (solo.mute) State.WAITING else State.ALONE
            flight != null -> if (flight?.tree == null) State.STREAMING else State.VERIFYING
            else -> State.DRAFTING
        }

    /** Whether to draft on below the tree under way: nobody has anything else to do, and it is worth it. */
    val draftsAhead: Boolean
        get() {
            val idle = (flight?.tree?.size ?: 0) > 0 && provisional.isEmpty() && busy == null
            return idle && tuning.draftsAhead(chainFlies)
        }

    /** The tree under way is a chain of the understudy. */
    val chainFlies: Boolean get() = flight?.chain == true

    // --- events ---

    /** Begin. Drafting starts at once, so that the first tree is ready when the link is. */
    fun start(now: Double): List<Action> {
        deadlines.heard = now
        if (targetFirst) mode = tuning.begin()
        if (text.over) return finish(if (text.ended) FinishReason.STOP else FinishReason.LENGTH)
        if (policy.writer == WhoWrites.DEVICE_ONLY) return goOnAlone(now, now)
        if (!linked) deadlines.connect = now + patience.connect
        return arithmetic.wanted + handover.readAlong(committed) + work(now)
    }

    /**
     * The link is up and the hashes agree: OPEN with everything committed, and go on; with a verifier that computes
     * otherwise than the one before, wait as where there is none.
     *
     * rtt: seconds of the handshake, if it happened during this answer.
     */
    fun linkUp(welcome: Welcome, now: Double, rtt: Double? = null): List<Action> {
        if (!welcome.computesIn(arithmetic.pinned)) return arithmetic.wanted + linkDown(now, refused = true)
        arithmetic.offered = welcome.arithmetic
        val actions = if (rtt == null) emptyList() else {
            tuning.linked(welcome, rtt)
            if (targetFirst) changeMode(tuning.begin(), now) else emptyList()
        }
        linked = true
        deadlines.heard = now
        maxNodes = minOf(welcome.maxNodes, MAX_NODES)
        treeBudget = welcome.treeBudget.orAll()
        context = welcome.maxContext
        text.limit = minOf(ownLimit, context)
        refused = false
        complaint = ""
        returnWait = patience.offline
        val obeyed = constraint == null || constraint.needs and welcome.constraints.inv() == 0
        return actions + if (obeyed) open(now) else disobeyed(now)
    }

    /** There is no link. refused: a verifier was there, and does not accept this device; another one may. */
    fun linkDown(now: Double, refused: Boolean = false): List<Action> {
        linked = false
        requests.flight = null
        deadlines.retry = null
        if (refused) expectReturn(minOf(patience.offline, REFUSED_SECONDS), now)
        // before a first link its deadline decides
        if (finished != null || deadlines.connect != null) return emptyList()
        return goOnAlone(now, now)
    }

    /** A message for this stream arrived. */
    fun message(message: ServerMessage, now: Double): List<Action> {
        deadlines.heard = now
        if (finished != null) return emptyList()
        return when (message) {
            is Verdict -> verdict(message, now)
            is Features -> addRows(message.start, message.rows)
            is Resync -> askAnew(now)
            is Error -> refusal(message, now)
            is Opened, is Welcome -> emptyList()
        }
    }

    /** A tree was drafted in [seconds] (the answer to [DraftTree]), or a chain (to [DraftChain]). */
    fun treeReady(draft: Draft, version: Int, now: Double, seconds: Double = 0.0): List<Action> {
        busy = null
        tuning.drafted(draft, seconds, stats, version == this.version)
        if (version == this.version) ready = tuning.worthSending(draft)
        return work(now)
    }

    /** A tree below the first [base] tokens was drafted in [seconds] (the answer to [Compare]). */
    fun treeCompared(draft: Draft, base: Int, seconds: Double): List<Action> {
        tuning.compared(draft, base, seconds)
        return emptyList()
    }

    /** A token was written, to which its writer gives the probability [sure] (the answer to [WriteToken]). */
    fun tokenWritten(token: Int, sure: Double, version: Int, now: Double): List<Action> =
        takeToken(token, sure, version) + work(now)

    /** The understudy has read what it was asked to; see [ReadText] for [agreed]. */
    fun textRead(agreed: Int?, now: Double): List<Action> = takeReading(agreed) + work(now)

    /** The understudy cannot be used: [why], in words for people. The drafter writes on. */
    fun understudyFailed(why: String, now: Double): List<Action> {
        handover.failed()
        tuning.understudyFailed()
        if (busy == Writer.UNDERSTUDY) busy = null
        val told = if (alone && finished == null) listOf(HandOver(Writer.DRAFTER, why)) else emptyList()
        return told + work(now)
    }

    /** From now on the device's writers can be held to the answer's constraint, or cannot. */
    fun setObeys(obeys: Boolean, now: Double): List<Action> {
        if (finished != null || solo.obeys == obeys) return emptyList()
        solo.obeys = obeys
        version++ // a token under way is not wanted any more
        if (obeys && solo.paused == null) deadlines.giveUp = null
        return work(now)
    }

    /** Whether the understudy is still to read this: somebody waits for it, or it reads along. From any thread. */
    fun reads(action: ReadText): Boolean = finished == null && handover.reads(action, alone)

    /** When [tick] wants to be called, or null. */
    fun wakeAt(): Double? = pending().minOfOrNull { (_, moment) -> moment }

    /** Time passed: act on the first deadline that has passed. */
    fun tick(now: Double): List<Action> {
        val (deadline, due) = pending().firstOrNull { (_, moment) -> now >= moment } ?: return emptyList()
        return when (deadline) {
            Deadline.CONNECT -> {
                deadlines.connect = null
                goOnAlone(due, now)
            }
            Deadline.GIVE_UP ->
                finish(
                    if (policy.writer == WhoWrites.CLOUD_ONLY || !solo.obeys) FinishReason.UNREACHABLE
                    else FinishReason.UNVERIFIED,
                )
            Deadline.RETRY -> open(now)
            Deadline.REPLY -> goOnAlone(due, now)
            Deadline.RENEW -> {
                deadlines.heard = now
                listOf(Reconnect)
            }
        }
    }

    /** From now on draft trees, or let the target write alone and stream. */
    fun changeMode(mode: Mode, now: Double): List<Action> {
        if (mode == this.mode || finished != null) return emptyList()
        this.mode = mode
        version++
        ready = null
        val generating = flight.let { it != null && it.tree == null }
        // a GENERATE ends by CANCEL; OPEN says how much of it arrived
        return if (generating) listOf(Send(Cancel(stream))) + open(now) else work(now)
    }

    /** Write nothing alone until [proceed]: the battery is low, or the user said so. */
    fun pause(now: Double): List<Action> {
        if (finished != null || solo.paused == PauseReason.ASKED) return emptyList()
        return listOf(pauseFor(PauseReason.ASKED)) + work(now)
    }

    /** Write alone again where the policy lets. */
    fun proceed(now: Double): List<Action> {
        if (finished != null || solo.paused == null) return emptyList()
        deadlines.giveUp = null
        solo.proceed()
        return work(now)
    }

    fun cancel(): List<Action> = if (finished != null) emptyList() else finish(FinishReason.CANCELLED)

    /** A stop string ended the text [surplus] committed tokens ago; even if they ended the answer themselves. */
    fun stop(surplus: Int): List<Action> {
        text.withdraw(surplus)
        return finish(FinishReason.STOP)
    }

    /** A stop string came in the provisional text: nothing more is written, unless it is taken back. */
    fun enough() {
        text.enough = true
    }

    // --- a record that survives the process ---

    /** What [restore] needs. target: the bundle's hash; stop: the strings that end the answer. */
    fun record(target: String, stop: List<String>) = AnswerRecord(
        prompt, committed.drop(prompt.size), provisional, text.spans, sampling, maxNew, requests.seq, stream,
        sessionId, target, stop, arithmetic.pinned, constraint,
    )

    /** Take up a recorded answer, before [start]. The session was made with the record's prompt and settings. */
    fun restore(record: AnswerRecord) {
        text.restore(record)
        requests.seq = record.seq
        arithmetic.pinned = record.arithmetic
    }

    // --- inside ---

    private fun pending() = if (finished != null) emptyList() else deadlines.pending(flight, alone)

    /** OPEN with everything committed; whatever was under way is forgotten. */
    internal fun open(now: Double): List<Action> {
        requests.flight = null
        deadlines.retry = null
        deadlines.connect = null
        val actions = if (policy.onReturn == OnReturn.KEEP) adopt() else emptyList()
        if (text.over) return actions + finish(if (text.ended) FinishReason.STOP else noRoom())
        stats.opens++
        return actions + requests.open(committed, rowsSeen.leading) + work(now)
    }

    /** The target is silent: go on without it. */
    internal fun goOnAlone(due: Double, now: Double): List<Action> {
        if (alone) return work(now)
        solo.alone = true
        ready = null
        version++
        stats.stalls++
        return listOf(Stall(due)) + work(now)
    }

    internal fun finish(reason: FinishReason): List<Action> = buildList {
        finished = reason
        if (flight.let { it != null && it.tree == null } && linked) add(Send(Cancel(stream))) // else it would write on
        val verified = reason == FinishReason.STOP || reason == FinishReason.LENGTH
        if (verified) addAll(text.withdrawProvisional())
        add(Done(reason))
    }

    private fun Int.orAll() = if (this > 0) this else MAX_NODES
}
