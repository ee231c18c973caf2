package dev.outrider.core.drafting

import kotlin.math.exp
import kotlin.math.ln

/**
 * Lookup: guess the token that followed the same few tokens earlier in the text, or in an earlier one.
 *
 * It predicts copied names, quoted passages and repeated lines cheaply, at any distance and outside the draft
 * vocabulary; also an answer that is asked for again, or a form that this user's answers keep to. The drafter
 * influences how likely such a guess is; like any candidate it can only cost speed.
 *
 * An index of the runs of [LENGTHS] in a text that mostly grows at its end, and of those in earlier texts. memory: runs
 * of earlier texts that are kept, latest first.
 */
internal class Lookup(private val memory: Int = MEMORY) {
    private var text = emptyList<Int>()

    /** Run of tokens -> the token that last followed it. */
    private val next = HashMap<List<Int>, Int>()

    /** The same for earlier texts, in the order they were last seen. */
    private val earlier = LinkedHashMap<List<Int>, Int>()

    /** Bring the index to [text]; costs only the new part, or everything if the old text is not its beginning. */
    fun follow(text: List<Int>) {
        if (text.size < this.text.size || text.subList(0, this.text.size) != this.text) {
            this.text = emptyList()
            next.clear()
        }
        for (end in this.text.size until text.size) {
            for (length in LENGTHS) {
                if (length <= end) next[text.subList(end - length, end).toList()] = text[end]
            }
        }
        this.text = text.toList()
    }

    /** Keep the runs of a finished text, and forget the oldest ones of others beyond the limit. */
    fun remember(text: List<Int>) {
        for (end in text.indices) {
            for (length in EARLIER_LENGTHS) {
                if (length > end) continue
                val run = text.subList(end - length, end).toList()
                earlier.remove(run) // to the end of the order
                earlier[run] = text[end]
            }
        }
        val oldest = earlier.keys.iterator()
        while (earlier.size > memory) {
            oldest.next()
            oldest.remove()
        }
    }

    /** Forget the text and all earlier ones. */
    fun forget() {
        text = emptyList()
        next.clear()
        earlier.clear()
    }

    /** Return the guess after the text and [path] with the highest rate; or null. */
    fun guess(path: List<Int>): Guess? {
        val own = ownGuess((text.takeLast(LONGEST) + path).takeLast(LONGEST))
        if (earlier.isEmpty()) return own
        val longest = EARLIER_LENGTHS.last()
        val tail = (text.takeLast(longest) + path).takeLast(longest)
        for (at in EARLIER_LENGTHS.indices.reversed()) {
            if (own != null && own.rate >= EARLIER_RATES[at]) break
            if (EARLIER_LENGTHS[at] > tail.size) continue
            earlier[tail.takeLast(EARLIER_LENGTHS[at])]?.let { return Guess(it, EARLIER_RATES[at]) }
        }
        return own
    }

    private fun ownGuess(tail: List<Int>): Guess? {
        for (at in LENGTHS.indices.reversed()) {
            if (LENGTHS[at] > tail.size) continue
            next[tail.takeLast(LENGTHS[at])]?.let { return Guess(it, HIT_RATES[at]) }
        }
        return null
    }

    /** A possible next token. rate: how often such a guess is right. */
    data class Guess(val token: Int, val rate: Double) {
        /**
         * Return the probability that the token comes next, if the drafter gives it [q]; null: unknown to it.
         *
         * It is the mean of two rules. For text like the drafter's training data, drafter and match are independent
         * witnesses, whose log-odds add up. For other text, the drafter's distribution only counts in case the guess is
         * wrong.
         */
        fun probability(q: Double?): Double {
            if (q == null) return rate
            val apart = rate + (1.0 - rate) * q
            val together = 1.0 / (1.0 + exp(-logOdds(rate) - TRUST * logOdds(q.coerceIn(FAINTEST, SUREST))))
            return minOf(SUREST, 0.5 * (apart + together))
        }

        private fun logOdds(p: Double) = ln(p / (1.0 - p))
    }

    companion object {
        /** Weight of the drafter's log-odds of a guess beside those of its hit rate, on text like its training data. */
        private const val TRUST = 0.75

        /** Bounds of a drafter's probability of a guess before its log-odds are taken. */
        private const val FAINTEST = 1e-9
        const val SUREST = 1.0 - 1e-6

        /**
         * Lengths of runs, and the share of positions where the guess after a run of that length, the longest one
         * found, was the target's token, measured on 700 of the default target's training answers.
         */
        private val LENGTHS = intArrayOf(1, 2, 3, 4, 5, 6, 16, 32)
        private val HIT_RATES = doubleArrayOf(0.21, 0.50, 0.57, 0.67, 0.72, 0.82, 0.93, 0.985)
        private val LONGEST = LENGTHS.last()

        /**
         * Lengths of runs in earlier texts, and their rates if the text itself has no guess as sure: on 600 of these
         * answers, each after those before it.
         */
        private val EARLIER_LENGTHS = intArrayOf(4, 8, 16, 32)
        private val EARLIER_RATES = doubleArrayOf(0.32, 0.63, 0.70, 0.985)

        /** 8,192 tokens have this many runs. */
        private const val MEMORY = 4 * 8192
    }
}
