package dev.outrider.core.bundle

import dev.outrider.core.Vectors
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.session.AnswerRecord
import dev.outrider.core.session.Span
import dev.outrider.core.session.Writer
import java.io.File
import kotlin.test.AfterTest
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertNull
import kotlin.test.assertTrue

class BundleTest {
    private val copy = File.createTempFile("bundle", "").apply { delete() }

    @AfterTest
    fun clean() {
        copy.deleteRecursively()
    }

    private fun changed(name: String, change: (File) -> Unit): BundleError {
        copy.deleteRecursively()
        for (file in Vectors.bundle.listFiles()!!.filter(File::isFile)) file.copyTo(File(copy, file.name))
        change(File(copy, name))
        return assertFailsWith<BundleError> { Bundle.open(copy) }.also { assertTrue('\n' !in it.message!!, it.message) }
    }

    @Test
    fun opensTheDefaultBundle() {
        val bundle = Bundle.open(Vectors.bundle)
        assertEquals(12288, bundle.draftIds.size)
        assertEquals(bundle.manifest.rowShape.values, bundle.nullRow?.size)
        val ids = bundle.renderChat(listOf(ChatMessage("user", "Why is the sky blue?")))
        val text = "Why is the sky blue?"
        assertTrue(bundle.tokenizer.decode(ids).contains(text))
        assertEquals(bundle.tokenizer.encode(text), ids.windowed(bundle.tokenizer.encode(text).size)
            .first { bundle.tokenizer.decode(it) == text })
    }

    @Test
    fun saysWhatIsWrong() {
        assertTrue("no manifest.json" in assertFailsWith<BundleError> { Bundle.open(copy) }.message!!)
        assertTrue("is missing" in changed("null_row.f32") { it.delete() }.message!!)
        assertTrue("bytes, not" in changed("null_row.f32") { it.appendBytes(ByteArray(4)) }.message!!)
        assertTrue("sha256" in changed("draft_ids.u32") { it.writeBytes(ByteArray(it.length().toInt())) }.message!!)
        assertTrue("does not load" in changed("manifest.json") { it.writeText("{}") }.message!!)
        assertTrue("format 9" in changed("manifest.json") { file ->
            file.writeText(file.readText().replace("\"format_version\": 2", "\"format_version\": 9"))
        }.message!!)
        assertTrue("lists no" in changed("manifest.json") { file ->
            file.writeText(file.readText().replace("_file\": \"null_row.f32\"", "_file\": \"other\""))
        }.message!!)
        assertTrue("plain file name" in changed("manifest.json") { file ->
            file.writeText(file.readText().replace("\"null_row.f32\": {", "\"../null_row.f32\": {"))
        }.message!!)
    }

    @Test
    fun readsHowSureTheDrafterMayBe() {
        for (file in Vectors.bundle.listFiles()!!.filter(File::isFile)) file.copyTo(File(copy, file.name))
        val file = File(copy, "manifest.json")
        val without = (Json.parse(file.readText()) as Map<*, *>) - "confidence_temperature"
        file.writeText(Json.write(without))
        assertEquals(1.0, Bundle.open(copy).manifest.confidenceTemperature)
        for (given in listOf("0.75", "1")) {
            file.writeText(Json.write(without).replaceFirst("{", "{\"confidence_temperature\": $given,"))
            assertEquals(given.toDouble(), Bundle.open(copy).manifest.confidenceTemperature)
        }
        for (given in listOf("0", "-1", "1e9", "1e400", "\"0.8\"", "null", "true")) {
            file.writeText(Json.write(without).replaceFirst("{", "{\"confidence_temperature\": $given,"))
            assertFailsWith<BundleError>(given) { Bundle.open(copy) }
        }
    }

