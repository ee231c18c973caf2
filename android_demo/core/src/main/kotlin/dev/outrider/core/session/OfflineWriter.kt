/** Decides who writes while the target is silent: the drafter at once, the understudy once it has read the text. */
package dev.outrider.core.session

import dev.outrider.core.protocol.commonPrefix

/** Tokens over which the writer's confidence is averaged. */
private const val CONFIDENCE_WINDOW = 8

/** Most tokens that the drafter writes offline to finish a sentence. */
private const val SENTENCE_TOKENS = 24

/** New tokens after which an understudy that is kept warm reads on. */
private const val WARM_TOKENS = 64

/** Unread tokens at which it may write already: too few to notice. */
private const val FEW_TOKENS = 8

/** Seconds that an answer waits at its end for a verifier that accepts it, if the last one did not. */
internal const val REFUSED_SECONDS = 10.0

/** The understudy's progress in reading. */
internal enum class Reading {
    /** There is none, or the policy excludes it. */
    ABSENT,

    /** It has nothing to do. */
    IDLE,
    UNDER_WAY,

    /** It has read the text, or nearly all of it, and can write. */
    DONE,

    /** It failed, and is not asked again. */
    BROKEN,
}

/**
 * Decides who writes one answer while the target is silent. drafter: there is one; otherwise only the understudy
 * writes, and it reads along. understudy: there is one. sentenceEnds: tokens that end a sentence or a line. supported:
 * the device's writers can obey the answer's constraint, if it has one. usualWait: seconds to wait for the target once
 * offline writing has stopped.
 */
