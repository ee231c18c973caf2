package dev.outrider.core.bundle

import java.io.Closeable
import java.io.File
import java.io.IOException
import java.net.InetAddress
import java.net.ServerSocket
import java.net.Socket
import java.nio.file.Files
import java.util.concurrent.CopyOnWriteArrayList
import kotlin.concurrent.thread
import kotlin.random.Random
import kotlin.test.AfterTest
import kotlin.test.Test
import kotlin.test.assertContentEquals
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertFalse
import kotlin.test.assertTrue
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking

class DownloadTest {
    private val root = Files.createTempDirectory("download").toFile()
    private val folder = File(root, "bundle")
    private val files =
        mapOf("a.bin" to Random(1).nextBytes(300_000), "b.txt" to ByteArray(0), "c" to ByteArray(70_000))
    private val server = FileServer()

    private fun manifestOf(files: Map<String, ByteArray>, more: Map<String, Any> = emptyMap()) = Json.write(
        mapOf("files" to files.mapValues { (_, data) ->
            mapOf("bytes" to data.size.toLong(), "sha256" to sha256(data.inputStream()))
        }) + more,
    ).toByteArray()

    init {
        val understudy = manifestOf(mapOf("u" to ByteArray(9)))
        val named = mapOf("folder" to "understudy", "manifest_sha256" to sha256(understudy.inputStream()))
        server.files += files + mapOf(MANIFEST to manifestOf(files, mapOf("understudy" to named)))
        server.files += mapOf("understudy/$MANIFEST" to understudy, "understudy/u" to ByteArray(9))
    }

    @AfterTest
    fun close() {
        server.close()
        root.deleteRecursively()
    }

    private fun download(understudy: Boolean = false, progress: (Long, Long) -> Unit = { _, _ -> }) =
        runBlocking { downloadBundle(server.url, folder, understudy, progress = progress) }

    private fun assertWhole() {
        for ((name, data) in files) assertContentEquals(data, File(folder, name).readBytes(), name)
        assertFalse(File(root, "bundle.part").exists())
    }

    @Test
    fun everyFileComesOnceWithItsUnderstudy() {
        val seen = ArrayList<Pair<Long, Long>>()
        download(understudy = true) { done, all -> seen += done to all }
        assertWhole()
        assertEquals(9, File(folder, "understudy/u").length())
        assertEquals(370_009L to 370_009L, seen.last())
        assertEquals(seen.map { it.first }.sorted(), seen.map { it.first })
        server.asked.clear()
        download(understudy = true)
        assertEquals(listOf(MANIFEST, "understudy/$MANIFEST"), server.asked.toList())
    }

    @Test
    fun twentyCutsAreContinued() {
        server.cutsLeft = 20
        server.cutAfter = 15_000
        download()
        assertWhole()
        assertEquals(0, server.cutsLeft)
        assertTrue(server.sent < 370_000 + 20 * 15_000, "what had come was fetched again: ${server.sent}")
    }

    @Test
    fun aServerThatIgnoresRangesIsReadFromTheBeginning() {
        server.ranges = false
        server.cutsLeft = 2
        server.cutAfter = 200_000
        download()
        assertWhole()
    }

    @Test
    fun aServerThatRefusesRangesAndCutsEachTimeIsGivenUp() {
        server.refusesRanges = true
        server.cutsLeft = Int.MAX_VALUE
        server.cutAfter = 200_000
        assertTrue("try again" in assertFailsWith<BundleError> { download() }.message!!)
        assertFalse(folder.exists())
    }

    @Test
    fun theNextCallContinuesAndChecksWhatItFinds() {
        val part = File(root, "bundle.part").apply { mkdirs() }
        File(part, "a.bin").writeBytes(files.getValue("a.bin").copyOf(100_000))
        File(part, "c").writeBytes(ByteArray(5) { 7 }) // of another version
        File(part, "old").writeBytes(ByteArray(5))
        download()
        assertWhole()
        assertFalse(File(folder, "old").exists())
        assertEquals(listOf(MANIFEST, "a.bin 100000", "b.txt", "c 5", "c"), server.asked.toList())
    }

