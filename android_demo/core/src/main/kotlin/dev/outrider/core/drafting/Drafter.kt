package dev.outrider.core.drafting

import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.protocol.Noise
import dev.outrider.core.protocol.ROOT
import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.commonPrefix
import dev.outrider.core.protocol.normalise
import kotlin.math.exp
import kotlin.math.ln

/** Cache rows kept free for the expanded nodes of one tree. */
private const val TREE_ROWS = 512

/** Nodes less likely than this are not expanded ahead of a verdict. */
private val AHEAD_FLOOR = ln(0.0005)

/** Most tokens in one step of the engine. */
private const val MAX_WIDTH = 64

/** Steps that are timed when a drafter is opened, and their width. */
private const val TIMED_STEPS = 4
private const val TIMED_WIDTH = 8

/** Tokens of a prompt fed in one step: as fast as more, and attention's temporaries stay small. */
private const val PROMPT_CHUNK = 32

/**
 * nodes: size of the tree sent; depth: levels drafted; breadth: most nodes expanded in one step; gain: accepted tokens
 * that one more step must promise, and each of its nodes a share of them ([Growth.worthExpanding]); 0 drafts until the
 * tree holds the likeliest nodes of all. Raises [IllegalArgumentException] if that cannot be drafted.
 */
internal data class TreeShape(val nodes: Int = 32, val depth: Int = 20, val breadth: Int = 8, val gain: Double = 0.05) {
    init {
        require(minOf(nodes, depth, breadth) >= 1 && nodes <= MAX_NODES) {
            "a tree needs 1..$MAX_NODES nodes and at least one level and one branch, not $this"
        }
        require(breadth <= MAX_WIDTH && depth * breadth <= TREE_ROWS) {
            "breadth must be at most $MAX_WIDTH and depth x breadth at most $TREE_ROWS tokens, not $this"
        }
    }
}

/**
 * A tree, the log probabilities of its nodes' paths, and its cost.
 *
 * steps: engine steps since it was requested. ahead: its root had been expanded ahead, with [kept] nodes below it.
 */
internal data class Draft(
    val tree: TokenTree = TokenTree(),
    val scores: List<Double> = emptyList(),
    val steps: Int = 0,
    val ahead: Boolean = false,
    val kept: Int = 0,
)

/** A token that the drafter wrote, and its probability. */
internal data class Written(val token: Int, val probability: Double)

/**
 * Grows draft trees, and writes single tokens when the link is down. Holds the drafting state of one conversation:
 * self-attention cache and feature rows. Not thread-safe: one thread calls it, in order.
 *
 * A tree grows in batches: the likeliest unexpanded nodes are run together, until no node can join the best ones any
 * more. With sampling, candidates are ranked by log q + g with the verifier's own noise g, so the target's draw is
 * likely to be among them. Ranking can only cost speed: the output is the target's draw.
 *
 * Spare rows of a step run likely continuations, so that many levels need no step of their own ([spareRows]).
 *
 * A tree outlives its verdict. If the text continued along an expanded path, that path's cache rows become the text's,
 * and the nodes below it are the next tree already: growing on while the verdict is awaited is drafting ahead.
 *
 * draftIds: token ids of the LM head's rows. saKvHeads: of self-attention. nullRow `[2, heads, headDim]`, flat: what
 * cross-attention always sees, or null. confidenceTemperature: of the bundle's manifest. rowCost: as [RowCost.value];
 * null: it is learnt from the timing of the engine's steps, so trees depend on time.
 */
