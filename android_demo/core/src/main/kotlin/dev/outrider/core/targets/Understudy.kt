package dev.outrider.core.targets

import dev.outrider.core.drafting.EngineError
import dev.outrider.core.drafting.Written
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.EngineApi
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.commonPrefix
import dev.outrider.core.protocol.draw
import dev.outrider.core.protocol.logProbs
import java.io.Closeable
import kotlin.math.exp
import kotlin.math.pow

/** Tokens read in one step, so that reading can be cancelled in between. */
private const val READ_CHUNK = 64

/**
 * DRY: a token that would continue a repetition of `n` tokens loses MULTIPLIER * BASE ^ (n - ALLOWED) of its logit,
 * from n = ALLOWED on, and at most MOST. Ordinary text repeats fewer tokens than that.
 */
private const val DRY_MULTIPLIER = 0.8
private const val DRY_BASE = 1.75
internal const val DRY_ALLOWED = 10
private const val DRY_MOST = 100.0

/** Opens and closes code. */
private const val FENCE = "```"

/**
 * The settings for drawing the tokens of one answer. promptLength: tokens of the text before the answer. constraint:
 * its biases and penalties apply to each draw.
 */
internal data class Decoding(
    val promptLength: Int, val sampling: Sampling = Sampling(), val constraint: Constraint? = null,
)

/** A complete model in memory that keeps what it has read, position by position. One thread calls it. */
@EngineApi
public interface UnderstudyModel : Closeable {
    /**
     * Reads [tokens], at least one, after the first [past] positions; what was held from there on is overwritten.
     *
     * Returns the logits `[vocab]` after each of the last [wanted] of them, at least one.
     */
    public fun step(past: Int, tokens: List<Int>, wanted: Int): List<FloatArray>
}

/**
 * A complete small model with the target's tokenizer, which writes when the target is silent.
 *
 * It draws as the target does, with the same keyed noise, so that a good understudy writes much of what the target
 * would have written. Small models tend to repeat themselves. Tokens that would continue a repetition of the answer are
 * penalised by DRY ("Don't Repeat Yourself", the sampler of that name), but never inside code.
 *
 * decode: text of token ids. present: whether the model is there; it may be fetched later than the bundle. vocab: of
 * the target; if it is smaller than this model's, the logits of higher ids are left out. maxContext: most tokens of a
 * text. barred: ids that it must not write. open: loads the model into memory on first use. Not thread-safe: one thread
 * calls, but for [loaded] and [present].
 */