    @Test
    fun opensABundleWithoutADrafter() {
        for (name in listOf("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")) {
            File(Vectors.bundle, name).copyTo(File(copy, name))
        }
        val file = File(copy, "manifest.json")
        val text = File(Vectors.bundle, "manifest.json").readText()
        val raw = (Json.parse(text) as Map<*, *>).mapKeys { it.key as String }
        val files = (raw["files"] as Map<*, *>).filterKeys { File(copy, it as String).isFile }
        val none = mapOf("drafter_hash" to "", "engines" to emptyMap<String, Any>(), "files" to files, "head_dim" to 0L)
        val nowhere = mapOf("draft_ids_file" to null, "null_row_file" to null)
        file.writeText(Json.write(raw + none + nowhere))
        val bundle = Bundle.open(copy)
        assertFalse(bundle.manifest.hasDrafter)
        assertEquals(1, bundle.draftIds.size)
        assertNull(bundle.nullRow)
        file.writeText(Json.write(raw + none + nowhere + mapOf("understudy" to null)))
        assertTrue("neither a drafter" in assertFailsWith<BundleError> { Bundle.open(copy) }.message!!)
    }

    @Test
    fun anUnderstudyMayComeLater() {
        for (file in Vectors.bundle.listFiles()!!.filter(File::isFile)) file.copyTo(File(copy, file.name))
        val file = File(copy, "manifest.json")
        val entry = """"understudy": {"folder": "later", "name": "small", "source_hash": "b1", "format": "onnx",
            "bits": 8, "bytes": 5000000000, "manifest_sha256": "fe"}"""
        file.writeText(Json.write((Json.parse(file.readText()) as Map<*, *>) - "understudy"))
        assertNull(Bundle.open(copy).manifest.understudy)
        file.writeText(file.readText().replaceFirst("{", "{$entry,"))
        val bundle = Bundle.open(copy)
        val wanted = UnderstudyEntry("later", "small", "b1", "onnx", 8, 5_000_000_000, "fe")
        assertEquals(wanted, bundle.manifest.understudy)
        assertFalse(bundle.hasUnderstudy)
        File(copy, "later").mkdir()
        File(copy, "later/manifest.json").writeText("{}")
        assertTrue(bundle.hasUnderstudy)
        file.writeText(file.readText().replace("\"later\"", "\"../later\""))
        assertTrue("plain file name" in assertFailsWith<BundleError> { Bundle.open(copy) }.message!!)
    }

    @Test
    fun recordsSurviveAsJson() {
        val record = AnswerRecord(
            listOf(1, 2), listOf(3, 6), listOf(4, 5),
            listOf(Span(0, 1, Writer.TARGET), Span(1, 3, Writer.UNDERSTUDY), Span(3, 4, Writer.DRAFTER)),
            Sampling(0.7, 40, 0.9, 0.1, Long.MAX_VALUE), 99,
            (1L shl 32) - 1, 7, ByteArray(16) { it.toByte() }, "target", listOf("\n\n", "end"),
            "onnx-8-v6",
        )
        val json = record.toJson()
        assertEquals(json, AnswerRecord.parse(json).toJson())
        assertEquals("onnx-8-v6", AnswerRecord.parse(json).arithmetic)
        val unknown = json.replace("onnx-8-v6", "")
        assertEquals("" to unknown, AnswerRecord.parse(unknown).let { it.arithmetic to it.toJson() })
        for (wrong in listOf(
            json.replace(",\"arithmetic\":\"onnx-8-v6\"", ""), json.replace(",\"constraint\":\"\"", ""),
            json.replace("onnx-8-v6", "x".repeat(65)), json.replace("onnx-8-v6", "two\\nlines"), "{}",
            json.replace("\"version\":1", "\"version\":2"), json.replace("\"prompt\":[1,2]", "\"prompt\":[]"),
            json.replace("[0,1,", "[0,"), json.replace("[1,3,", "[1,2,"),
            json.replace("drafter", "nobody"), json.replace("0001", "01"),
        )) {
            assertTrue(wrong != json)
            assertFailsWith<IllegalArgumentException>(wrong) { AnswerRecord.parse(wrong) }
        }
    }
}
