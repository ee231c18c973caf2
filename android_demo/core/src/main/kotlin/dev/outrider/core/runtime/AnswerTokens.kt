package dev.outrider.core.runtime

/** This many tokens in a row that stand in the answer already are a loop. */
private const val LOOP = 24

/** Figures of one session. */
class SessionStats {
    /** Tree rounds with a verdict, catch-up rounds not counted; draft tokens accepted and nodes sent in these. */
    var rounds = 0
    var accepted = 0
    var nodes = 0
    var catchUpRounds = 0

    /** Tokens that the target wrote alone. */
    var streamed = 0

    /** Tokens written alone; of these verified later, rolled back, or kept unverified. */
    var provisional = 0
    var kept = 0
    var rolledBack = 0
    var adopted = 0
    var stalls = 0
    var pauses = 0
    var opens = 0

    /** VERIFY and GENERATE sent. */
    var calls = 0

    /** Between VERIFY and its verdict, rounds of drafted trees only; and of that, the verifier's engine. */
    var waitSeconds = 0.0
    var engineSeconds = 0.0

    /** Trees whose root could have been expanded ahead, whose root had been, and nodes expanded below such roots. */
    var aheadRounds = 0
    var aheadHits = 0
    var aheadUsed = 0

    /** A verdict brought [fresh] tokens. nodes: of the tree; null: a stream's. */
    internal fun count(nodes: Int?, fresh: Int, catchingUp: Boolean) {
        if (nodes == null) {
            streamed += fresh
        } else if (catchingUp) {
            catchUpRounds++
        } else {
            rounds++
            accepted += fresh - 1
            this.nodes += nodes
        }
    }
}

/**
 * The tokens of one answer: `committed` ones were drawn by the target (or are the prompt), `provisional` ones behind
 * them were written by the drafter alone. limit: tokens at most, prompt included.
 */
internal class AnswerTokens(
    private val prompt: List<Int>,
    var limit: Int,
    private val eosIds: Set<Int>,
    private val stats: SessionStats,
) {
    val committed = prompt.toMutableList()
    var provisional = emptyList<Int>()
        private set

    /** Spans of `committed` that the target did not produce. */
    var adopted = emptyList<Pair<Int, Int>>()
        private set

    /** A stop string came in the provisional text. */
    var enough = false

    /** What the user sees: the answer's verified and provisional tokens. */
    val answer: List<Int> get() = committed.drop(prompt.size) + provisional

    /** Levels that a tree may have; the bonus token takes the last place. */
    val room: Int get() = limit - committed.size - 1

    /** The target ended the answer. */
    val ended: Boolean get() = committed.last() in eosIds && committed.size > prompt.size

    val over: Boolean get() = ended || committed.size >= limit

    /** The text, provisional part included, is at its end; or the drafter only repeats itself. */
    val full: Boolean
        get() = enough || provisional.lastOrNull() in eosIds || committed.size + provisional.size >= limit || looping

    /** What of [fresh], the target's next tokens, belongs to the answer. */
    fun within(fresh: List<Int>): List<Int> {
        val end = fresh.indexOfFirst { it in eosIds }.let { if (it < 0) fresh.size else it + 1 }
        return fresh.take(minOf(end, limit - committed.size))
    }

    fun all(): List<Int> = committed + provisional

    fun restore(record: AnswerRecord) {
        committed += record.committed
        provisional = record.provisional
        adopted = record.adopted
    }

    fun provide(token: Int) {
        provisional = provisional + token
        stats.provisional++
    }

    /** The last [LOOP] tokens were written alone and stand in the answer already. */
    private val looping: Boolean
        get() {
            val tail = provisional.takeLast(LOOP)
            if (tail.size < LOOP) return false
            val all = answer
            return (0 until all.size - LOOP).any { all.subList(it, it + LOOP) == tail }
        }

    /** How many of [fresh] stand in the provisional text already. */
    fun agreeing(fresh: List<Int>): Int = fresh.zip(provisional).takeWhile { (one, other) -> one == other }.size

    /** [fresh] are the target's: what agrees is confirmed, and at the first difference the rest is rolled back. */
    fun commit(fresh: List<Int>): List<Action> = buildList {
        val same = agreeing(fresh)
        var rest = provisional.drop(same)
        if (same < fresh.size) {
            if (rest.isNotEmpty()) {
                stats.rolledBack += rest.size
                add(RollBack(rest))
            }
            rest = emptyList()
            enough = false
        }
        provisional = rest
        committed += fresh
        stats.kept += same
        if (fresh.isNotEmpty()) add(Commit(fresh, same))
    }

    /** Provisional text becomes part of the answer as it is. */
    fun adopt(): List<Int> {
        val tokens = provisional
        provisional = emptyList()
        if (tokens.isNotEmpty()) {
            adopted = adopted + (committed.size to committed.size + tokens.size)
            committed += tokens
            stats.adopted += tokens.size
        }
        return tokens
    }

    /** Takes the last [surplus] committed tokens back, adopted ones among them. */
    fun withdraw(surplus: Int) {
        repeat(surplus) { committed.removeAt(committed.lastIndex) }
        val end = committed.size
        adopted = adopted.filter { it.first < end }.map { (first, last) -> first to minOf(last, end) }
        val withdrawn = stats.adopted - adopted.sumOf { (first, last) -> last - first }
        stats.adopted -= withdrawn
        stats.rolledBack += withdrawn
    }

    /** Withdraws the provisional tokens and returns them. */
    fun rollBack(): List<Int> = provisional.also {
        stats.rolledBack += it.size
        provisional = emptyList()
    }
}