public class Understudy @EngineApi constructor(
    private val decode: (List<Int>) -> String,
    internal val present: () -> Boolean = { true },
    private val vocab: Int = Int.MAX_VALUE,
    private val maxContext: Int = Int.MAX_VALUE,
    private val barred: List<Int> = emptyList(),
    private val open: () -> UnderstudyModel,
) {
    /** A draft: the last tokens of [text], with their [logProbs]. */
    private class Chain(
        val text: MutableList<Int> = ArrayList(),
        val decoding: Decoding = Decoding(0),
        val logProbs: MutableList<Double> = ArrayList(),
    )

    @Volatile
    private var model: UnderstudyModel? = null
    private val held = ArrayList<Int>() // the tokens that the model has read
    private var logits: FloatArray? = null // after the last of these
    private var chain = Chain()

    /** Tokens that were drafted so far. */
    internal var drafted = 0
        private set

    /** It is in memory. */
    internal val loaded: Boolean get() = model != null

    /** Load it into memory unless it is there. Raises the errors of `open`, mostly [EngineError]. */
    internal fun load() {
        opened()
    }

    /** Free its memory. */
    internal fun unload() {
        model?.close()
        model = null
        held.clear()
        logits = null
        chain = Chain()
    }

    /** Read [text], except what is read already. Returns false if it was [cancelled] before the end. */
    internal fun read(text: List<Int>, cancelled: () -> Boolean = { false }): Boolean {
        if (cancelled()) return false
        opened()
        keep(text)
        while (logits == null || held.size < text.size) {
            if (cancelled()) return false
            val chunk = text.subList(held.size, minOf(text.size, held.size + READ_CHUNK))
            logits = step(held.size, chunk, 1).single()
            held += chunk
        }
        return true
    }

    /**
     * Return how many of the tokens from [base] on it would have written itself, up to the first difference.
     *
     * It has read all of them then, or as many as agree. null: it was [cancelled].
     */
    internal fun agreed(text: List<Int>, base: Int, decoding: Decoding, cancelled: () -> Boolean = { false }): Int? {
        if (!read(text.subList(0, base), cancelled)) return null
        var agreed = base
        while (agreed < text.size) {
            if (cancelled()) return null
            val chunk = text.subList(agreed, minOf(text.size, agreed + READ_CHUNK))
            // the token before is run again: its logits judge the first one
            val rows = step(agreed - 1, listOf(text[agreed - 1]) + chunk, 1 + chunk.size)
            val same = chunk.indices.firstOrNull { row ->
                val before = text.subList(0, agreed + row)
                draw(judged(rows[row], before, decoding), decoding.sampling, before.size) != chunk[row]
            } ?: chunk.size
            held += chunk.subList(0, same)
            logits = rows[same]
            agreed += same
            if (same < chunk.size) break
        }
        return agreed - base
    }

    /** Return its next token after [text], and that token's probability. */
    internal fun nextToken(text: List<Int>, decoding: Decoding): Written {
        read(text)
        val logits = logits!!
        val judged = judged(logits, text, decoding)
        val token = draw(judged, decoding.sampling, text.size)
        val sure = if (decoding.constraint == null) logProbs(logits, Sampling()) else logProbs(judged, Sampling())
        return Written(token, exp(sure[token]))
    }

    /**
     * Return (at most [count] tokens that the target may draw after [text], log-probabilities of the path to each).
     *
     * Drafts are not penalised for repetition. Fewer come once they are [cancelled]. The draft of a text that this one
     * continues is reused.
     */
    internal fun draft(
        text: List<Int>, count: Int, decoding: Decoding, cancelled: () -> Boolean = { false },
    ): Pair<List<Int>, List<Double>> {
        val size = text.size
        val base = chain.text.size - chain.logProbs.size // the draft comes after these
        val behind = size in base..chain.text.size && chain.text.subList(0, size) == text
        if (behind && chain.decoding == decoding) {
            chain.logProbs.subList(0, size - base).clear()
        } else {
            chain = Chain(text.toMutableList(), decoding)
        }
        goOn(count, cancelled)
        val scores = chain.logProbs.take(count).runningReduce { way, token -> way + token }
        return chain.text.drop(size).take(count) to scores
    }

    /** Draft [count] tokens more, until they are [cancelled]. */
    internal fun draftAhead(count: Int, cancelled: () -> Boolean) {
        if (chain.text.isNotEmpty()) goOn(chain.logProbs.size + count, cancelled)
    }

    /** Extend the draft to [count] tokens. */
    private fun goOn(count: Int, cancelled: () -> Boolean) {
        val text = chain.text
        while (chain.logProbs.size < count && text.size < maxContext && read(text, cancelled)) {
            // as at the beginning of an answer: no loop yet
            val judged = judged(logits!!, text, chain.decoding.copy(promptLength = text.size))
            val token = draw(judged, chain.decoding.sampling, text.size)
            chain.logProbs += logProbs(judged, Sampling())[token]
            text += token
            drafted++
        }
    }

    private fun step(past: Int, tokens: List<Int>, wanted: Int): List<FloatArray> =
        opened().step(past, tokens, wanted).map { all ->
            val own = if (all.size > vocab) all.copyOf(vocab) else all
            for (token in barred) if (token < own.size) own[token] = Float.NEGATIVE_INFINITY
            own
        }

    private fun opened(): UnderstudyModel = model ?: open().also { model = it }

    /** Forget what was read beyond the common prefix with [text], whose last token is read again if needed. */
    private fun keep(text: List<Int>) {
        var same = commonPrefix(text, held)
        if (same == held.size && logits != null) return
        same = minOf(same, text.size - 1)
        held.subList(same, held.size).clear()
        logits = null
    }

    /** Return the logits from which the token after [text] is drawn. */
    private fun judged(logits: FloatArray, text: List<Int>, decoding: Decoding): DoubleArray {
        val answer = text.subList(decoding.promptLength, text.size)
        val judged = DoubleArray(logits.size) { logits[it].toDouble() }
        val losses = repetitions(answer)
        val inCode = losses.isNotEmpty() && decode(answer).split(FENCE).size % 2 == 0
        for ((token, length) in if (inCode) emptyMap() else losses) {
            val loss = DRY_MULTIPLIER * DRY_BASE.pow(minOf(length - DRY_ALLOWED, 20))
            judged[token] = (logits[token] - minOf(DRY_MOST, loss).toFloat()).toDouble()
        }
        for ((token, amount) in decoding.constraint?.amounts(text).orEmpty()) {
            if (token < judged.size) judged[token] += amount
        }
        return judged
    }
}

/** Tokens that would continue a repetition of at least [DRY_ALLOWED] tokens, each with the longest one's length. */
internal fun repetitions(answer: List<Int>): Map<Int, Int> {
    val found = HashMap<Int, Int>()
    val ids = answer.toIntArray()
    for (end in DRY_ALLOWED until ids.size) { // the token that followed there
        var length = 0
        while (length < end && ids[end - length - 1] == ids[ids.size - length - 1]) length++
        if (length >= DRY_ALLOWED) found[ids[end]] = maxOf(length, found[ids[end]] ?: 0)
    }
    return found
}
