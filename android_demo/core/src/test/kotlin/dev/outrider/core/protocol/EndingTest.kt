package dev.outrider.core.protocol

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.field
import kotlin.test.Test
import kotlin.test.assertEquals

/** The ways an answer can end, against the vectors. */
class EndingTest {
    private val rows = Vectors.read("endings").map { it as Map<*, *> }

    @Test
    fun reasonsAreThoseOfTheVectors() {
        val wanted = rows.filter { "reason" in it }.map { it.field<String>("reason") to it.field<Boolean>("complete") }
        assertEquals(wanted, FinishReason.entries.map { it.name.lowercase() to it.complete })
    }

    @Test
    fun callsAreFoundAtTheEnd() {
        val texts = rows.filter { "text" in it }
        assertEquals(texts.map { it["calls"] }, texts.map { endsWithCall(it.field("text")) })
    }
}
