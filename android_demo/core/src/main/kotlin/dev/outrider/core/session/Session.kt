package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.Features
import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.protocol.Opened
import dev.outrider.core.protocol.Resync
import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.speed.Arm

/**
 * One answer as a pure state machine: events in, actions out. No I/O, no threads, no clock.
 *
 * The whole idea: `committed` tokens were drawn by the target (or are the prompt); `provisional` tokens after them were
 * written offline. The user sees both. A verdict commits the accepted path and the token that the target drew after it.
 * Provisional text that agrees with these becomes verified; at the first difference the rest is rolled back
 * ([OnReturn.REPAIR]) or stays as it is ([OnReturn.KEEP]). While provisional tokens remain, the next VERIFY is the
 * chain of them instead of a drafted tree: so late verdicts, catching up after an outage and the normal round follow
 * one rule. Three objects hold the state, and none of them knows the session: [VerifierState] the link, the request in
 * flight and refusals; [OfflineWriter] who writes while the target is silent; [JobSlot] the one job of drafter or
 * understudy. Each returns values; the session turns them into actions, and [next] alone decides what to do.
 *
 * Feed events by calling the methods; each returns the actions to carry out, in order. Times are seconds on any
 * monotonic clock, passed in with each event. One thread calls; only [cancelled] and [stillReads] are for others too.
 *
 * prompt: token ids of the conversation so far. maxNew: most committed tokens. sessionId (16 bytes), stream: as on the
 * wire. rowShape: the drafter's. rowsSeen: the prompt's rows that the drafter holds. [Tuning]: choices by measurement.
 * drafter, understudy: there is one. constraint: on the tokens drawn. obeys: the device's own writers can obey it;
 * otherwise nothing is written offline. sentenceEnds: tokens that end a sentence or a line.
 */
