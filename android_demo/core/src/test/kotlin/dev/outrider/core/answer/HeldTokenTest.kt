package dev.outrider.core.answer

import kotlin.test.Test
import kotlin.test.assertEquals

/** Tokens written alone come at a reader's pace. */
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
            due(100 + written / 10.0, 7, written) // as the last two were withdrawn
            reader.shown(7, written, 100.21)
        }
        due(100.3, 7, 3) // the reader is no further
        reader.shown(7, 3, 109.0) // a writer that was slow makes up for a second
        due(108.1, 7, 4)
        due(109.1, 8, 1) // behind what the target verified reading begins anew
        reader.shown(8, 1, 110.0)
        due(110.1, 8, 2)
    }
}
