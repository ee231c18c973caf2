package dev.outrider.core.speed

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.bundle.int
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertNotNull
import kotlin.test.assertNull

/** Pace and mode as the vectors have them. */
class PaceTest {
    @Test
    fun measuresAndChoosesAsTheVectorsHaveIt() {
        val calls = HashSet<String>()
        for (row in Vectors.read("pace")) {
            val pace = Pace()
            val controller = Controller(pace, row.field<String?>("pinned")?.let(::mode))
            for ((call, arguments, wanted) in row.field<List<List<Any?>>>("steps")) {
                calls += call as String
                pace.measure(call, arguments as List<*>)
                assertEquals(wanted.double("tree_rate"), pace.treeRate(), 1e-9)
                assertEquals(wanted.double("usual_tree_rate"), pace.usualTreeRate(), 1e-9)
                val stream = wanted.field<Number?>("stream_rate")
                if (stream == null) assertNull(pace.streamRate())
                else assertEquals(stream.toDouble(), assertNotNull(pace.streamRate()), 1e-9)
                assertEquals(wanted.double("gain"), pace.gain(), 1e-9)
                assertEquals(ints(wanted.field("compare_every")), listOf(pace.compareEvery(32), pace.compareEvery(33)))
                val compares = listOf(pace.compares(9, true), pace.compares(40, false))
                assertEquals(wanted.field<List<Boolean>>("compares"), compares)
                assertEquals(wanted.field<Boolean>("drafts_ahead"), pace.draftsAhead())
                assertEquals(wanted.int("drafting"), pace.worthDrafting())
                val (tokens, parents, scores) = wanted.field<List<Any?>>("tree")
                val nodes = pace.worthSending(TokenTree(ints(tokens), ints(parents)), doubles(scores))
                assertEquals(wanted.int("nodes"), nodes)
                val call = wanted.field<String>("call")
                val mode = if (call == "choose") controller.choose() else controller.begin(unknown = call == "begin")
                assertEquals(mode(wanted.field("mode")), mode)
                if ("draft_rate" in wanted as Map<*, *>) {
                    assertEquals(wanted.double("draft_rate"), pace.draftRate(), 1e-9)
                    assertEquals(wanted.field<Boolean>("beside"), pace.chains.compares())
                }
            }
        }
        assertEquals(11, calls.size)
    }

    private fun Pace.measure(call: String, arguments: List<*>) {
        fun double(index: Int) = (arguments[index] as Number).toDouble()
        when (call) {
            "linked" -> {
                val costs = (arguments[0] as String).hexToBytes()
                linked(Welcome(1, "t", "d", 9, 9, 9, 9, "", costs), double(1))
            }
            "drafted" -> drafted(double(0), double(1).toInt(), arguments[2] as Boolean)
            "verified" -> verified(
                TokenTree(ints(arguments[0]), ints(arguments[1])), doubles(arguments[2]), ints(arguments[3]),
                double(4), double(5), double(6),
            )
            "streamed" -> {
                val (overdue, beside, sameStep) = arguments.drop(2).map { it as Boolean }
                streamed(double(0), double(1), overdue, beside, sameStep)
            }
            "foreseen" -> foreseen(
                TokenTree(ints(arguments[0]), ints(arguments[1])), doubles(arguments[2]), ints(arguments[3]), double(4),
            )
            "waited" -> waited(double(0))
            "prepared" -> prepared(double(0))
            "chain_ready" -> chains.ready = arguments[0] as Boolean
            "chain_drafted" -> chains.drafted(double(0).toInt(), double(1))
            "chain_verified" ->
                chainVerified(double(0).toInt(), double(1).toInt(), double(2), double(3), double(4))
            "chain" -> assertEquals(double(1).toInt(), chain(arguments[0] as Boolean))
            else -> error("no measurement $call")
        }
    }

    private fun mode(word: String) = Mode.valueOf(word.uppercase())

    private fun ints(list: Any?) = (list as List<*>).map { (it as Long).toInt() }

    private fun doubles(list: Any?) = (list as List<*>).map { (it as Number).toDouble() }
}