internal class Drafter(
    private val engine: Engine,
    private val draftIds: IntArray,
    rowShape: RowShape,
    saKvHeads: Int,
    private val maxContext: Int,
    lookup: Boolean = true,
    nullRow: FloatArray? = null,
    confidenceTemperature: Double = 1.0,
    rowCost: Double? = null,
) {
    private val keys = Cache(maxContext + TREE_ROWS, saKvHeads * rowShape.headDim)
    private val values = Cache(maxContext + TREE_ROWS, saKvHeads * rowShape.headDim)
    private val features = FeatureRows(maxContext, rowShape, nullRow)
    private val lookup = if (lookup) Lookup() else null
    private val candidates = Candidates(draftIds, this.lookup, confidenceTemperature)

    private val rowCost = RowCost(rowCost)

    /** Token -> the likeliest next one when it was last expanded. */
    private val likeliest = HashMap<Int, Int>()

    /** Token ids whose keys and values are in the first cache rows. */
    private val cached = ArrayList<Int>()

    /** The tree below [cached], and the sampling and constraint for which its candidates were ranked. */
    private var growth: Growth? = null
    private var ranked = Sampling()
    private var held: Constraint? = null

    /** Engine steps so far. */
    private var steps = 0

    /** Return the seconds of a step as a tree takes it: the fastest of a few, before any text was read. */
    fun timeStep(): Double {
        val tokens = LongArray(TIMED_WIDTH) { draftIds[it % draftIds.size].toLong() }
        val mask = FloatArray(TIMED_WIDTH * TIMED_WIDTH) { if (it % (TIMED_WIDTH + 1) == 0) 0f else MASKED }
        val wanted = LongArray(TIMED_WIDTH) { it.toLong() }
        return List(TIMED_STEPS) {
            val seen = features.visible()
            val began = System.nanoTime()
            engine.step(
                DraftStep(
                    tokens, LongArray(TIMED_WIDTH), wanted, mask, 0, keys.view(0, 0), values.view(0, 0),
                    seen.count, seen.keys, seen.values,
                ),
            )
            (System.nanoTime() - began) / 1e9
        }.min()
    }

    /** Forget the rows of positions [length] and above, where the text differs now. */
    fun keepRows(length: Int) = features.keep(length)

    /** Keep [text], whose conversation is over, for lookup in later ones; without lookup nothing is kept. */
    fun remember(text: List<Int>) = lookup?.remember(text) ?: likeliest.clear()

    /** Forget this text and earlier conversations: drafts no longer use them. */
    fun forget() {
        growth = null
        likeliest.clear()
        lookup?.forget()
    }

    /**
     * Add feature rows `[n, 2, heads, headDim]`, flat, of the tokens at [positions] `[n]`. Drafts made without any row
     * are discarded: the verifier sends the first ones with an answer's first token.
     */
    fun addRows(positions: IntArray, rows: FloatArray) {
        if (features.none) growth = null
        features.add(positions, rows)
    }

    /**
     * Draw the drafter's own next token after [prefix] with the target's noise, under the biases and penalties of
     * [constraint].
     */
    fun nextToken(prefix: List<Int>, sampling: Sampling, constraint: Constraint? = null): Written {
        val own = advance(prefix)
        val logits = DoubleArray(own.size) { own[it].toDouble() }
        for ((token, amount) in constraint?.amounts(prefix).orEmpty()) {
            candidates.columnOf(token).let { if (it >= 0) logits[it] += amount }
        }
        val high = logits.max()
        val scale = candidates.temperature(sampling)
        val logQ = DoubleArray(logits.size) { (logits[it] - high) / scale }
        normalise(logQ)
        val noise = Noise(sampling.seed, prefix.size)
        val best = logQ.indices.maxBy { if (sampling.greedy) logQ[it] else logQ[it] + noise.gumbel(draftIds[it]) }
        return Written(draftIds[best], exp(logQ[best]))
    }

    /**
     * Draft at most shape.nodes nodes below the last token of [prefix], ranked under the biases and penalties of
     * [constraint].
     *
     * Once [cancelled], asked between steps, the tree so far is returned.
     */
    fun draft(
        prefix: List<Int>,
        sampling: Sampling,
        shape: TreeShape,
        constraint: Constraint? = null,
        cancelled: () -> Boolean = { false },
    ): Draft {
        val depth = minOf(shape.depth, shape.nodes, maxContext - prefix.size)
        if (depth < 1) return Draft()
        lookup?.follow(prefix)
        val before = steps
        val old = reroot(prefix, sampling, constraint)
        val growth = old ?: begin(prefix, sampling, constraint, shape.breadth, depth)
        val kept = old?.slots?.count { it >= 0 } ?: 0
        while (!cancelled()) {
            val worst = growth.worstOfBest(shape.nodes, depth)
            if (widen(growth, shape.breadth, depth, worst, shape.gain) == 0) break
        }
        val (tree, scores) = growth.best(shape.nodes, depth)
        return Draft(tree, scores, steps - before, old != null, kept)
    }

    /**
     * Grow the last tree below and beside the part that was sent, likeliest nodes first; return the nodes expanded.
     *
     * Path probabilities are those of the verdict, so most work goes where it is likeliest to end.
     */
    fun draftAhead(shape: TreeShape, cancelled: () -> Boolean): Int {
        val growth = growth ?: return 0
        val depth = minOf(2 * shape.depth, maxContext - growth.base)
        var done = 0
        while (!cancelled()) {
            done += widen(growth, shape.breadth, depth, AHEAD_FLOOR).also { if (it == 0) return done }
        }
        return done
    }

    /** Return the existing tree below [prefix], or null; the cache keeps what it can. */
    private fun reroot(prefix: List<Int>, sampling: Sampling, constraint: Constraint?): Growth? {
        var growth = growth ?: return null
        val base = cached.size
        if (sampling != ranked || constraint != held) return null
        if (prefix.size < base || prefix.subList(0, base) != cached) return null
        val path = growth.find(prefix.drop(base)).let { nodes -> nodes.takeWhile { growth.slots[it] >= 0 } }
        if (path.isNotEmpty()) {
            val (below, rows) = growth.below(path)
            growth = below
            keys.move(rows, base)
            values.move(rows, base)
            cached += prefix.subList(base, base + path.size)
        }
        this.growth = growth.takeIf { cached.size == prefix.size }
        return this.growth
    }

    /** Begin a tree of the root's children and predicted tokens: a step of [breadth] rows, down to level [depth]. */
    private fun begin(
        prefix: List<Int>, sampling: Sampling, constraint: Constraint?, breadth: Int, depth: Int,
    ): Growth {
        val rows = (prefix.size - kept(prefix) - 1) % PROMPT_CHUNK + 1
        val spare = spareRows(listOf(emptyList()), listOf(0.0), breadth - rows, depth, prefix)
        val logits = advance(prefix, spare)
        ranked = sampling
        held = constraint
        return Growth(prefix.size).also {
            growth = it
            it.used += spare.size
            take(it, listOf(ROOT), spare, logits)
        }
    }

    /** Expand the next nodes; return how many, 0 if there is no room or they do not promise [gain]. */
    private fun widen(growth: Growth, breadth: Int, depth: Int, floor: Double, gain: Double = 0.0): Int {
        val most = minOf(breadth, keys.rows - growth.used)
        val likely = growth.frontier(most, depth, floor)
        val count = growth.worthExpanding(likely, floor, gain)
        growth.putBack(likely.drop(count))
        if (count == 0) return 0
        val frontier = likely.take(count)
        val (paths, scores) = frontier.map(growth::text) to frontier.map { growth.scores[it] }
        val spare = spareRows(paths, scores, most - count, depth, cached)
        return take(growth, frontier, spare, expand(growth, frontier, spare), floor)
    }

    /** Return likely continuations of [text] and these paths that are worth a row of this engine. */
    private fun spareRows(
        paths: List<List<Int>>, scores: List<Double>, most: Int, depth: Int, text: List<Int>,
    ) = spareRows(paths, scores, most, depth, leastScore(rowCost.value)) { predict(text, it) }

    /** Return lookup's guess after [text] and [path], or the likeliest token after the same last token before. */
    private fun predict(text: List<Int>, path: List<Int>): Lookup.Guess? {
        val guess = lookup?.guess(path)
        val seen = likeliest[path.lastOrNull() ?: text.last()]
        return if (seen == null || (guess != null && guess.rate >= SEEN_RATE)) guess else Lookup.Guess(seen, SEEN_RATE)
    }

    /**
     * Add a step's results: the children of the frontier's nodes, then of nodes that spare rows predicted; return the
     * nodes expanded.
     *
     * logits `[frontier + spare, draftVocab]`; the spare rows' keys and values are the last ones of the cache.
     * Predicted nodes of scores up to [floor] are not needed.
     */
    private fun take(
        growth: Growth, frontier: List<Int>, spare: List<SpareRow>, logits: FloatArray,
        floor: Double = Double.NEGATIVE_INFINITY,
    ): Int {
        val first = growth.used - spare.size
        for ((row, node) in frontier.withIndex()) propose(growth, node, logits, row)
        val nodes = ArrayList<Int?>(frontier)
        for ((at, each) in spare.withIndex()) {
            val child = nodes[each.above]?.let { growth.child(it, each.token) }
                ?.takeIf { growth.slots[it] < 0 && growth.scores[it] > floor }
            nodes += child
            if (child == null) continue
            growth.slots[child] = first + at
            propose(growth, child, logits, frontier.size + at)
        }
        return nodes.count { it != null }
    }

    /** Add the best children of [parent]; row [row] of the logits `[n, draftVocab]` belongs to it. */
    private fun propose(growth: Growth, parent: Int, logits: FloatArray, row: Int) {
        val path = growth.text(parent)
        val amounts = held?.amounts(cached + path).orEmpty()
        val children = candidates.best(logits, row, path, growth.base + path.size, ranked, amounts)
        growth.add(parent, children.best.map { it.token }, children.best.map { it.logProb })
        if (children.best.isNotEmpty()) likeliest[path.lastOrNull() ?: cached.last()] = children.likeliest
    }

    /** Run the engine on the frontier nodes and on spare rows; a node sees the text, its ancestors and itself. */
    private fun expand(growth: Growth, frontier: List<Int>, spare: List<SpareRow>): FloatArray {
        val past = growth.used
        val width = past + frontier.size
        growth.used = width + spare.size
        val mask = FloatArray(frontier.size * width) { if (it % width < growth.base) 0f else MASKED }
        for ((row, node) in frontier.withIndex()) {
            growth.slots[node] = past + row
            for (seen in growth.path(node)) mask[row * width + growth.slots[seen]] = 0f
        }
        val tokens = LongArray(frontier.size) { growth.tokens[frontier[it]].toLong() }
        val positions = LongArray(frontier.size) { growth.base - 1L + growth.depths[frontier[it]] }
        val rows = StepRows(tokens, positions, mask).withSpareRows(frontier.size, spare)
        return step(rows, LongArray(rows.tokens.size) { it.toLong() }, past)
    }

    /**
     * Bring the cache to [prefix]; return the logits `[1 + spare, draftVocab]` after its last token and [spare] rows,
     * whose keys and values follow the text's. Discards the tree.
     */
    private fun advance(prefix: List<Int>, spare: List<SpareRow> = emptyList()): FloatArray {
        growth = null
        val kept = kept(prefix)
        cached.subList(kept, cached.size).clear()
        var logits = FloatArray(0)
        for (start in kept until prefix.size step PROMPT_CHUNK) {
            val chunk = prefix.subList(start, minOf(start + PROMPT_CHUNK, prefix.size))
            val width = start + chunk.size
            val mask = FloatArray(chunk.size * width) { if (it % width > start + it / width) MASKED else 0f }
            val tokens = LongArray(chunk.size) { chunk[it].toLong() }
            val positions = LongArray(chunk.size) { start.toLong() + it }
            val behind = if (width == prefix.size) spare else emptyList()
            val rows = StepRows(tokens, positions, mask).withSpareRows(1, behind)
            logits = step(rows, LongArray(1 + behind.size) { chunk.size - 1L + it }, start)
            cached += chunk
        }
        return logits
    }

    /** Count the tokens of [prefix] that need not be read again; the last one's logits are always needed. */
    private fun kept(prefix: List<Int>): Int =
        minOf(commonPrefix(cached, prefix), prefix.size - 1)

    /** Run the engine after [past] cache rows; its keys and values are stored right after them. */
    private fun step(rows: StepRows, wanted: LongArray, past: Int): FloatArray {
        steps++
        val seen = features.visible()
        val began = System.nanoTime()
        val result = engine.step(
            DraftStep(
                rows.tokens, rows.positions, wanted, rows.mask, past, keys.view(0, past), values.view(0, past),
                seen.count, seen.keys, seen.values,
            ),
        )
        if (wanted.size == rows.tokens.size) { // while reading a prompt, most of the LM head is skipped
            rowCost.took(wanted.size, (System.nanoTime() - began) / 1e9)
        }
        keys.put(past, result.keys)
        values.put(past, result.values)
        return result.logits
    }
}
