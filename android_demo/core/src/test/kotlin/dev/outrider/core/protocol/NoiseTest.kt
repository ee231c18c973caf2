package dev.outrider.core.protocol

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.int
import kotlin.math.abs
import kotlin.math.max
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertTrue

class NoiseTest {
    @Test
    fun followsTheVectors() {
        val vectors = Vectors.read("noise")
        assertTrue(vectors.size >= 200)
        for (row in vectors) {
            val noise = Noise(row.field("seed"), row.int("position"))
            val token = row.int("token")
            assertEquals(row.field<Long>("h"), noise.hash(token).toLong() and 0xFFFFFFFFL)
            val wanted = row.double("g") // one step of h moves g by 1e-10 and more
            assertTrue(abs(noise.gumbel(token) - wanted) <= 1e-13 * max(1.0, abs(wanted)), "$row")
        }
    }
}
