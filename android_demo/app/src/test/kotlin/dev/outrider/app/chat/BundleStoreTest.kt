package dev.outrider.app.chat

import dev.outrider.core.bundle.BundleError
import dev.outrider.core.bundle.Json
import java.io.ByteArrayOutputStream
import java.io.File
import java.security.MessageDigest
import java.util.zip.ZipEntry
import java.util.zip.ZipOutputStream
import kotlin.test.AfterTest
import kotlin.test.Test
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertNotEquals
import kotlin.test.assertNull
import kotlin.test.assertTrue

class BundleStoreTest {
    private val root = File.createTempFile("store", "").apply { delete() }
    private val store = BundleStore(root)
    private val files = mapOf(
        "drafter.onnx" to ByteArray(200_000) { (it * 7).toByte() }, "tokenizer.json" to "{}".toByteArray(),
    )

    @AfterTest
    fun clean() {
        root.deleteRecursively()
    }

    private fun hash(bytes: ByteArray) =
        MessageDigest.getInstance("SHA-256").digest(bytes).joinToString("") { "%02x".format(it) }

    private fun manifest(of: Map<String, ByteArray>, more: Map<String, Any> = emptyMap()) = Json.write(
        mapOf(
            "engines" to mapOf("onnx" to mapOf("file" to "drafter.onnx", "data" to null)),
            "files" to of.mapValues { (_, bytes) -> mapOf("bytes" to bytes.size, "sha256" to hash(bytes)) },
        ) + more,
    ).toByteArray()

    private fun zip(entries: Map<String, ByteArray>): ZipBundle {
        val bytes = ByteArrayOutputStream()
        ZipOutputStream(bytes).use { zip ->
            for ((name, content) in entries) {
                zip.putNextEntry(ZipEntry(name))
                zip.write(content)
            }
        }
        return ZipBundle { bytes.toByteArray().inputStream() }
    }

    private fun refused(source: BundleSource): String {
        val error = assertFailsWith<BundleError> { store.install(source) { Room.Enough } }
        assertEquals(emptyList(), root.listFiles().orEmpty().toList(), "nothing half done is left")
        return error.message!!.also { assertTrue('\n' !in it, it) }
    }

    @Test
    fun aZippedFolderIsCopiedOnce() {
        val source = zip(files.mapKeys { "mine/${it.key}" } + ("mine/manifest.json" to manifest(files)))
        var asked: Needs? = null
        val folder = store.install(source) { Room.Enough.also { _ -> asked = it } }
        assertEquals(Needs(200_002, 200_000), asked)
        assertEquals(asked, store.needs(folder))
        for ((name, bytes) in files) assertContentEquals(bytes, File(folder, name).readBytes())
        assertEquals(folder, store.install(source) { error("it is there") })
        assertEquals(folder, store.find(folder.name))
        assertNull(store.find("bundle-0"))
    }

    @Test
    fun anUnderstudyIsCopiedWithItsBundleOrLater() {
        val small = mapOf("target.onnx" to ByteArray(300_000) { 5 }, "tokenizer.json" to "{\"small\":1}".toByteArray())
        val its = manifest(small)
        fun naming(folder: String) =
            manifest(files, mapOf("understudy" to mapOf("folder" to folder, "manifest_sha256" to hash(its))))
        val own = files + ("manifest.json" to naming("later"))
        val behind = (small + ("manifest.json" to its)).mapKeys { "later/${it.key}" }
        val all = (behind + own).mapKeys { "mine/${it.key}" } // the understudy's manifest comes first
        for (steps in listOf(listOf(all), listOf(own, all), listOf(own, behind + own, own))) {
            root.deleteRecursively()
            val needs = ArrayList<Needs>()
            val folder = steps.map { step -> store.install(zip(step)) { Room.Enough.also { _ -> needs += it } } }.last()
            for ((name, bytes) in files) assertContentEquals(bytes, File(folder, name).readBytes())
            for ((name, bytes) in small) assertContentEquals(bytes, File(folder, "later/$name").readBytes())
            assertContentEquals(its, File(folder, "later/manifest.json").readBytes())
            assertEquals(listOf(folder), root.listFiles()!!.toList())
            assertEquals(500_013, needs.sumOf { it.files })
        }
        root.deleteRecursively()
        val flipped = small.getValue("target.onnx").clone().also { it[7] = 0 }
        assertTrue("target.onnx" in refused(zip(all + ("mine/later/target.onnx" to flipped))))
        assertTrue("later/manifest.json" in refused(zip(all + ("mine/later/manifest.json" to manifest(files)))))
        assertTrue("tokenizer.json" in refused(zip(all - "mine/later/tokenizer.json")))
        for (name in listOf("..", "a/b", "")) refused(zip(own + ("manifest.json" to naming(name))))
    }