internal class OfflineWriter(
    private val policy: Policy,
    understudy: Boolean,
    private val sentenceEnds: Set<Int>,
    supported: Boolean,
    private val usualWait: Double,
    private val drafter: Boolean = true,
) {
    private val warm = policy.understudy == UnderstudyUse.WARM || !drafter
    private var wait = usualWait
    private val confidence = ArrayDeque<Double>()
    private var drafted = 0 // tokens that the drafter wrote since the target fell silent
    private var endedSentence = false // with the last of them
    private var urged = false // `proceed` was called

    @Volatile
    private var reading = if (understudy && policy.understudy != UnderstudyUse.OFF) Reading.IDLE else Reading.ABSENT

    @Volatile
    private var read = emptyList<Int>() // the last text that it should read,
    private var base = 0 // ... of which the tokens from here on are the drafter's own
    private var holds = false // the drafter waits for it
    private var writer = Writer.DRAFTER // of the last offline token

    /** The target is silent. */
    @Volatile
    var active = false
        private set
    var supported = supported
        private set

    /** Why offline writing is paused; null if it is not. */
    var paused: PauseReason? = null
        private set

    /** When the wait for the target ends, once offline writing has stopped. */
    var giveUpAt: Double? = null
        private set

    // --- whether ---

    /** The target is never asked. */
    val deviceOnly: Boolean get() = policy.writer == WhoWrites.DEVICE_ONLY

    /** The device may write none of this answer. */
    val silenced: Boolean get() = !supported || policy.writer == WhoWrites.CLOUD_ONLY

    /** Offline writing is paused, whatever happens to the link. */
    val muted: Boolean get() = silenced || paused != null

    /** The device writes without waiting for the target. */
    val writesFirst: Boolean
        get() {
            val can = drafter || reading != Reading.ABSENT && reading != Reading.BROKEN
            return can && (policy.writer == WhoWrites.PREFER_DEVICE || deviceOnly) && !muted
        }

    /** Whether the target may return and roll back what is written now. */
    val mayBeTakenBack: Boolean get() = active && !deviceOnly

    /** Whether another token may follow [provisional] unverified ones. */
    fun mayWrite(provisional: Int): Boolean =
        !muted && (active || policy.writer == WhoWrites.PREFER_DEVICE && provisional < policy.lead)

    /** The drafter has written as much as is useful, or is missing. */
    private val drafterIsDone: Boolean
        get() {
            if (!drafter) return true
            val limited = policy.offline == Offline.SENTENCE && mayBeTakenBack && !urged
            return limited && (endedSentence || drafted >= SENTENCE_TOKENS)
        }

    // --- the target falls silent, and returns ---

    /** The target is silent. */
    fun start() {
        active = true
    }

    /** The target answers, and may have been silent; a pause by `pause` remains. */
    fun stop(): List<Action> {
        if (!active) return emptyList()
        active = false
        giveUpAt = null
        if (paused != PauseReason.ASKED) paused = null
        drafted = 0
        endedSentence = false
        urged = false
        confidence.clear()
        writer = Writer.DRAFTER
        holds = false
        if (reading == Reading.DONE && !warm) reading = Reading.IDLE
        return listOf(Resume)
    }

    /** Wait a limited time for the target, as nothing more can be written. Returns false if it will not come. */
    fun awaitTarget(now: Double): Boolean {
        giveUpAt = giveUpAt ?: (now + if (paused == PauseReason.ASKED) usualWait else wait)
        return !deviceOnly || muted && paused != PauseReason.LIMIT
    }

    /** From now on wait no longer than [seconds] for the target. */
    fun expectReturn(seconds: Double, now: Double) {
        wait = minOf(seconds, usualWait)
        if (paused != PauseReason.ASKED) giveUpAt = giveUpAt?.let { minOf(it, now + wait) }
    }

    /** Note that a verifier accepts this answer: if it falls silent, wait for it as long as usual. */
    fun accepted() {
        wait = usualWait
    }

    /** Write nothing more, until the target answers or `proceed` is called. */
    fun pause(reason: PauseReason): Pause {
        paused = reason
        return Pause(reason)
    }

    /** Lift a pause. */
    fun proceed() {
        paused = null
        urged = true
        giveUpAt = null
        confidence.clear()
    }

    /** Set whether the device's writers can obey the answer's constraint. */
    fun changeSupported(supported: Boolean) {
        this.supported = supported
        if (supported && paused == null) giveUpAt = null
    }

    // --- who ---

    /** The understudy will write, but cannot yet. */
    val coming: Boolean get() = reading == Reading.IDLE || reading == Reading.UNDER_WAY

    /** The understudy has read along, and can draft for the target. */
    val drafts: Boolean get() = warm && reading == Reading.DONE

    /** The writer of the next token; null: the drafter has written enough, or waits while the understudy reads. */
    val nextWriter: Writer?
        get() = when {
            reading == Reading.DONE -> Writer.UNDERSTUDY
            (active || !drafter) && (drafterIsDone || coming && (deviceOnly || holds)) -> null
            else -> Writer.DRAFTER
        }

    /** Let [writer] write the next token. */
    fun handOver(writer: Writer): List<Action> {
        if (writer == this.writer) return emptyList()
        this.writer = writer
        confidence.clear()
        return listOf(HandOver(writer))
    }

    /**
     * Note that [writer] wrote [token] with probability [sure]. Returns whether to continue: not if the policy wants a
     * pause, as the last tokens were improbable. An understudy that will soon write may be surer.
     */
    fun wrote(token: Int, sure: Double, writer: Writer): Boolean {
        confidence.addLast(sure)
        if (confidence.size > CONFIDENCE_WINDOW) confidence.removeFirst()
        if (active && writer == Writer.DRAFTER) {
            drafted++
            endedSentence = token in sentenceEnds
        }
        val unsure = confidence.size == CONFIDENCE_WINDOW && confidence.average() < policy.minConfidence
        return !unsure || policy.offline != Offline.PAUSE || coming
    }

    // --- the understudy reads ---

    /** Return a request to read before the understudy writes. A drafter's first token comes before that work. */
    fun readToWrite(committed: List<Int>, provisional: List<Int>): List<Action> {
        if (!active) return emptyList()
        val text = committed + provisional
        val unread = text.size - commonPrefix(read, text)
        // the drafter writes the first token if too little is read
        if (provisional.isEmpty() && reading == Reading.DONE && unread > FEW_TOKENS) gaveUp()
        val begun = provisional.isNotEmpty() || deviceOnly || !drafter
        return if (reading == Reading.IDLE && begun) listOf(ask(text, committed.size)) else emptyList()
    }

    /** Return the committed text, which the understudy reads as it drafts, so that it need not be requested. */
    fun readToDraft(committed: List<Int>): List<Int> = committed.toList().also { read = it }

    /** Return a request to read new committed text, if the understudy is kept warm and there is enough. */
    fun readAlong(committed: List<Int>): List<Action> {
        val idle = reading == Reading.IDLE || reading == Reading.DONE
        val enough = committed.size - read.size >= if (read.isEmpty()) 1 else WARM_TOKENS
        return if (warm && idle && enough) listOf(ask(committed.toList(), committed.size)) else emptyList()
    }

    /** Whether the understudy is reading for [action], and that is still useful. From any thread. */
    fun stillReads(action: ReadText): Boolean =
        reading == Reading.UNDER_WAY && read === action.prefix && (active || warm)

    /**
     * Note that the understudy has read the text, or has cancelled that (null); [agreed]: see [ReadText].
     *
     * Returns how many of the provisional tokens to keep, as it would have written them itself; null to keep all, or if
     * nothing follows. The others are withdrawn, unless they must be read first ([readOn]).
     */
    fun hasRead(agreed: Int?, committed: List<Int>, provisional: List<Int>): Int? {
        val text = committed + provisional
        if (agreed == null || text.take(read.size) != read || !(active || warm)) {
            gaveUp()
            return null
        }
        reading = Reading.DONE
        val judged = maxOf(base + agreed, committed.size)
        return if (active && judged < text.size) judged - committed.size else null
    }

    /** If it agreed with all it read: a request to read the drafter's text since then, while the drafter waits. */
    fun readOn(committed: List<Int>, provisional: List<Int>, keep: Int): ReadText? {
        val judged = committed.size + keep
        return if (judged < read.size) null else ask(committed + provisional, judged, holds = true)
    }

    /** Stop using the understudy, as it failed. */
    fun understudyFailed() {
        reading = Reading.BROKEN
        writer = Writer.DRAFTER
    }

    private fun ask(text: List<Int>, base: Int, holds: Boolean = false): ReadText {
        read = text
        reading = Reading.UNDER_WAY
        this.base = base
        this.holds = holds
        return ReadText(text, base)
    }

    /** Forget what the understudy has read. */
    private fun gaveUp() {
        reading = Reading.IDLE
        read = emptyList()
    }
}