    @Test
    fun aWrongHashIsOneLineAndNothingHalf() {
        server.files["c"] = ByteArray(70_000) { 1 }
        val error = assertFailsWith<BundleError> { download() }
        assertTrue("c differs from its sha256" in error.message!! && '\n' !in error.message!!, error.message)
        assertFalse(folder.exists())
        server.files["c"] = files.getValue("c")
        download()
        assertWhole()
    }

    @Test
    fun anotherVersionReplacesTheBundleOnlyWhole() {
        download()
        val newer = files + ("c" to ByteArray(10))
        server.files += newer + (MANIFEST to manifestOf(newer))
        server.files -= "c"
        assertTrue("HTTP 404" in assertFailsWith<BundleError> { download() }.message!!)
        assertEquals(70_000, File(folder, "c").length())
        server.files["c"] = ByteArray(10)
        download()
        assertEquals(10, File(folder, "c").length())
    }

    @Test
    fun whatNeverFitsIsRefusedBeforeItIsFetched() {
        val entry = mapOf("bytes" to Long.MAX_VALUE / 4, "sha256" to "00")
        server.files[MANIFEST] = Json.write(mapOf("files" to mapOf("huge" to entry))).toByteArray()
        assertTrue("are free; make room" in assertFailsWith<BundleError> { download() }.message!!)
        assertEquals(listOf(MANIFEST), server.asked.toList())
        for (text in listOf("""{"files": {"../x": {"bytes": 1, "sha256": ""}}}""", "{}", "<html>")) {
            server.files[MANIFEST] = text.toByteArray()
            assertFailsWith<BundleError>(text) { download() }
        }
    }

    @Test
    fun clearTextComesFromThisMachineAlone(): Unit = runBlocking {
        for (url in listOf("http://192.0.2.1/bundle", "http://example.org")) {
            assertFailsWith<BundleError> { downloadBundle(url, folder) }
        }
    }

    @Test
    fun cancellingKeepsWhatHasCome() {
        runBlocking {
            val job = launch { downloadBundle(server.url, folder) { done, _ -> if (done > 100_000) cancel() } }
            job.join()
            assertTrue(job.isCancelled)
        }
        assertFalse(folder.exists())
        assertTrue(File(root, "bundle.part/a.bin").length() > 100_000)
        download()
        assertWhole()
    }
}

/** Serves [files] on loopback, with the faults that its fields say. */
private class FileServer : Closeable {
    private val server = ServerSocket(0, 50, InetAddress.getLoopbackAddress())
    val url = "http://127.0.0.1:${server.localPort}/some/bundle"
    val files = HashMap<String, ByteArray>()

    /** Names of files, each with where its range began. */
    val asked = CopyOnWriteArrayList<String>()
    @Volatile
    var cutsLeft = 0
    var cutAfter = 0
    var ranges = true
    var refusesRanges = false

    @Volatile
    var sent = 0

    init {
        thread(isDaemon = true) {
            try {
                while (true) server.accept().use(::answer)
            } catch (_: IOException) {
                // closed
            }
        }
    }

    private fun answer(socket: Socket) = try {
        val head = socket.getInputStream().bufferedReader().lineSequence().takeWhile { it.isNotEmpty() }.toList()
        val name = head.first().split(' ')[1].removePrefix("/some/bundle/")
        val begin = head.firstOrNull { it.startsWith("Range: bytes=") }?.substringAfter('=')?.trimEnd('-')?.toInt()
        asked += listOfNotNull(name, begin).joinToString(" ")
        val data = files[name]
        val from = if (ranges) begin ?: 0 else 0
        val status = when {
            data == null -> "404 Not Found"
            refusesRanges && from > 0 -> "416 Range Not Satisfiable"
            from > 0 -> "206 Partial Content\r\nContent-Range: bytes $from-${data.size - 1}/${data.size}"
            else -> "200 OK"
        }
        val body = data?.let { it.copyOfRange(from, it.size) } ?: ByteArray(0)
        val length = "Content-Length: ${body.size}\r\nConnection: close\r\n\r\n"
        val cut = body.size > cutAfter && cutAfter > 0 && cutsLeft > 0
        if (cut) cutsLeft--
        val shown = if (cut) body.copyOf(cutAfter) else body
        socket.getOutputStream().write("HTTP/1.1 $status\r\n$length".toByteArray() + shown)
        sent += shown.size
    } catch (_: IOException) {
        // the client has gone
    }

    override fun close() = server.close()
}
