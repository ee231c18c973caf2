package dev.outrider.core.answer

import dev.outrider.core.session.WriteToken
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertNull

/** Offline tokens appear at a reader's pace. */
class HeldTokenTest {
    @Test
    fun tokensWrittenAloneComeWhenAReaderDoes() {
        val reader = Reader(10.0)
        fun due(wanted: Double, committed: Int, provisional: Int) =
            assertEquals(wanted, reader.due(committed, provisional), 1e-9)
        due(0.0, 7, 0)
        for (written in 0..2) reader.shown(7, written, 100 + written / 10.0)
        due(100.3, 7, 3)
        for (written in 1..2) {
            due(100 + written / 10.0, 7, written) // the last two were withdrawn
            reader.shown(7, written, 100.21)
        }
        due(100.3, 7, 3) // the reader has not moved
        reader.shown(7, 3, 109.0) // a slow writer catches up one second
        due(108.1, 7, 4)
        due(109.1, 8, 1) // reading begins again after newly verified tokens
        reader.shown(8, 1, 110.0)
        due(110.1, 8, 2)
    }

    @Test
    fun aTokenIsHeldUntilItIsDueOrStale() {
        val held = HeldToken(10.0)
        fun hold(version: Int, paced: Boolean = true) {
            held.hold(WriteToken(List(9) { it }, version), 7, paced)
        }
        assertNull(held.wakeAt())
        hold(1)
        assertEquals(1, held.release(100.0, 1)?.version) // the first is due at once
        hold(2)
        assertNull(held.release(99.9, 2))
        assertEquals(100.0, held.wakeAt()!!, 1e-9)
        assertEquals(2, held.release(99.9, 3)?.version) // stale
        assertNull(held.wakeAt())
        hold(4, paced = false)
        assertEquals(4, held.release(99.9, 4)?.version)
    }
}
