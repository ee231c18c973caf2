/** Fetches a bundle over HTTP: file by file, each held to its hash, continued where it was interrupted. */
package dev.outrider.core.bundle

import dev.outrider.core.link.LOOPBACK
import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.net.HttpURLConnection
import java.net.URL
import javax.net.ssl.HttpsURLConnection
import javax.net.ssl.SSLSocketFactory
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.delay
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.withContext
import kotlin.coroutines.coroutineContext

private const val PART = ".part"
private const val TIMEOUT_MILLIS = 15_000
private const val MANIFEST_BYTES = 1L shl 20

/** Failures in a row, without a new byte between them, after which a download ends. */
private const val FAILURES = 7
private const val PAUSE_MILLIS = 100L

/** Of requests that may succeed later: a time-out, a range that the file does not have any more, too many at once. */
private val PASSING = setOf(408, 416, 429)

/**
 * Bring the bundle whose files lie at [url], such as `https://example.com/bundle`, into [folder], and with [understudy]
 * the understudy that it names. Then [Bundle.open] opens it.
 *
 * What has come is kept in a folder beside it, whose name ends in ".part"; the next call continues there, as this one
 * does after a cut. [folder] itself is whole or untouched. What is there already is not fetched again. [progress] gets
 * the bytes that have come and those of all files. [tls]: whom to trust; null: whom the system trusts. Raises
 * [BundleError], one line, for an address without TLS on another machine, a file that differs from its hash, too little
 * room and a server that cannot be reached. Cancelling ends it within seconds.
 */
public suspend fun downloadBundle(
    url: String,
    folder: File,
    understudy: Boolean = false,
    tls: SSLSocketFactory? = null,
    progress: (done: Long, all: Long) -> Unit = { _, _ -> },
): Unit = withContext(Dispatchers.IO) {
    val address = URL(url.trimEnd('/') + "/")
    if (address.protocol != "https" && address.host.removeSurrounding("[", "]") !in LOOPBACK) {
        throw BundleError("$url would not show who sends the bundle; use https://")
    }
    val source = HttpFolder(address, tls)
    val manifest = source.manifest()
    val named = if (understudy) (manifest.raw as Map<*, *>)["understudy"] else null
    if (named == null) return@withContext source.download(manifest, folder) { progress(it, manifest.bytes) }
    val name = named.field<String>("folder").also(::checkPlain)
    val second = HttpFolder(URL(address, "$name/"), tls)
    val secondManifest = second.manifest()
    if (sha256(secondManifest.text.byteInputStream()) != named.field<String>("manifest_sha256")) {
        throw BundleError("$address$name/$MANIFEST differs from its sha256 in the manifest; try again later")
    }
    val all = manifest.bytes + secondManifest.bytes
    source.download(manifest, folder) { progress(it, all) }
    second.download(secondManifest, File(folder, name)) { progress(manifest.bytes + it, all) }
}

/** The files that a manifest lists. */
private class FileList(val text: String) {
    val raw: Any? = Json.parse(text)
    val files = raw.field<Map<String, Any?>>("files").onEach { (name, _) -> checkPlain(name) }
    val bytes = files.values.sumOf { it.field<Long>("bytes") }
}

private fun checkPlain(name: String) {
    val plain = name.isNotEmpty() && File(name).name == name && name !in setOf(".", "..", MANIFEST)
    if (!plain) throw BundleError("the manifest names $name, which is not a plain file name")
}

/** A folder of files at [address]. */
private class HttpFolder(private val address: URL, private val tls: SSLSocketFactory?) {
    suspend fun manifest(): FileList {
        val file = File.createTempFile("manifest", PART)
        try {
            file.delete() // it is fetched from its first byte on
            fetch(MANIFEST, file, MANIFEST_BYTES) {}
            return FileList(file.readText())
        } catch (error: IllegalArgumentException) { // JSON says what is wrong in this way
            throw BundleError("$address$MANIFEST is not a bundle's manifest: ${error.message}")
        } finally {
            file.delete()
        }
    }

