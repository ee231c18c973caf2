package dev.outrider.core.protocol

import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertNull

class TreeTest {
    private val tree = TokenTree(listOf(11, 12, 300, 11, 49151), listOf(-1, -1, 0, 1, 3))

    @Test
    fun knowsItsShape() {
        assertEquals(listOf(1, 1, 2, 2, 3), tree.depths.toList())
        assertEquals(listOf(1, 3, 4), tree.path(4))
        assertEquals(emptyList(), tree.path(ROOT))
        assertEquals(3, tree.child(1, 11))
        assertEquals(0, tree.child(ROOT, 11))
        assertNull(tree.child(0, 11))
    }

    @Test
    fun tokensTakeAPathUntilTheyLeaveIt() {
        assertEquals(listOf(1, 3), tree.foreseen(listOf(12, 11, 5)))
        assertEquals(emptyList(), tree.foreseen(listOf(5)))
        assertNull(tree.foreseen(listOf(12, 11)))
    }

    @Test
    fun prunes() {
        assertEquals(TokenTree(listOf(11, 12, 300), listOf(-1, -1, 0)), tree.pruned(3, 9))
        assertEquals(TokenTree(listOf(11, 12), listOf(-1, -1)), tree.pruned(9, 1))
        assertEquals(TokenTree(), tree.pruned(-1, 9))
        assertEquals(tree, tree.pruned(5, 3))
    }

    @Test
    fun chainsArePaths() {
        assertEquals(TokenTree(listOf(5, 6, 7), listOf(-1, 0, 1)), TokenTree.chain(listOf(5, 6, 7)))
    }

    @Test
    fun refusesWhatIsNoTree() {
        assertFailsWith<TreeError> { TokenTree(listOf(1), emptyList()) }
        assertFailsWith<TreeError> { TokenTree(listOf(1, 2), listOf(-1, 1)) }
        assertFailsWith<TreeError> { TokenTree(listOf(1), listOf(-2)) }
        assertFailsWith<TreeError> { TokenTree(listOf(1, 1), listOf(-1, -1)) }
        assertFailsWith<TreeError> { TokenTree.chain(List(MAX_NODES + 1) { it }) }
    }
}
