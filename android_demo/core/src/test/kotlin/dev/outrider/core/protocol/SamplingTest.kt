package dev.outrider.core.protocol

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.bundle.int
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertNotNull
import kotlin.test.assertNull

/** Sampling, feature rows and cost curves against the vectors. */
class SamplingTest {
    @Test
    fun drawsFollowTheVectors() {
        for (row in Vectors.read("sampling")) {
            val logits = row.field<List<Number>>("logits").map { it.toFloat() }.toFloatArray()
            val sampling = Vectors.sampling(row.field<Any>("sampling"))
            val wanted = row.field<List<Number?>>("law")
            val distribution = logProbs(logits, sampling)
            assertEquals(wanted.size, distribution.size)
            for ((token, value) in wanted.withIndex()) {
                if (value == null) assertEquals(Double.NEGATIVE_INFINITY, distribution[token])
                else assertEquals(value.toDouble(), distribution[token], 1e-9)
            }
            assertEquals(row.int("token"), draw(logits, sampling, row.int("position")))
        }
    }

    @Test
    fun samplingKeepsBounds() {
        for (wrong in listOf<() -> Sampling>(
            { Sampling(-0.1) }, { Sampling(101.0) }, { Sampling(Double.NaN) }, { Sampling(topK = -1) },
            { Sampling(topK = 1L shl 32) }, { Sampling(topP = 0.0) }, { Sampling(topP = 1.1) },
            { Sampling(minP = 2.0) }, { Sampling(seed = -1) },
        )) assertFailsWith<IllegalArgumentException> { wrong() }
    }

    @Test
    fun rowsFollowTheVectors() {
        for (row in Vectors.read("rows")) {
            val shape = RowShape(row.int("heads"), row.int("head_dim"))
            val data = row.field<String>("hex").hexToBytes()
            val wanted = row.field<List<Number>>("values").map { it.toFloat() }
            assertEquals(wanted, unpackRows(data, shape).toList())
            if (shape.bytes > 1) assertFailsWith<IllegalArgumentException> { unpackRows(data + 0, shape) }
        }
    }

    @Test
    fun halvesOfEveryKind() {
        val known = mapOf(
            0x0000 to 0f, 0x0001 to 5.9604645e-8f, 0x03FF to 6.097555e-5f, 0x0400 to 6.1035156e-5f, 0x3C00 to 1f,
            0xC000 to -2f, 0x7BFF to 65504f, 0x7C00 to Float.POSITIVE_INFINITY, 0xFC00 to Float.NEGATIVE_INFINITY,
        )
        for ((bits, value) in known) assertEquals(value, halfToFloat(bits), bits.toString(16))
        assertEquals(-0f, halfToFloat(0x8000))
        assertEquals(true, halfToFloat(0x7E00).isNaN())
    }

    @Test
    fun costsFollowTheVectors() {
        for (row in Vectors.read("costs")) {
            val curve = CostCurve.unpack(row.field<String>("hex").hexToBytes())
            val wanted = row.field<List<Number>?>("seconds")
            if (wanted == null) {
                assertNull(curve)
            } else {
                val steps = row.field<List<Number>>("steps").map { it.toDouble() }
                assertNotNull(curve)
                for ((step, seconds) in steps.zip(wanted)) assertEquals(seconds.toDouble(), curve.at(step), 1e-12)
            }
        }
    }

    @Test
    fun theDoubleOfAFieldMayBeWhole() = assertEquals(2.0, mapOf("x" to 2L).double("x"))
}
