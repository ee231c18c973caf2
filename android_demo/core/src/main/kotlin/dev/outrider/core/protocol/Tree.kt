package dev.outrider.core.protocol

/** The parent of the root's children; 255 on the wire. */
internal const val ROOT = -1

/** A parent is one byte on the wire and 255 means the root. */
internal const val MAX_NODES = 255

/** A list of tokens and parents is not a valid tree. */
internal class TreeError(message: String) : IllegalArgumentException(message)

/**
 * A draft tree: it hangs below the committed sequence's last token, the root, which is implicit.
 *
 * `tokens[i]` is node i's token id, `parents[i]` its parent node or [ROOT]; parents come before their children.
 * Raises [TreeError] on anything else.
 */
internal class TokenTree(val tokens: List<Int> = emptyList(), val parents: List<Int> = emptyList()) {
    /** Levels below the root, from 1. */
    val depths: IntArray = IntArray(tokens.size)

    private val children = HashMap<Long, Int>()

    val size: Int get() = tokens.size

    init {
        if (tokens.size != parents.size) throw TreeError("${tokens.size} tokens but ${parents.size} parents")
        if (tokens.size > MAX_NODES) throw TreeError("${tokens.size} nodes, at most $MAX_NODES")
        for ((node, parent) in parents.withIndex()) {
            if (parent < ROOT || parent >= node) {
                throw TreeError("node $node has parent $parent; parents must come before their children")
            }
            if (children.put(edge(parent, tokens[node]), node) != null) {
                throw TreeError("node $node repeats token ${tokens[node]} under parent $parent")
            }
            depths[node] = if (parent == ROOT) 1 else depths[parent] + 1
        }
    }

    /** The child of [parent] (a node or [ROOT]) that carries [token], or null. */
    fun child(parent: Int, token: Int): Int? = children[edge(parent, token)]

    /** The first [nodes] nodes of at most [depth] levels; parents are included, as they come first. */
    fun pruned(nodes: Int, depth: Int): TokenTree {
        val kept = tokens.indices.filter { depths[it] <= depth }.take(maxOf(0, nodes))
        if (kept.size == size) return this
        return TokenTree(kept.map { tokens[it] }, renumbered(kept, parents))
    }

    /** Nodes from the root's child down to [node]; empty for [ROOT]. */
    fun path(node: Int): List<Int> = pathTo(node, parents)

    /** The path that [tokens], below the root, took through the tree; null while they have not left it. */
    fun foreseen(tokens: List<Int>): List<Int>? {
        val path = mutableListOf<Int>()
        for (token in tokens) path += child(path.lastOrNull() ?: ROOT, token) ?: return path
        return null
    }

    override fun equals(other: Any?) = other is TokenTree && tokens == other.tokens && parents == other.parents

    override fun hashCode() = 31 * tokens.hashCode() + parents.hashCode()

    override fun toString() = "TokenTree(tokens=$tokens, parents=$parents)"

    companion object {
        /** A tree of one path from the root. */
        fun chain(tokens: List<Int>) = TokenTree(tokens.toList(), List(tokens.size) { it - 1 })

        private fun edge(parent: Int, token: Int) = parent.toLong() shl 32 or (token.toLong() and 0xFFFFFFFFL)
    }
}

/** The nodes from below the root down to [node], in order. */
internal fun pathTo(node: Int, parents: List<Int>): List<Int> =
    generateSequence(node) { parents[it] }.takeWhile { it != ROOT }.toList().asReversed()

/** Return the parents of the nodes [kept], renumbered by their order in the list. */
internal fun renumbered(kept: List<Int>, parents: List<Int>): List<Int> {
    val place = kept.withIndex().associate { (index, node) -> node to index } + (ROOT to ROOT)
    return kept.map { place.getValue(parents[it]) }
}
