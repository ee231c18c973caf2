/** Who writes alone: the drafter at once, the understudy as soon as it has read the text. */
package dev.outrider.core.session

/** Tokens of new text after which an understudy that is kept warm reads on. */
private const val WARM_TOKENS = 64

/** Tokens that it may still have to read before it writes the first one alone: nobody notices. */
private const val FEW_TOKENS = 8

/** How far the understudy is. */
internal enum class Reading {
    /** There is none, or the policy wants none. */
    ABSENT,

    /** It has nothing to do. */
    IDLE,
    UNDER_WAY,

    /** It has read the text, or nearly all of it, and can write. */
    DONE,

    /** It failed, and is not asked again. */
    BROKEN,
}

/** What the understudy was asked to read, and whether it may write. present: there is one. */
internal class Handover(present: Boolean, policy: Policy) {
    private val warm = policy.understudy == UnderstudyUse.WARM

    @Volatile
    var reading = if (present && policy.understudy != UnderstudyUse.OFF) Reading.IDLE else Reading.ABSENT
        private set

    /** text, base: of the last [ReadText]; text: of a [DraftChain] behind it too, for which it is read. */
    @Volatile
    var text = emptyList<Int>()
    var base = 0
        private set

    /** The drafter waits for what is read. */
    var holds = false
        private set

    /** Who wrote the last token alone. */
    var writer = Writer.DRAFTER

    /** It will write, but cannot yet. */
    val coming: Boolean get() = reading == Reading.IDLE || reading == Reading.UNDER_WAY

    /** Who writes the next token alone. */
    val nextWriter: Writer get() = if (reading == Reading.DONE) Writer.UNDERSTUDY else Writer.DRAFTER

    /** It has read along, and can draft what the target verifies. */
    val drafts: Boolean get() = warm && reading == Reading.DONE

    /** The committed text, which it reads as it drafts behind it, so that it need not be asked to. */
    fun readToDraft(committed: List<Int>): List<Int> = committed.toList().also { text = it }

    /** Ask for [text] to be read, of which the tokens from [base] on are the drafter's own. */
    fun read(text: List<Int>, base: Int, holds: Boolean = false): ReadText {
        this.text = text
        this.base = base
        this.holds = holds
        reading = Reading.UNDER_WAY
        return ReadText(text, base)
    }

    /** Where it is kept warm, and enough is new in the committed text, ask for that to be read. */
    fun readAlong(committed: List<Int>): List<ReadText> {
        val idle = reading == Reading.IDLE || reading == Reading.DONE
        val enough = committed.size - text.size >= if (text.isEmpty()) 1 else WARM_TOKENS
        return if (warm && idle && enough) listOf(read(committed.toList(), committed.size)) else emptyList()
    }

    /** Whether [action] is what it is reading, and to a purpose. From any thread. */
    fun reads(action: ReadText, alone: Boolean): Boolean =
        reading == Reading.UNDER_WAY && text === action.prefix && (alone || warm)

    /** The first token alone will stand behind [text]; the drafter writes it where too little of that is read. */
    fun begin(text: List<Int>) {
        val read = this.text.zip(text).takeWhile { (one, other) -> one == other }.size
        if (reading == Reading.DONE && text.size - read > FEW_TOKENS) gaveUp()
    }

    /** The text is read. Whether that is how [text] begins, and to a purpose, so that it can write now. */
    fun hasRead(text: List<Int>, alone: Boolean): Boolean {
        val ready = text.take(this.text.size) == this.text && (alone || warm)
        if (ready) reading = Reading.DONE else gaveUp()
        return ready
    }

    /** Nothing is known to be read. */
    fun gaveUp() {
        reading = Reading.IDLE
        text = emptyList()
    }

    /** It will not be asked again. */
    fun failed() {
        reading = Reading.BROKEN
        writer = Writer.DRAFTER
    }

    /** Nobody writes alone any more. */
    fun targetIsBack() {
        writer = Writer.DRAFTER
        holds = false
        if (reading == Reading.DONE && !warm) reading = Reading.IDLE
    }
}