    /** Bring all files of [manifest] into [folder]. progress: gets the bytes that have come. */
    suspend fun download(manifest: FileList, folder: File, progress: (Long) -> Unit) {
        val there = File(folder, MANIFEST)
        if (there.isFile && there.readText() == manifest.text) return progress(manifest.bytes)
        val part = File(folder.absoluteFile.parentFile, folder.name + PART)
        if (!part.isDirectory && !part.mkdirs()) throw BundleError("$part cannot be made")
        for (file in part.listFiles().orEmpty()) if (file.name !in manifest.files) file.deleteRecursively()
        val missing = manifest.bytes - manifest.files.keys.sumOf { File(part, it).length() }
        if (part.usableSpace < missing) {
            throw BundleError("$folder needs $missing bytes and ${part.usableSpace} are free; make room and try again")
        }
        var done = 0L
        for ((name, entry) in manifest.files) {
            val bytes = entry.field<Long>("bytes")
            hold(name, File(part, name), bytes, entry.field("sha256")) { progress(done + it) }
            done += bytes
        }
        File(part, MANIFEST).writeText(manifest.text)
        // otherwise a crash of the system may leave zeros in files of a folder that counts as whole
        for (name in manifest.files.keys + MANIFEST) FileOutputStream(File(part, name), true).use { it.fd.sync() }
        folder.deleteRecursively()
        if (!part.renameTo(folder)) throw BundleError("$part cannot be renamed to $folder")
    }

    /** Bring one file. What was begun before may belong to another version, so it is begun anew once. */
    private suspend fun hold(name: String, to: File, bytes: Long, sha256: String, progress: (Long) -> Unit) {
        val continued = to.length() > 0
        if (to.length() > bytes) to.delete()
        if (to.length() < bytes || bytes == 0L) fetch(name, to, bytes, progress)
        if (to.length() == bytes && sha256(to) == sha256) return progress(bytes)
        to.delete()
        if (!continued) throw BundleError("$address$name differs from its sha256 in the manifest; try again later")
        hold(name, to, bytes, sha256, progress)
    }

    /** Fetch on behind what [to] holds, [most] bytes at most in all, through as many cuts as bring something. */
    private suspend fun fetch(name: String, to: File, most: Long, progress: (Long) -> Unit) {
        var failures = 0
        var furthest = to.length()
        while (true) {
            try {
                return receive(name, to, most, progress)
            } catch (error: IOException) {
                failures = if (to.length() > furthest) 0 else failures + 1
                furthest = maxOf(furthest, to.length())
                if (failures == FAILURES) throw BundleError("$address$name: ${error.message}; try again", error)
            }
            delay(PAUSE_MILLIS shl failures)
        }
    }

    private suspend fun receive(name: String, to: File, most: Long, progress: (Long) -> Unit) {
        val begin = to.length()
        val connection = URL(address, name).openConnection() as HttpURLConnection
        if (tls != null && connection is HttpsURLConnection) connection.sslSocketFactory = tls
        connection.connectTimeout = TIMEOUT_MILLIS
        connection.readTimeout = TIMEOUT_MILLIS
        connection.setRequestProperty("Accept-Encoding", "identity")
        if (begin > 0) connection.setRequestProperty("Range", "bytes=$begin-")
        try {
            val status = connection.responseCode
            if (status == 416) to.delete()
            if (status in 400..499 && status !in PASSING) {
                throw BundleError("$address$name: HTTP $status; is the bundle at this address?")
            }
            if (status >= 300) throw IOException("HTTP $status")
            val continues = status == 206 && "bytes $begin-" in connection.getHeaderField("Content-Range").orEmpty()
            if (status == 206 && !continues) throw IOException("the server sent another range")
            val length = connection.getHeaderField("Content-Length")?.toLongOrNull()
            connection.inputStream.use { input ->
                FileOutputStream(to, continues).use { output ->
                    val buffer = ByteArray(1 shl 16)
                    var size = if (continues) begin else 0
                    val end = length?.let { size + it }
                    while (true) {
                        coroutineContext.ensureActive()
                        val read = input.read(buffer)
                        if (read < 0 && end != null && size < end) throw IOException("the connection was cut")
                        if (read < 0) return
                        size += read
                        if (size > most) throw BundleError("$address$name is longer than $most bytes; try later")
                        output.write(buffer, 0, read)
                        progress(size)
                    }
                }
            }
        } finally {
            connection.disconnect()
        }
    }
}
