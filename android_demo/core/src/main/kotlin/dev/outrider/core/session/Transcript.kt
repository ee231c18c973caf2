package dev.outrider.core.session

import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.protocol.commonPrefix

/** This many tokens in a row that occur in the answer already are a loop. */
private const val LOOP = 24

/** Tokens [begin] until [end] of an answer are [writer]'s. */
public data class Span(val begin: Int, val end: Int, val writer: Writer)

/**
 * The tokens of one answer: `committed` ones were drawn by the target (or are the prompt), `provisional` ones after
 * them were written offline. limit: most tokens, prompt included.
 */
internal class Transcript(
    private val prompt: List<Int>,
    var limit: Int,
    private val eosIds: Set<Int>,
    private val stats: SessionStats,
) {
    val committed = prompt.toMutableList()
    var provisional = emptyList<Int>()
        private set

    /** The writer of each of the answer's tokens, provisional ones included. */
    private val writers = ArrayList<Writer>()

    /** Who wrote which part of the answer, in order. */
    val spans: List<Span> get() = spansOf(writers)

    /** A stop string came in the provisional text. */
    var enough = false

    /** The tokens that the user sees: the answer's verified and provisional ones. */
    val answer: List<Int> get() = committed.drop(prompt.size) + provisional

    /** Tokens of the committed answer. */
    private val written: Int get() = committed.size - prompt.size

    /** Levels that a tree may have; the bonus token takes the last place. */
    val room: Int get() = limit - committed.size - 1

    /** The target ended the answer. */
    val ended: Boolean get() = committed.last() in eosIds && committed.size > prompt.size

    val over: Boolean get() = ended || committed.size >= limit

    /** The text, provisional part included, is at its end, or the drafter only repeats itself. */
    val full: Boolean get() = endAlone != null

    /** How the text has ended, provisional part included; null if more may follow. */
    val endAlone: FinishReason?
        get() = when {
            enough || provisional.lastOrNull() in eosIds -> FinishReason.STOP
            committed.size + provisional.size >= limit || looping -> FinishReason.LENGTH
            else -> null
        }

    /** The part of [fresh], the target's next tokens, that belongs to the answer. */
    fun within(fresh: List<Int>): List<Int> {
        val end = fresh.indexOfFirst { it in eosIds }.let { if (it < 0) fresh.size else it + 1 }
        return fresh.take(minOf(end, limit - committed.size))
    }

    fun restore(record: AnswerRecord) {
        committed += record.committed
        provisional = record.provisional
        for (span in record.writers) repeat(span.end - span.begin) { writers += span.writer }
    }

    /** Add [token], which [writer] wrote offline. */
    fun provide(token: Int, writer: Writer) {
        provisional = provisional + token
        writers += writer
        stats.provisional++
        if (writer == Writer.UNDERSTUDY) stats.understudy++
    }

    /** The last [LOOP] tokens were written offline and occur in the answer already. */
    private val looping: Boolean
        get() {
            val tail = provisional.takeLast(LOOP)
            if (tail.size < LOOP) return false
            val all = answer
            return (0 until all.size - LOOP).any { all.subList(it, it + LOOP) == tail }
        }

    /** Count the tokens of [fresh] that agree with the provisional text. */
    fun agreeing(fresh: List<Int>): Int = commonPrefix(fresh, provisional)

    /** Add the target's tokens [fresh]: confirm equal provisional ones, roll the rest back at the first difference. */
    fun commit(fresh: List<Int>): List<Action> = buildList {
        val same = agreeing(fresh)
        if (same < fresh.size) addAll(withdrawProvisional(same))
        val confirmed = writers.subList(written, written + same)
        confirmed.fill(Writer.TARGET)
        repeat(fresh.size - same) { confirmed += Writer.TARGET }
        provisional = provisional.drop(same)
        committed += fresh
        stats.kept += same
        if (fresh.isNotEmpty()) add(Commit(fresh, same))
    }

    /** Make provisional text part of the answer as it is. */
    fun adopt(): List<Int> {
        val tokens = provisional
        provisional = emptyList()
        if (tokens.isNotEmpty()) {
            committed += tokens
            stats.adopted += tokens.size
        }
        return tokens
    }

    /** Withdraw the last [surplus] committed tokens, adopted ones among them. */
    fun withdraw(surplus: Int) {
        val last = writers.subList(written - surplus, written)
        val withdrawn = last.count { it != Writer.TARGET }
        last.clear()
        repeat(surplus) { committed.removeAt(committed.lastIndex) }
        stats.adopted -= withdrawn
        stats.rolledBack += withdrawn
    }

    /** Withdraw all provisional tokens but the first [keep]. */
    fun withdrawProvisional(keep: Int = 0): List<Action> {
        val rest = provisional.drop(keep)
        enough = false
        if (rest.isEmpty()) return emptyList()
        provisional = provisional.take(keep)
        writers.subList(written + keep, writers.size).clear()
        stats.rolledBack += rest.size
        return listOf(RollBack(rest))
    }
}

private fun spansOf(writers: List<Writer>): List<Span> = buildList {
    for ((index, writer) in writers.withIndex()) {
        val last = lastOrNull()
        if (last?.writer == writer) set(lastIndex, last.copy(end = index + 1)) else add(Span(index, index + 1, writer))
    }
}
