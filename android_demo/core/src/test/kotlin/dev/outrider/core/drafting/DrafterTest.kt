package dev.outrider.core.drafting

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.ints
import dev.outrider.core.protocol.RowShape
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.TokenTree
import dev.outrider.testing.FakeEngine
import kotlin.math.exp
import kotlin.random.Random
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertNull
import kotlin.test.assertTrue

/** The drafter against the vectors. */
class DrafterTest {
    private val ids = IntArray(5) { 3 + it } // fewer than a step has rows

    /** The same trees bit for bit; probabilities within the tolerance of another exp and log. */
    @Test
    fun draftsTheSameTrees() {
        var drafts = 0
        for ((number, conversation) in Vectors.read("drafter").withIndex()) {
            val setup = conversation.field<Map<*, *>>("setup")
            val drafter = drafterOf(setup)
            val constraint = setup["constraint"]?.let(Vectors::constraint)
            for ((place, step) in conversation.field<List<List<Any?>>>("steps").withIndex()) {
                val where = "conversation $number, step $place: ${step[0]}"
                when (step[0]) {
                    "draft" -> {
                        val draft = drafter.draft(ints(step[1]), Vectors.sampling(step[2]), shape(step[3]), constraint)
                        val wanted = step[4]
                        assertEquals(TokenTree(wanted.ints("tokens"), wanted.ints("parents")), draft.tree, where)
                        close(wanted.field<List<Number>>("scores"), draft.scores, where)
                        assertEquals(wanted.int("steps"), draft.steps, where)
                        assertEquals(wanted.field<Boolean>("ahead"), draft.ahead, where)
                        assertEquals(wanted.int("kept"), draft.kept, where)
                        drafts++
                    }
                    "ahead" -> {
                        var asked = 0
                        val expanded = drafter.draftAhead(shape(step[1])) { asked++ == 3 }
                        assertEquals((step[2] as Long).toInt(), expanded, where)
                    }
                    "rows" -> drafter.addRows(ints(step[1]).toIntArray(), floats(step[2]))
                    "write" -> {
                        val written = drafter.nextToken(ints(step[1]), Vectors.sampling(step[2]), constraint)
                        assertEquals((step[3] as Long).toInt(), written.token, where)
                        assertEquals((step[4] as Number).toDouble(), written.probability, 1e-9, where)
                    }
                    "keep" -> drafter.keepRows((step[1] as Long).toInt())
                    "remember" -> drafter.remember(ints(step[1]))
                    "forget" -> drafter.forget()
                    else -> error(step)
                }
            }
        }
        assertTrue(drafts > 80)
    }

    @Test
    fun learnsTheSameCostOfARow() {
        for (vector in Vectors.read("row_cost")) {
            val learnt = RowCost()
            for (step in vector.field<List<List<Number>>>("steps")) {
                val (rows, seconds, wanted) = step
                learnt.took(rows.toInt(), seconds.toDouble())
                assertEquals(wanted.toDouble(), learnt.value, 1e-12)
            }
        }
    }

    @Test
    fun shapesHaveBounds() {
        for (wrong in listOf(
            { TreeShape(0) }, { TreeShape(256) }, { TreeShape(breadth = 65) }, { TreeShape(8, 100, 8) },
        )) assertFailsWith<IllegalArgumentException> { wrong() }
    }

    @Test
    fun nothingIsDraftedBeyondTheContext() {
        val drafter = Drafter(FakeEngine(intArrayOf(1, 2), 2, 2), intArrayOf(1, 2), RowShape(1, 2), 1, 8)
        assertEquals(TokenTree(), drafter.draft(List(8) { 1 }, Sampling(), TreeShape()).tree)
        assertEquals(1, drafter.draft(List(7) { 1 }, Sampling(), TreeShape(gain = 0.0)).tree.depths.max())
        assertEquals(0, drafter.draftAhead(TreeShape()) { false })
    }

    @Test
    fun aStepIsTimedBeforeAnyTextIsRead() {
        val (timed, untimed) = List(2) { Drafter(FakeEngine(ids, 2, 2), ids, RowShape(1, 2), 1, 40, rowCost = 0.0) }
        assertTrue(timed.timeStep() > 0)
        val (draft, other) = listOf(timed, untimed).map { it.draft(listOf(3, 4), Sampling(), TreeShape()) }
        assertEquals(other, draft)
    }

