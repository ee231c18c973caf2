package dev.outrider.core.protocol

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.hexToBytes
import dev.outrider.core.bundle.toHex
import kotlin.random.Random
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertIs
import kotlin.test.assertTrue

class WireTest {
    private val vectors = Vectors.read("frames")

    @Test
    fun encodesEveryVector() {
        val types = vectors.map { row ->
            val message = Vectors.message(row.field<Any>("fields"))
            assertEquals(row.field<String>("hex"), encode(message).toHex(), row.field<String>("name"))
            message.type
        }
        assertEquals((1..12).toSet(), types.toSet())
    }

    @Test
    fun decodesWhatVerifiersSend() {
        for (row in vectors) {
            val frame = row.field<String>("hex").hexToBytes()
            if (Vectors.message(row.field<Any>("fields")) is ServerMessage) {
                val fields = Vectors.fields(decodeServer(frame))
                assertTrue(Vectors.same(row.field<Any>("fields"), fields), "$fields")
            } else {
                assertFailsWith<WireError> { decodeServer(frame) }
            }
        }
    }

    @Test
    fun passesOverFieldsOfLaterVersions() {
        val writer = PackWriter()
        writer.value(listOf(4, 3, 7, 2, "later", listOf(listOf(1.5, ByteArray(300)), true), -40000))
        assertEquals(Opened(3, 7, 2), decodeServer(writer.bytes() + 0x80.toByte()))
    }

    @Test
    fun fillsInFieldsOfEarlierVersions() {
        val writer = PackWriter()
        writer.value(listOf(7, 0, 1, 4, ByteArray(0), 17, 0, ByteArray(0)))
        val verdict = assertIs<Verdict>(decodeServer(writer.bytes() + 0x80.toByte()))
        assertEquals(listOf(0, 0, 0), listOf(verdict.treeBudget, verdict.queueUs, verdict.engineUs))
        val early = PackWriter().apply { value(listOf(2, 1, "", "", 1, 1, 1, 1)) }
        val welcome = assertIs<Welcome>(decodeServer(early.bytes() + 0x80.toByte()))
        assertEquals(listOf(0, 0), listOf(welcome.streamTokens, welcome.queueUs))
    }

    @Test
    fun keepsBounds() {
        for (fields in listOf<List<Any>>(
            listOf(4, 65536, 1, 1), // stream
            listOf(4, -1, 1, 1),
            listOf(4, 1, 1L shl 31, 1), // count
            listOf(8, 1), // a field too few
            listOf(8, 1, "1"),
            listOf(8, true, 1),
            listOf(12, 256, "", -1, 0), // code
            listOf(12, 1, "x".repeat(513), -1, 0),
            listOf(7, 0, 1, 4, ByteArray(256), 17, 0, ByteArray(0)), // path
            listOf(7, 0, 1L shl 32, 4, ByteArray(0), 17, 0, ByteArray(0)), // seq
            listOf(7, 0, 1, 4, ByteArray(0), 17, 16, ByteArray(0)), // finish
            listOf(2, 1, "h".repeat(65), "", 1, 1, 1, 1),
            listOf(2, 1, "", "", 1, 1, 1, 1, "", ByteArray(136)), // costs
            listOf(2, 1, "", "", 1, 1, 1, 1, "", ByteArray(0), 0, "", -1), // tokens of a stream's step
            listOf(2, 1, "", "", 1, 1, 1, 1, "", ByteArray(0), 0, "", 10_000),
            listOf(2, 1, "", "", 1, 1, 1, 1, "", ByteArray(0), 0, "", 100, 1L shl 31), // queue
            listOf(13, 1),
            emptyList(),
        )) {
            val writer = PackWriter()
            writer.value(fields)
            assertFailsWith<WireError>("$fields") { decodeServer(writer.bytes() + 0x80.toByte()) }
        }
    }

    @Test
    fun raisesNothingElseWhateverTheBytes() {
        val random = Random(0)
        val frames = vectors.map { it.field<String>("hex").hexToBytes() }
        repeat(20_000) {
            val known = frames.random(random).copyOf()
            val frame = if (random.nextBoolean()) random.nextBytes(random.nextInt(40)) else known
            if (frame.isNotEmpty()) frame[random.nextInt(frame.size)] = random.nextInt().toByte()
            val cut = frame.copyOf(random.nextInt(frame.size + 1)) + 0x80.toByte()
            try {
                decodeServer(if (random.nextBoolean()) frame else cut)
            } catch (_: WireError) {
            }
        }
        assertFailsWith<WireError> { decodeServer(ByteArray(0)) }
        assertFailsWith<WireError> { decodeServer(ByteArray(64)) }
    }

    @Test
    fun bucketsHideSizes() {
        val sizes = listOf(1, 64, 65, 1024, 1025, 1536, 1537)
        assertEquals(listOf(64, 64, 128, 1024, 1536, 1536, 2048), sizes.map(::bucket))
    }
}
