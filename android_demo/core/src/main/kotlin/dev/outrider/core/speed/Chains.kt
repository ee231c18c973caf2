/**
 * Chains of tokens that the understudy drafts instead of the drafter's trees: how much they gain, and when to use one.
 *
 * A chain of k tokens, each right with probability a, commits (1 - a^(k+1)) / (1 - a) tokens. While it is verified the
 * understudy continues: if all of it was right, and so was its guess of the target's next token, the next chain is
 * ready at once. Seconds throughout.
 */
package dev.outrider.core.speed

import kotlin.math.pow

/** Tokens of a chain at most, and of the first, by which chains are known. */
internal const val MOST_TOKENS = 16
internal const val FIRST_TOKENS = 4

/** Tokens' worth of the belief that chains begin with, and how likely a token of theirs is taken to be right. */
private const val PRIOR_TOKENS = 4.0
private const val PRIOR_RIGHT = 0.7

/** What an older token still counts after one more. */
private const val FADING = 0.98

/** No token is taken to be surer than this. */
private const val MOST_RIGHT = 0.99

/** Weight of the newest chain in what a token takes. */
private const val SMOOTHING = 0.2

/** Rounds of trees until chains that were not worth it are tried again: doubled each time, at most so many times. */
private const val TRY_AGAIN = 32
private const val DOUBLINGS = 4

/** No round is taken to be shorter, so that rates stay finite. */
private const val LEAST_SECONDS = 1e-4

/** Chains between two trees drafted beside them, for comparison. */
private const val COMPARE_EVERY = 4

/** Smoothed measurements; they outlive answers. */
internal class Chains {
    /** The understudy has read along, and may draft. */
    var ready = false

    /** Tokens that the verifier takes at most. */
    var most = MOST_TOKENS

    /** Seconds that the understudy takes for one; null: it has drafted none yet. */
    private var token: Double? = null
    private var right = PRIOR_TOKENS * PRIOR_RIGHT
    private var judged = PRIOR_TOKENS

    /** Times that they were tried and not worth it, rounds since they were, and chains so far. */
    private var tried = 0
    private var waited = 0
    private var asked = 0

    /** [tokens] were drafted in [seconds]. */
    fun drafted(tokens: Int, seconds: Double) {
        if (tokens == 0) return
        val each = seconds / tokens
        token = token?.let { it + SMOOTHING * (each - it) } ?: each
    }

    /** Of a chain of [tokens], the first [accepted] were right. */
    fun verified(tokens: Int, accepted: Int) {
        for (token in 0 until minOf(tokens, accepted + 1)) {
            judged = 1 + FADING * judged
            right = (if (token < accepted) 1 else 0) + FADING * right
        }
    }

    /**
     * (length of the chain that brings most tokens per second, these); 0, 0 where nothing is known of them.
     *
     * between: a round's time without drafting and the verifier's engine. step: that of a tree of so many nodes.
     */
    fun best(between: Double, step: (Double) -> Double): Pair<Int, Double> {
        val each = token
        if (!ready || most < 2 || each == null) return 0 to 0.0
        val right = minOf(MOST_RIGHT, right / judged)
        var length = 1
        var rate = 0.0
        for (count in 1..minOf(most, MOST_TOKENS)) {
            val allRight = right.pow(count + 1)
            val waiting = between + step(count.toDouble())
            val drafting = count * each
            val seconds = maxOf(LEAST_SECONDS, waiting + drafting - allRight * minOf(waiting, drafting))
            val tokens = (1 - allRight) / (1 - right)
            if (tokens > rate * seconds) {
                length = count
                rate = tokens / seconds
            }
        }
        return length to rate
    }

    /** Whether to try one in place of the next tree, as nothing is known of them, or not of late. */
    fun tryNow(): Boolean {
        if (!ready) return false
        waited++
        val known = token != null
        if (known && waited < TRY_AGAIN * (1 shl minOf(tried, DOUBLINGS))) return false
        if (known) tried++
        waited = 0
        return true
    }

    /** They are worth it at present. */
    fun chosen() {
        tried = 0
        waited = 0
    }

    /** Whether to draft a tree beside the chain that is asked for now. */
    fun compares(): Boolean = ++asked % COMPARE_EVERY == 1
}