internal class Session(
    val prompt: List<Int>,
    val sampling: Sampling,
    eosIds: Set<Int>,
    internal val maxNew: Int,
    private val maxContext: Int,
    private val rowShape: RowShape,
    internal val sessionId: ByteArray,
    val stream: Int = 0,
    val rowsSeen: RowsSeen = RowsSeen(),
    private val patience: Patience = Patience(),
    timer: RoundTimer = RoundTimer(),
    val policy: Policy = Policy(),
    internal val tuning: Tuning = Tuning(),
    understudy: Boolean = false,
    sentenceEnds: Set<Int> = emptySet(),
    obeys: Boolean = true,
    val constraint: Constraint? = null,
    private val drafter: Boolean = true,
) {
    val stats = SessionStats()
    private val ownLimit = minOf(prompt.size + maxNew, maxContext) // most tokens, whatever the verifier's context
    internal val text = Transcript(prompt, ownLimit, eosIds, stats)
    internal val verifier = VerifierState(stream, sessionId, sampling, constraint, maxContext, patience, timer, stats)
    internal val offline = OfflineWriter(policy, understudy, sentenceEnds, obeys, patience.offline, drafter)
    internal val job = JobSlot()
    val committed: List<Int> get() = text.committed
    val provisional: List<Int> get() = text.provisional
    var arm = Arm.TREE
        internal set
    @Volatile
    var finished: FinishReason? = null
        private set

    val state: State get() = stateOf(verifier, offline, finished)

    // --- what jobs in other threads ask ---

    /** Whether the result of a job that carries [version] is no longer wanted. */
    fun cancelled(version: Int): Boolean = finished != null || version != job.version

    /** Whether the understudy should still read this: a writer waits for it, or it reads along. */
    fun stillReads(action: ReadText): Boolean = finished == null && offline.stillReads(action)

    /** Who drafts ahead, below the present tree or after the chain; null if that is not worthwhile. */
    val draftsAhead: Writer?
        get() {
            val request = verifier.inFlight
            val arm = request?.arm ?: return null
            if (request.tree.size == 0 || provisional.isNotEmpty() || job.busy != null) return null
            return (if (arm == Arm.CHAIN) Writer.UNDERSTUDY else Writer.DRAFTER).takeIf { tuning.draftsAhead(arm) }
        }

    // --- events ---

    /** Begin. Drafting starts at once, so that the first tree is ready when the link is. */
    fun start(now: Double): List<Action> {
        verifier.heard = now
        if (policy.targetFirst) arm = tuning.begin()
        if (text.over) return complete()
        if (offline.deviceOnly) return goOffline(now, now)
        if (!verifier.linked) verifier.connectBy = now + patience.connect
        return verifier.wanted + offline.readAlong(committed) + next(now)
    }

    /**
     * Continue on a new link whose hashes agree: OPEN with everything committed. A verifier with another arithmetic
     * than the last one is not asked, as if there were none. rtt: of the handshake, if it happened during this answer.
     */
    fun linkUp(welcome: Welcome, now: Double, rtt: Double? = null): List<Action> {
        if (!welcome.computesIn(verifier.pinned)) return verifier.wanted + linkDown(now, refused = true)
        rtt?.let { tuning.controller.linked(welcome, it) }
        val actions = if (rtt != null && policy.targetFirst) changeArm(tuning.begin(), now) else emptyList()
        val supported = verifier.linkUp(welcome, now)
        text.limit = minOf(ownLimit, verifier.context)
        offline.accepted()
        return actions + if (supported) open(now) else goOffline(now, now)
    }

    /** Handle a lost link. refused: a verifier was there and does not accept this device; another one may. */
    fun linkDown(now: Double, refused: Boolean = false): List<Action> {
        verifier.linkDown()
        if (refused) offline.expectReturn(REFUSED_SECONDS, now)
        // before a first link, that decides
        return if (finished != null || verifier.connectBy != null) emptyList() else goOffline(now, now)
    }

    /** Handle a message for this stream. */
    fun message(message: ServerMessage, now: Double): List<Action> {
        verifier.heard = now
        if (finished != null) return emptyList()
        return when (message) {
            is Verdict ->
                verifier.settle(message, committed.size, now)?.let { settled(it, message.rows, now) }.orEmpty()
            is Features -> addRows(message.start, message.rows)
            is Resync -> follow(verifier.resync(now), now)
            is Error -> follow(verifier.refuse(message, now), now)
            is Opened, is Welcome -> emptyList()
        }
    }

    /** Take a tree (the answer to [DraftTree]) or a chain (to [DraftChain]), drafted in [seconds]. */
    fun treeReady(draft: Draft, version: Int, now: Double, seconds: Double = 0.0): List<Action> {
        val arm = if (job.done() == Writer.UNDERSTUDY) Arm.CHAIN else Arm.TREE
        tuning.drafted(arm, draft, seconds, version == job.version)
        stats.drafted(arm, draft)
        if (version == job.version) job.ready = arm to tuning.worthSending(arm, draft)
        return next(now)
    }

    /** Take what was drafted below the first [base] tokens, in [seconds] (the answer to [Compare]). */
    fun treeCompared(draft: Draft, base: Int, seconds: Double): List<Action> =
        emptyList<Action>().also { tuning.compared(draft, base, seconds) }

    /** Take an offline token and its probability [sure] (the answer to [WriteToken]). */
    fun tokenWritten(token: Int, sure: Double, version: Int, now: Double): List<Action> {
        val writer = job.done() ?: Writer.DRAFTER
        if (cancelled(version) || !offline.mayWrite(provisional.size)) return next(now)
        text.provide(token, writer)
        job.cancel()
        val pause = if (offline.wrote(token, sure, writer)) emptyList() else listOf(pauseFor(PauseReason.UNSURE))
        return listOf(Provide(token, writer)) + pause + next(now)
    }

    /** Take the result of [ReadText]: withdraw tokens that the understudy would not have written. */
    fun textRead(agreed: Int?, now: Double): List<Action> {
        if (finished != null) return emptyList()
        val keep = offline.hasRead(agreed, committed, provisional)
            ?: return offline.readAlong(committed) + next(now)
        job.cancel()
        val rest = offline.readOn(committed, provisional, keep)
        return (if (rest == null) text.withdrawProvisional(keep) else listOf(rest)) + next(now)
    }

    /** Note that the understudy is unusable: [why], in words for people. The drafter writes on. */
    fun understudyFailed(why: String, now: Double): List<Action> {
        offline.understudyFailed()
        tuning.understudyFailed()
        if (job.busy == Writer.UNDERSTUDY) job.done()
        val told = if (offline.active && finished == null) listOf(HandOver(Writer.DRAFTER, why)) else emptyList()
        return told + next(now)
    }

    /** Set whether the device's writers can obey the answer's constraint. */
    fun setObeys(obeys: Boolean, now: Double): List<Action> {
        if (finished != null || offline.supported == obeys) return emptyList()
        offline.changeSupported(obeys)
        job.cancel()
        return next(now)
    }

    /** When to call [tick], or null. */
    fun wakeAt(): Double? = deadlines().minOfOrNull { (_, moment) -> moment }

    /** Time passed: act on the first deadline that has passed. */
    fun tick(now: Double): List<Action> {
        val (deadline, due) = deadlines().firstOrNull { (_, moment) -> now >= moment } ?: return emptyList()
        return when (deadline) {
            Deadline.CONNECT, Deadline.REPLY -> goOffline(due, now)
            Deadline.GIVE_UP -> unanswered()
            Deadline.RETRY -> open(now)
            Deadline.RENEW -> listOf(Reconnect).also { verifier.heard = now }
        }
    }

    /** Switch to trees or chains, or let the target stream. */
    fun changeArm(arm: Arm, now: Double): List<Action> {
        if (arm == this.arm || finished != null) return emptyList()
        this.arm = arm
        job.discard()
        // a stream ends by CANCEL; OPEN tells how much of it arrived
        return if (verifier.streams) verifier.cancel() + open(now) else next(now)
    }

    /** Stop writing offline until [proceed]: the battery is low, or the user asked for it. */
    fun pause(now: Double): List<Action> {
        if (finished != null || offline.paused == PauseReason.ASKED) return emptyList()
        return listOf(pauseFor(PauseReason.ASKED)) + next(now)
    }

    /** Allow writing offline again, as the policy says. */
    fun proceed(now: Double): List<Action> {
        if (finished != null || offline.paused == null) return emptyList()
        offline.proceed()
        return next(now)
    }

    /** End the answer, which was cancelled or has failed. */
    fun cancel(reason: FinishReason = FinishReason.CANCELLED): List<Action> =
        if (finished != null) emptyList() else finish(reason)

    /** End the answer at a stop string, [surplus] committed tokens ago; even if they ended the answer themselves. */
    fun stop(surplus: Int): List<Action> {
        text.withdraw(surplus)
        return text.withdrawProvisional() + finish(FinishReason.STOP)
    }

    // --- what to do next ---

    /**
     * Decide what to do next; nothing else does. The order: catch up with offline text; let the device write, if it
     * writes first; let the target stream; send the tree that is ready; ask for the first token, which waits for no
     * tree; write on while the target is silent; have a tree drafted.
     */
    private fun next(now: Double): List<Action> {
        if (finished != null) return emptyList()
        val canAsk = verifier.canAsk
        val ready = job.ready
        val base = committed.size
        if (canAsk && provisional.isNotEmpty()) return listOf(verifier.catchUp(provisional, base, now)) + write(now)
        if (offline.writesFirst) return write(now)
        if (canAsk && arm == Arm.STREAM) return listOf(verifier.generate(base, text.limit - base, now))
        if (canAsk && ready != null) {
            return listOf(verify(ready, now)) + if (job.busy == null) listOf(DraftAhead(job.version)) else emptyList()
        }
        if (canAsk && verifier.seq == 0L) return listOf(verify(Arm.TREE to Draft(), now))
        if (offline.active) {
            val written = write(now)
            if (written.isNotEmpty() || !canAsk) return written
        }
        val idle = job.busy == null && job.ready == null && verifier.inFlight == null
        return if (idle && arm != Arm.STREAM) draft() else emptyList()
    }

    /** Have a tree drafted, or a chain by the understudy. */
    private fun draft(): List<Action> {
        val tokens = tuning.chain(verifier.nodeLimit, text.room, offline.drafts, alone = !drafter)
        if (tokens > 0) {
            val version = job.take(Writer.UNDERSTUDY)
            return listOf(DraftChain(offline.readToDraft(committed), version, tokens)) + compare()
        }
        val size = tuning.treeSize(verifier.nodeLimit, text.room)
        return listOf(DraftTree(committed.toList(), job.take(Writer.DRAFTER), size))
    }

    private fun verify(ready: Pair<Arm, Draft>, now: Double): Send {
        job.ready = null
        tuning.asked(ready.first, now)
        return verifier.verify(ready.first, ready.second, text.room, committed.size, now)
    }

    /** Request one more provisional token, if one may be written and the answer is not full. */
    private fun write(now: Double): List<Action> {
        if (text.full || !offline.mayWrite(provisional.size)) {
            return if (offline.active) awaitTarget(now) else emptyList()
        }
        val reading = offline.readToWrite(committed, provisional)
        val writer = offline.nextWriter
            ?: return if (offline.coming) reading else listOf(pauseFor(PauseReason.LIMIT)) + awaitTarget(now)
        if (job.busy != null) return reading
        return reading + offline.handOver(writer) + WriteToken(committed + provisional, job.take(writer), writer)
    }

    /** Offline writing has stopped: wait for the target, unless it refused the answer permanently. */
    private fun awaitTarget(now: Double): List<Action> {
        val refused = verifier.refused && offline.paused != PauseReason.ASKED
        return if (refused || !offline.awaitTarget(now)) unanswered() else emptyList()
    }

    private fun deadlines(): List<Pair<Deadline, Double>> =
        if (finished != null) emptyList() else verifier.deadlines(offline.active, offline.giveUpAt)

    // --- what the verifier says ---

    /** OPEN with everything committed; forget whatever was in progress. */
    private fun open(now: Double): List<Action> {
        verifier.forgetRequest()
        val actions = if (policy.onReturn == OnReturn.KEEP) adopt() else emptyList()
        if (text.over) return actions + if (text.ended || committed.size >= ownLimit) complete() else noRoom()
        stats.opens++
        return actions + verifier.open(committed, rowsSeen.leading) + next(now)
    }

    /** Commit the accepted path and the token after it, measure, and choose how to continue. */
    private fun settled(settled: Settled, rows: ByteArray, now: Double): List<Action> {
        val base = committed.size
        val endsAt = base + settled.accepted.size
        tuning.answered(settled, now)
        val fresh = text.within(settled.tokens)
        stats.settled(settled, fresh.size, provisional.isNotEmpty())
        val same = text.agreeing(fresh)
        val keep = policy.onReturn == OnReturn.KEEP && same < minOf(fresh.size, provisional.size)
        val start = endsAt - rows.size / rowShape.bytes // its rows end with that of the last accepted token
        val own = addRows(start, rows, maxOf(0, (if (keep) base + same else endsAt) - start))
        val actions = own + commit(if (keep) fresh.take(same) else fresh) + offline.stop()
        if (keep) return actions + open(now) + choose(now)
        if (text.over || settled.ended) return actions + complete()
        val streams = policy.targetFirst && verifier.inFlight != null
        return actions + (if (streams) compare() else emptyList()) + choose(now) + next(now)
    }

    /** Beside a stream or chains, now and then, have a tree or a chain drafted that is not sent. */
    private fun compare(): List<Action> =
        tuning.comparison(offline.drafts).map { (arm, size) -> Compare(committed.toList(), arm, size) }

    /** Choose the arm from here on. */
    private fun choose(now: Double): List<Action> =
        if (finished != null || !policy.targetFirst) emptyList() else changeArm(tuning.choose(offline.drafts), now)

    /** Take rows of positions [start] and on; of a verdict's, [limit] belong to our text. */
    private fun addRows(start: Int, data: ByteArray, limit: Int = Int.MAX_VALUE) =
        rowsSeen.add(start, data, rowShape, maxContext, limit)

    private fun commit(fresh: List<Int>): List<Action> {
        job.discard()
        val actions = (if (fresh.isEmpty()) emptyList() else verifier.pin()) + text.commit(fresh)
        tuning.committed(committed)
        return actions + offline.readAlong(committed)
    }

    /** Make provisional text part of the answer as it is. */
    private fun adopt(): List<Action> {
        val tokens = text.adopt()
        if (tokens.isEmpty()) return emptyList()
        job.cancel()
        return listOf(Adopt(tokens)) + offline.stop()
    }

    /** Carry out the consequence of a refusal: a permanent one is like silence, but nothing is requested again. */
    private fun follow(refusal: Refusal, now: Double): List<Action> = when (refusal) {
        Refusal.IGNORE -> emptyList()
        Refusal.REOPEN -> open(now)
        Refusal.RETRY, Refusal.FATAL -> goOffline(now, now)
        Refusal.FULL -> noRoom()
    }

    // --- the target is silent, and the end ---

    /** Continue without the silent target. */
    private fun goOffline(due: Double, now: Double): List<Action> {
        verifier.connectBy = null
        if (offline.active) return next(now)
        offline.start()
        job.discard()
        stats.stalls++
        return listOf(Stall(due)) + next(now)
    }

    /** Write nothing more, until the target answers or `proceed` is called. */
    private fun pauseFor(reason: PauseReason): Pause {
        stats.pauses++
        return offline.pause(reason).also { job.cancel() }
    }

    /** Handle a full context: offline text stays. A verifier that has no room for any of the answer refuses it. */
    private fun noRoom(): List<Action> {
        verifier.complaint = "the verifier's context holds ${verifier.context} tokens; this conversation needs more"
        return finish(if (committed.size > prompt.size) FinishReason.LENGTH else FinishReason.REFUSED)
    }

    /** End the answer, which the target has written completely. */
    private fun complete(): List<Action> =
        text.withdrawProvisional() + finish(if (text.ended) FinishReason.STOP else FinishReason.LENGTH)

    /** End the answer without the target; offline text stays. */
    private fun unanswered(): List<Action> =
        finish(if (verifier.refused) FinishReason.REFUSED else text.endAlone ?: FinishReason.UNREACHABLE)

    /** End the answer as it is. */
    private fun finish(reason: FinishReason): List<Action> =
        (verifier.cancel() + Done(reason)).also { finished = reason }
}