    @Test
    fun onlyTheBundleInUseIsKept() {
        val first = store.install(zip(files + ("manifest.json" to manifest(files)))) { Room.Enough }
        val other = files + ("more" to byteArrayOf(1))
        val second = store.install(zip(other + ("manifest.json" to manifest(other)))) { Room.Enough }
        assertNotEquals(first, second)
        store.keepOnly(second)
        assertEquals(listOf(second), root.listFiles()!!.toList())
    }

    @Test
    fun whatIsNoBundleIsRefused() {
        val listed = "manifest.json" to manifest(files)
        assertTrue("manifest.json" in refused(zip(files)))
        assertTrue("manifest.json" in refused(ZipBundle { "no zip".byteInputStream() }))
        assertTrue("drafter.onnx" in refused(zip(files - "drafter.onnx" + listed)))
        val flipped = files.getValue("drafter.onnx").clone().also { it[77_777] = 0 }
        assertTrue("drafter.onnx" in refused(zip(files + ("drafter.onnx" to flipped) + listed)))
        assertTrue("tokenizer.json" in refused(zip(files + ("tokenizer.json" to ByteArray(1 shl 20)) + listed)))
        refused(zip(files + ("manifest.json" to "[]".toByteArray())))
        refused(zip(files + ("manifest.json" to "{".toByteArray())))
        refused(zip(files + ("manifest.json" to ByteArray(2 shl 20) { ' '.code.toByte() })))
        for (name in listOf("../evil", "/evil", "a/b", "..", "", "manifest.json")) {
            refused(zip(files + ("manifest.json" to manifest(files + (name to byteArrayOf(1))))))
        }
    }

    @Test
    fun pathsInAZipLeadNowhere() {
        val source = zip(files.mapKeys { "../../${it.key}" } + ("../manifest.json" to manifest(files)))
        val folder = store.install(source) { Room.Enough }
        assertEquals((files.keys + "manifest.json"), folder.list()!!.toSet())
        assertEquals(listOf(folder), root.listFiles()!!.toList())
    }

    @Test
    fun withoutRoomNothingIsWritten() {
        val error = assertFailsWith<NoRoom> {
            store.install(zip(files + ("manifest.json" to manifest(files)))) { Room.NoDisk(5) }
        }
        assertEquals(Room.NoDisk(5), error.room)
        assertNull(root.listFiles())
    }

    @Test
    fun theJournalIsWholeOrOld() {
        root.mkdirs()
        val journal = Journal(File(root, "conversation.json"))
        assertNull(journal.read())
        val entry = Entry(
            listOf(Turn(USER, listOf(Piece(Kind.VERIFIED, "Why?\n\"x\"")))),
            listOf(Piece(Kind.VERIFIED, "So"), Piece(Kind.PROVISIONAL, " é\uD83D\uDE00")), """{"version":1}""",
        )
        journal.write(entry)
        assertEquals(entry, journal.read())
        File(root, "conversation.json.new").writeText("half of a later")
        assertEquals(entry, journal.read())
        val text = File(root, "conversation.json").readText()
        val other = text.replace("\"VERIFIED\"", "\"SURE\"")
        for (broken in listOf("", text.dropLast(9), "[]", other, text.replace(":1,", ":9,"))) {
            File(root, "conversation.json").writeText(broken)
            assertNull(journal.read(), broken)
        }
    }
}