    @Test
    fun theLargestAreFound() {
        val random = Random(1)
        repeat(200) {
            val values = DoubleArray(random.nextInt(1, 60)) { random.nextInt(20).toDouble() }
            val count = random.nextInt(1, values.size + 1)
            assertEquals(values.sortedDescending()[count - 1], nthLargest(values, count))
            val wanted = values.indices.sortedByDescending { values[it] }.take(count).sorted()
            assertEquals(wanted, largest(values, count).toList())
        }
        repeat(200) {
            val values = FloatArray(random.nextInt(1, 900)) { random.nextInt(if (it % 2 == 0) 20 else 2000) / 16f }
            val count = random.nextInt(1, minOf(values.size, 100) + 1)
            val wanted = values.indices.sortedByDescending { values[it] }.take(count).sorted()
            val likeliest = Likeliest(values.size)
            repeat(2) { assertEquals(wanted, likeliest.largest(values, values.max(), count).toList()) } // used again
        }
        for (x in listOf(0.0, -1e-9, -0.3, -0.7, -1.0, -25.0, -300.0, -699.0)) {
            assertEquals(1.0, quickExp(x) / exp(x), 1e-8)
        }
        assertEquals(0.0, quickExp(Double.NEGATIVE_INFINITY))
    }

    @Test
    fun lookupFindsTheLongestRun() {
        val lookup = Lookup()
        lookup.follow(listOf(1, 2, 3, 4, 9, 2, 3, 5, 2, 3))
        assertEquals(Lookup.Guess(5, 0.50), lookup.guess(emptyList()))
        assertEquals(Lookup.Guess(4, 0.57), lookup.guess(listOf(1, 2, 3)))
        assertNull(lookup.guess(listOf(77)))
        lookup.follow(listOf(8))
        assertNull(lookup.guess(emptyList()))
    }

    @Test
    fun earlierTextsAreLookedUpAndForgotten() {
        val lookup = Lookup(memory = 6)
        lookup.remember((0..9).toList())
        assertNull(lookup.guess(listOf(1, 2, 3, 4))) // of 8 runs the first two are forgotten
        assertEquals(Lookup.Guess(9, 0.32), lookup.guess(listOf(5, 6, 7, 8)))
        assertEquals(Lookup.Guess(9, 0.63), lookup.guess((1..8).toList()))
        lookup.remember(listOf(2, 3, 4, 5, 60)) // seen again: now the newest, and what followed last counts
        lookup.remember((100..105).toList())
        assertEquals(Lookup.Guess(60, 0.32), lookup.guess(listOf(2, 3, 4, 5)))
        assertNull(lookup.guess(listOf(3, 4, 5, 6)))
        lookup.forget()
        assertNull(lookup.guess(listOf(2, 3, 4, 5)))
        val long = (70_000..70_039).toList()
        val whole = Lookup()
        whole.remember(long)
        assertEquals(Lookup.Guess(70_016, 0.70), whole.guess(long.take(16)))
        whole.follow(listOf(1, 2, 3, 4, 5, 6, 77, 1, 2, 3, 4, 5, 6))
        whole.remember(listOf(2, 3, 4, 5, 6, 88))
        assertEquals(Lookup.Guess(77, 0.82), whole.guess(emptyList())) // its own text is surer
    }

    private fun drafterOf(setup: Any?): Drafter {
        val ids = setup.ints("draft_ids").toIntArray()
        val shape = RowShape(setup.int("heads"), setup.int("head_dim"))
        val heads = setup.int("sa_kv_heads")
        return Drafter(
            FakeEngine(ids, heads * shape.headDim, shape.values / 2), ids, shape, heads, setup.int("max_context"),
            setup.field<Boolean>("lookup"), setup.field<Any?>("null_row")?.let(::floats),
            setup.double("confidence_temperature"), setup.double("row_cost"),
        )
    }

    private fun shape(of: Any?) = TreeShape(of.int("nodes"), of.int("depth"), of.int("breadth"), of.double("gain"))

    private fun ints(list: Any?) = (list as List<*>).map { (it as Long).toInt() }

    private fun floats(list: Any?) = (list as List<*>).map { (it as Number).toFloat() }.toFloatArray()

    private fun close(wanted: List<Number>, given: List<Double>, where: String) {
        for ((one, other) in wanted.zip(given)) assertEquals(one.toDouble(), other, 1e-5, where)
    }
}
