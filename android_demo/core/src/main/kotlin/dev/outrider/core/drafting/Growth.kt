package dev.outrider.core.drafting

import dev.outrider.core.protocol.ROOT
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.pathTo
import dev.outrider.core.protocol.renumbered
import java.util.PriorityQueue
import kotlin.math.exp
import kotlin.math.max

/** Probability of a node's likeliest child, roughly. */
private const val BEST_CHILD = 0.65

/** Each node's share of the gain that a step must promise: a further row of a step is not free. */
private const val NODE_SHARE = 0.15

/**
 * A draft tree while it grows: nodes below the text's last token, parents first. An expanded node has been run: its
 * children are known.
 *
 * base: tokens of the text. scores: log-probabilities of the paths to the nodes. slots: the cache row of an expanded
 * node, -1 for the others. used: the next free cache row.
 */
internal class Growth(val base: Int) {
    val tokens = ArrayList<Int>()
    val parents = ArrayList<Int>()
    val depths = ArrayList<Int>()
    val scores = ArrayList<Double>()
    val slots = ArrayList<Int>()
    var used = base

    /** Nodes that are not expanded, the likeliest first, and some that were expanded by another way. */
    private val open = PriorityQueue<Int>(64) { one, other -> compareNodes(one, other) }

    val size: Int get() = tokens.size

    /** Add children of [parent]; [logProbs] are those of the last token of each path alone. */
    fun add(parent: Int, tokens: List<Int>, logProbs: List<Double>) {
        val depth = if (parent == ROOT) 1 else depths[parent] + 1
        val above = if (parent == ROOT) 0.0 else scores[parent]
        for ((token, logProb) in tokens.zip(logProbs)) addNode(token, parent, depth, above + logProb, -1)
    }

    /** Take the [most] likeliest nodes above level [depth] that are not expanded yet and score above [floor]. */
    fun frontier(most: Int, depth: Int, floor: Double): List<Int> {
        val taken = ArrayList<Int>()
        val tooDeep = ArrayList<Int>()
        while (taken.size < most) {
            val node = open.peek()?.takeIf { scores[it] > floor } ?: break
            open.poll()
            if (slots[node] >= 0) continue
            (if (depths[node] < depth) taken else tooDeep) += node
        }
        open += tooDeep
        return taken
    }

    /** Return [nodes] that were not expanded after all. */
    fun putBack(nodes: List<Int>) {
        open += nodes
    }

    /**
     * Return how many nodes of [frontier], likeliest first, promise [gain] accepted tokens, and each its share of it;
     * or 0.
     *
     * A node promises the gain of its likeliest child, which replaces one of score [worst].
     */
    fun worthExpanding(frontier: List<Int>, worst: Double, gain: Double): Int {
        val promised = frontier.map { max(0.0, BEST_CHILD * exp(scores[it]) - exp(worst)) }
        if (frontier.isEmpty() || promised.sum() < gain) return 0
        return max(1, promised.count { it >= NODE_SHARE * gain })
    }

    /** The score to exceed for a place among the [nodes] best down to level [depth]; -inf while there are fewer. */
    fun worstOfBest(nodes: Int, depth: Int): Double {
        val shallow = scores.filterIndexed { node, _ -> depths[node] <= depth }.toDoubleArray()
        return if (shallow.size < nodes) Double.NEGATIVE_INFINITY else nthLargest(shallow, nodes)
    }

    /** Nodes from below the root down to [node]. */
    fun path(node: Int): List<Int> = pathTo(node, parents)

    /** Tokens from below the root down to [node]. */
    fun text(node: Int): List<Int> = path(node).map { tokens[it] }

    /** The child of [parent] that carries [token], or null. */
    fun child(parent: Int, token: Int): Int? =
        (size - 1 downTo parent + 1).firstOrNull { tokens[it] == token && parents[it] == parent }

    /** Return the nodes that carry [wanted] from the root down, up to the first that is missing. */
    fun find(wanted: List<Int>): List<Int> {
        val found = ArrayList<Int>()
        for (token in wanted) {
            val at = found.lastOrNull() ?: ROOT
            found += (at + 1 until size).firstOrNull { tokens[it] == token && parents[it] == at } ?: break
        }
        return found
    }

    /**
     * Return the tree below the last node of [path], its new root, and the cache rows to keep, in new order.
     *
     * The rows of [path] come first, as its tokens now belong to the text. All of [path] must be expanded.
     */
    fun below(path: List<Int>): Pair<Growth, IntArray> {
        val root = path.last()
        val kept = Growth(base + path.size)
        val rows = path.mapTo(ArrayList()) { slots[it] }
        val place = hashMapOf(root to ROOT)
        for (node in root + 1 until size) {
            val parent = place[parents[node]] ?: continue
            place[node] = kept.size
            val slot = if (slots[node] < 0) -1 else base + rows.size
            if (slot >= 0) rows += slots[node]
            kept.addNode(tokens[node], parent, depths[node] - depths[root], scores[node] - scores[root], slot)
        }
        kept.used = base + rows.size
        return kept to rows.toIntArray()
    }

    /**
     * The [nodes] likeliest nodes down to level [depth] and their scores.
     *
     * Best first, so that a verifier that prunes cuts the least likely. Scores fall along a path, so parents are
     * included and precede their children.
     */
    fun best(nodes: Int, depth: Int): Pair<TokenTree, List<Double>> {
        val kept = tokens.indices.filter { depths[it] <= depth }.sortedWith(::compareNodes).take(nodes)
        return TokenTree(kept.map { tokens[it] }, renumbered(kept, parents)) to kept.map { scores[it] }
    }

    private fun addNode(token: Int, parent: Int, depth: Int, score: Double, slot: Int) {
        tokens += token
        parents += parent
        depths += depth
        scores += score
        slots += slot
        if (slot < 0) open += tokens.lastIndex
    }

    /** The likelier node first, then the older. */
    private fun compareNodes(one: Int, other: Int): Int =
        scores[other].compareTo(scores[one]).let { if (it != 0) it else one.compareTo(other) }
}
