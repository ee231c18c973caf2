package dev.outrider.engines

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import dev.outrider.core.targets.TargetShape
import java.io.Closeable
import java.nio.Buffer
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.DoubleBuffer
import java.nio.FloatBuffer
import java.nio.LongBuffer

/** Rows in a block of the pool; within a block, rows of one head are contiguous. */
private const val POOL_BLOCK = 64

/** An input of a graph, row-major. data: a [LongBuffer], [FloatBuffer] or [DoubleBuffer]. */
internal class Input(val data: Buffer, val shape: LongArray)

/** A step's inputs beside the pool, by name; [blocks]: the part of the pool that it reads and writes. */
internal class Feed(val blocks: Int, val inputs: Map<String, Input>)

/** The inputs of a target graph for one text that begins at the pool's first row (`outrider_core/targets/batch.py`). */
internal class TargetFeeds(private val shape: TargetShape) {
    private val group = shape.heads / shape.kvHeads

    /** Return the inputs for [tokens] after [past] positions; the step returns logits of the last [wanted] of them. */
    fun of(past: Int, tokens: List<Int>, wanted: Int): Feed {
        val count = tokens.size
        val blocks = (past + count + POOL_BLOCK - 1) / POOL_BLOCK
        fun longs(vararg shape: Int, value: (Int) -> Int) =
            Input(LongBuffer.wrap(LongArray(shape.product()) { value(it).toLong() }), shape.longs())
        val inputs = mapOf(
            "ids" to longs(count) { tokens[it] },
            "positions" to longs(1, count) { past + it },
            "wanted" to longs(wanted) { count - wanted + it },
            "mask" to mask(past, count, blocks, Int.MAX_VALUE),
            "slots" to longs(1, shape.kvHeads, count, 3) {
                val row = past + it / 3 % count
                when (it % 3) {
                    0 -> row / POOL_BLOCK
                    1 -> it / (3 * count)
                    else -> row % POOL_BLOCK
                }
            },
            // as there is only one text, every block gets all queries, and all sums belong to it
            "queries" to longs(1, shape.kvHeads, group * count) { it },
            "part_of_block" to longs(1) { 0 },
            "blocks_of_part" to longs(1, blocks) { it },
            "answers" to longs(count, shape.heads) { it % shape.heads * count + it / shape.heads },
            "shares_of_blocks" to
                Input(DoubleBuffer.wrap(DoubleArray(blocks) { 1.0 }), longArrayOf(1, blocks.toLong())),
        )
        val windows =
            if (shape.window == 0) emptyMap() else mapOf("window_mask" to mask(past, count, blocks, shape.window))
        return Feed(blocks, inputs + windows)
    }

    /** 0 for the last [window] tokens up to the query's own, else -inf: `[blocks, 1, group * count, POOL_BLOCK]`. */
    private fun mask(past: Int, count: Int, blocks: Int, window: Int): Input {
        val size = intArrayOf(blocks, 1, group * count, POOL_BLOCK)
        val mask = FloatArray(size.product()) {
            val key = it / (group * count * POOL_BLOCK) * POOL_BLOCK + it % POOL_BLOCK
            val query = past + it / POOL_BLOCK % count
            if (key <= query && query - key < window) 0f else Float.NEGATIVE_INFINITY
        }
        return Input(FloatBuffer.wrap(mask), size.longs())
    }
}

/**
 * Keys and values of one text, `[blocks, kvHeads, POOL_BLOCK, headDim]` for each layer, which the graph writes in
 * place. Its memory grows by doubling.
 */
internal class TargetPool(private val shape: TargetShape, private val environment: OrtEnvironment) : Closeable {
    private val names = (0 until shape.layers).flatMap { listOf("keys_$it", "values_$it") }
    private val blockValues = shape.kvHeads * POOL_BLOCK * shape.headDim
    private var memory = emptyMap<String, FloatBuffer>()
    private var held = 0 // blocks in `memory`
    private var bound = emptyMap<String, OnnxTensor>()
    private var boundBlocks = 0

    /** Return the first [blocks] of every layer, by the graph's names; the pool still owns them. */
    fun of(blocks: Int): Map<String, OnnxTensor> {
        if (blocks == boundBlocks) return bound
        close()
        if (blocks > held) grow(maxOf(blocks, 2 * held))
        val size = longArrayOf(blocks.toLong(), shape.kvHeads.toLong(), POOL_BLOCK.toLong(), shape.headDim.toLong())
        bound = memory.mapValues { (_, all) -> OnnxTensor.createTensor(environment, all.first(blocks), size) }
        boundBlocks = blocks
        return bound
    }

    override fun close() {
        for (tensor in bound.values) tensor.close()
        bound = emptyMap()
        boundBlocks = 0
    }

    private fun grow(blocks: Int) {
        val grown = HashMap<String, FloatBuffer>()
        for (name in names) {
            val bytes = ByteBuffer.allocateDirect(4 * blocks * blockValues).order(ByteOrder.nativeOrder())
            grown[name] = bytes.asFloatBuffer()
            memory[name]?.let { grown.getValue(name).duplicate().put(it.duplicate()) }
        }
        memory = grown
        held = blocks
    }

    private fun FloatBuffer.first(blocks: Int): FloatBuffer =
        duplicate().also { (it as Buffer).limit(blocks * blockValues) }.slice()
}

private fun IntArray.product() = fold(1) { product, size -> product * size }

private fun IntArray.longs() = LongArray(size) { this[it].toLong() }
