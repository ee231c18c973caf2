package dev.outrider.core.speed

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.bundle.int
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.session.Settled
import dev.outrider.core.session.Tuning
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertNotNull
import kotlin.test.assertNull
import kotlin.test.assertTrue

/** Measurements and arm as the vectors have them. */
class ControllerTest {
    @Test
    fun measuresAndChoosesAsTheVectorsHaveIt() {
        val calls = HashSet<String>()
        for (row in Vectors.read("controller")) {
            val controller = Controller(row.field<String?>("pinned")?.let(::arm))
            for ((call, arguments, wanted) in row.field<List<List<Any?>>>("steps")) {
                calls += call as String
                controller.measure(call, arguments as List<*>)
                val rates = wanted.field<Map<String, Number>>("rates").mapKeys { arm(it.key) }
                assertEquals(rates.keys, controller.rates().keys)
                for ((arm, rate) in controller.rates()) assertEquals(1.0, rate / rates.getValue(arm).toDouble(), 1e-9)
                val gain = wanted.field<Number?>("gain")
                if (gain == null) assertNull(controller.tree.gain(controller.costs))
                else assertEquals(gain.toDouble(), assertNotNull(controller.tree.gain(controller.costs)), 1e-9)
                assertEquals(wanted.int("chain"), controller.chain.best(controller.costs).first)
                val compares = listOf(controller.compares(Arm.TREE), controller.compares(Arm.CHAIN))
                assertEquals(wanted.field<List<Boolean>>("compares"), compares)
                assertEquals(wanted.field<Boolean>("ahead"), controller.ahead.now)
                assertEquals(wanted.int("drafting"), controller.tree.worthDrafting())
                val (tokens, parents, scores) = wanted.field<List<Any?>>("tree")
                val tree = TokenTree(ints(tokens), ints(parents))
                val nodes = controller.tree.worthSending(tree, doubles(scores), controller.costs)
                assertEquals(wanted.int("nodes"), nodes)
                val call = wanted.field<String>("call")
                val arm = if (call == "choose") controller.choose() else controller.begin(unknown = call == "begin")
                assertEquals(arm(wanted.field("arm")), arm)
                assertEquals(wanted.int("trial"), controller.trial)
            }
        }
        assertEquals(11, calls.size)
    }

    @Test
    fun aFallingCurveDividesNothingByZero() {
        val controller = Controller()
        // 100 us for a token, 50 for two: 0 for three
        controller.linked(welcome("01000000640000000200000032000000"), 0.01)
        for (nodes in 0..3) {
            controller.verified(TokenTree.chain(List(nodes) { 1 }), emptyList(), emptyList(), 0.02, 0.01)
            controller.streamed(0.01, 0.01)
            assertTrue(controller.rates().values.all { it.isFinite() && it > 0 }, "${controller.rates()}")
        }
    }

    @Test
    fun aToldQueueIsReplacedByTheFirstVerdict() {
        for (arm in Arm.entries) {
            val tuning = Tuning()
            tuning.controller.linked(welcome("0100000064000000", queueUs = Int.MAX_VALUE), 0.01)
            assertEquals(2147.493647, tuning.controller.costs.between, 1e-9)
            val tree = if (arm == Arm.STREAM) TokenTree() else TokenTree.chain(listOf(1))
            fun answered(
                arm: Arm, rest: Double, afterOpen: Boolean = false, late: Boolean = false, sameStep: Boolean = false,
            ): Double {
                val settled = Settled(
                    arm, tree, emptyList(), emptyList(), listOf(1), 0.05 + rest, 0.05, ended = false,
                    afterOpen, late, sameStep, askedFor = arm == Arm.STREAM,
                )
                tuning.answered(settled, 0.0)
                return tuning.controller.costs.between
            }
            for ((rest, wanted) in listOf(0.014 to 0.014, 0.02 to 0.015, 0.008 to 0.014)) {
                assertEquals(wanted, answered(arm, rest), 1e-9)
                assertEquals(wanted, answered(Arm.STREAM, 3.0, afterOpen = true), 1e-9) // its own prompt was read
                assertEquals(wanted, answered(Arm.STREAM, 0.0, sameStep = true), 1e-9)
                assertEquals(wanted, answered(arm, 3.0, late = true), 1e-9)
            }
        }
    }

    private fun welcome(costs: String, queueUs: Int = 0) =
        Welcome(1, "t", "d", 9, 9, 9, 9, "", costs.hexToBytes(), 0, "", 0, queueUs)

    private fun Controller.measure(call: String, arguments: List<*>) {
        fun double(index: Int) = (arguments[index] as Number).toDouble()
        when (call) {
            "linked" -> {
                val costs = (arguments[0] as String).hexToBytes()
                val (streamTokens, queueUs) = arguments.drop(2).map { (it as Long).toInt() }
                linked(Welcome(1, "t", "d", 9, 9, 9, 9, "", costs, 0, "", streamTokens, queueUs), double(1))
            }
            "drafted" -> tree.drafted(double(0), double(1).toInt())
            "verified" -> verified(
                TokenTree(ints(arguments[0]), ints(arguments[1])), doubles(arguments[2]), ints(arguments[3]),
                double(4), double(5),
            )
            "streamed" -> streamed(double(0), double(1), arguments[2] as Boolean)
            "foreseen" -> foreseen(
                TokenTree(ints(arguments[0]), ints(arguments[1])), doubles(arguments[2]), ints(arguments[3]), double(4),
            )
            "waited" -> waited(double(0))
            "prepared" -> prepared()
            "chain_ready" -> chain.ready = arguments[0] as Boolean
            "chain_drafted" -> chain.drafted(double(0).toInt(), double(1))
            "chain_verified" -> chainVerified(double(0).toInt(), double(1).toInt(), double(2), double(3))
            "compared" -> chain.verified(double(0).toInt(), double(1).toInt())
            else -> error("no measurement $call")
        }
    }

    private fun arm(word: String) = Arm.valueOf(word.uppercase())

    private fun ints(list: Any?) = (list as List<*>).map { (it as Long).toInt() }

    private fun doubles(list: Any?) = (list as List<*>).map { (it as Number).toDouble() }
}
