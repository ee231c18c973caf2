package dev.outrider.core.session

/** Tokens over which a writer's confidence is averaged. */
private const val CONFIDENCE_WINDOW = 8

/** Tokens that the drafter writes alone to finish a sentence, at most. */
private const val SENTENCE_TOKENS = 24

/** What [policy] allows to be written without the target. sentenceEnds: tokens that end a sentence or a line. */
internal class Solo(private val policy: Policy, private val sentenceEnds: Set<Int> = emptySet()) {
    private val confidence = ArrayDeque<Double>()
    private var drafted = 0 // tokens that the drafter wrote since the target fell silent
    private var endedSentence = false // by the last of them
    private var urged = false // somebody asked to go on

    /** The target is silent. */
    @Volatile
    var alone = false
    var paused: PauseReason? = null

    /** The device's writers can be held to the answer's constraint, if it has one. */
    var obeys = true

    /** The device writes without waiting for the target. */
    val writesFirst: Boolean
        get() = policy.writer.let { it == WhoWrites.PREFER_DEVICE || it == WhoWrites.DEVICE_ONLY } && !mute

    /** Nothing is written alone, whatever happens to the link. */
    val mute: Boolean get() = paused != null || !obeys || policy.writer == WhoWrites.CLOUD_ONLY

    /** What is written now may be taken back, as the target may return. */
    val mayBeTakenBack: Boolean get() = alone && policy.writer != WhoWrites.DEVICE_ONLY

    /** Whether another token may follow [provisional] unverified ones. */
    fun mayWrite(provisional: Int): Boolean = when {
        mute -> false
        policy.writer == WhoWrites.PREFER_DEVICE && !alone -> provisional < policy.lead
        else -> alone
    }

    /** The drafter has written as much alone as anybody wants to read. */
    val drafterIsDone: Boolean
        get() {
            val limited = policy.offline == Offline.SENTENCE && mayBeTakenBack && !urged
            return limited && (endedSentence || drafted >= SENTENCE_TOKENS)
        }

    /** [writer] wrote [token], to which it gives the probability [sure]. */
    fun wrote(token: Int, sure: Double, writer: Writer) {
        confidence.addLast(sure)
        if (confidence.size > CONFIDENCE_WINDOW) confidence.removeFirst()
        if (alone && writer == Writer.DRAFTER) {
            drafted++
            endedSentence = token in sentenceEnds
        }
    }

    /** Another writes from here on. */
    fun handedOver() = confidence.clear()

    /** The policy wants a pause, as too little probability was given to what was written last. */
    val doubts: Boolean
        get() {
            val unsure = confidence.size == CONFIDENCE_WINDOW && confidence.average() < policy.minConfidence
            return unsure && policy.offline == Offline.PAUSE
        }

    /** Somebody asked to go on. */
    fun proceed() {
        paused = null
        urged = true
        confidence.clear()
    }

    /** The target answers again; a pause that somebody asked for stays. */
    fun targetIsBack() {
        alone = false
        if (paused != PauseReason.ASKED) paused = null
        drafted = 0
        endedSentence = false
        urged = false
        confidence.clear()
    }
}
