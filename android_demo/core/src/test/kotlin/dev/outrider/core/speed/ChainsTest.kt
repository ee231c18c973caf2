package dev.outrider.core.speed

import dev.outrider.core.drafting.Draft
import dev.outrider.core.protocol.TokenTree
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFalse
import kotlin.test.assertTrue

/** What the vectors do not show of chains. */
class ChainsTest {
    private val chain = Draft(TokenTree.chain(listOf(1, 2, 3, 4)), listOf(-0.1, -0.2, -0.3, -0.4), 3, chain = true)

    @Test
    fun theyAreTriedAtFirstAndThenMoreAndMoreRarely() {
        val chains = Chains()
        assertFalse(chains.tryNow())
        chains.ready = true
        repeat(2) { assertTrue(chains.tryNow()) } // until they are known
        chains.drafted(3, 0.3)
        val waits = List(7) { generateSequence { chains.tryNow() }.takeWhile { !it }.count() + 1 }
        assertEquals(listOf(32, 64, 128, 256, 512, 512, 512), waits)
        chains.chosen()
        assertEquals(1, List(32) { chains.tryNow() }.count { it })
        assertEquals(2, List(8) { chains.compares() }.count { it })
    }

    @Test
    fun ratesStayFinite() {
        val chains = Chains()
        chains.ready = true
        chains.drafted(1, 0.0)
        assertTrue(chains.best(0.0) { 0.0 }.second.isFinite())
    }

    @Test
    fun nothingIsKnownOfAChainBehindTheAnswersEnd() {
        fun rate(tokens: Int, ended: Boolean): Double {
            val pace = Pace()
            pace.chains.ready = true
            pace.chains.drafted(1, 0.01)
            pace.chainVerified(tokens, 2, 0.1, 0.05, 0.0, ended)
            return pace.draftRate()
        }
        assertTrue(rate(4, ended = true) > rate(4, ended = false))
        assertEquals(rate(2, ended = false), rate(2, ended = true), 1e-9)
    }

    @Test
    fun treesAreDraftedBesideThemNowAndThen() {
        val tuning = Tuning()
        val asked = List(3) { tuning.besideChain() }
        assertEquals(listOf(true, false, false), asked.map { it != null }) // that one is under way
        tuning.compared(Draft(TokenTree.chain(listOf(3)), listOf(-0.1)), 2, 0.01)
        tuning.committed(listOf(1, 2, 3, 4))
        assertEquals(1, List(4) { tuning.besideChain() }.count { it != null })
    }

    @Test
    fun besideAStreamTheyTakeTurnsWithTreesUntilTheUnderstudyFails() {
        val tuning = Tuning()
        val compared = ArrayList<Boolean>()
        for (streamed in 0 until 200) {
            val size = tuning.comparison(streamed, drafts = compared.size < 4) ?: continue
            compared += size is ChainSize
            if (compared.size == 3) { // it fails at this one
                tuning.understudyFailed()
                continue
            }
            val tree = Draft(TokenTree.chain(listOf(1)), listOf(-0.1))
            tuning.compared(if (size is ChainSize) chain else tree, 2, 0.03)
            tuning.committed(listOf(1, 2, 1, 2, 9))
        }
        assertEquals(listOf(true, false, true, false, false), compared.take(5))
    }
}
