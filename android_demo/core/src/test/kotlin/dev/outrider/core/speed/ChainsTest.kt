package dev.outrider.core.speed

import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.drafting.Draft
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.session.Tuning
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertTrue

/** What the vectors do not show of chains. */
class ChainsTest {
    private val chain = Draft(TokenTree.chain(listOf(1, 2, 3, 4)), listOf(-0.1, -0.2, -0.3, -0.4), 3)
    private val tree = Draft(TokenTree.chain(listOf(3)), listOf(-0.1))
    private val costs = "01000000204e00004000000030750000".hexToBytes() // 20 ms for a token, 30 for 64
    private val welcome = Welcome(1, "t", "d", 9, 9, 9, 9, "", costs)

    @Test
    fun ratesStayFinite() {
        val chains = ChainArm()
        chains.drafted(1, 0.0)
        assertTrue(chains.best(CostModel()).second.isFinite())
    }

    @Test
    fun nothingIsKnownOfAChainBehindTheAnswersEnd() {
        fun rate(tokens: Int, ended: Boolean): Double {
            val controller = Controller()
            controller.chain.ready = true
            controller.chain.drafted(1, 0.01)
            controller.chainVerified(tokens, 2, 0.1, 0.05, ended)
            return controller.rates().getValue(Arm.CHAIN)
        }
        assertTrue(rate(4, ended = true) > rate(4, ended = false))
        assertEquals(rate(2, ended = false), rate(2, ended = true), 1e-9)
    }

    @Test
    fun treesAreDraftedBesideThemNowAndThen() {
        val tuning = Tuning()
        tuning.controller.linked(welcome, 0.02)
        tuning.controller.waited(0.05) // for a tree
        tuning.controller.chain.drafted(4, 0.0001)
        tuning.choose(drafts = true)
        assertEquals(Arm.CHAIN, tuning.controller.arm)
        val asked = List(20) {
            val (arm, _) = tuning.comparison(drafts = true).singleOrNull() ?: return@List null
            assertTrue(tuning.comparison(drafts = true).isEmpty()) // that one is under way
            tuning.compared(tree, 2, 0.01)
            tuning.committed(listOf(1, 2, 3, 4))
            arm
        }
        assertEquals(listOf(Arm.TREE, Arm.TREE), asked.filterNotNull())
    }

    @Test
    fun besideAStreamBothAreDraftedUntilTheUnderstudyFails() {
        val tuning = Tuning()
        tuning.controller.linked(welcome, 0.06)
        assertEquals(Arm.STREAM, tuning.begin())
        val asked = ArrayList<Arm>()
        repeat(2000) {
            tuning.controller.streamed(0.02, 0.02)
            val (arm, _) = tuning.comparison(drafts = asked.size < 3).singleOrNull() ?: return@repeat
            asked += arm
            if (asked.size == 1) tuning.understudyFailed() // at this one
            else tuning.compared(if (arm == Arm.CHAIN) chain else tree, 2, 0.0)
            tuning.committed(listOf(1, 2, 1, 2, 9))
        }
        assertEquals(Arm.CHAIN, asked.first())
        assertTrue(Arm.TREE in asked && asked.size > 3 && asked.drop(3).all { it == Arm.TREE })
    }
}
