package dev.outrider.app.chat

import dev.outrider.core.runtime.BundleError
import dev.outrider.core.runtime.Json
import dev.outrider.core.runtime.JsonError
import java.io.File
import java.io.IOException
import java.io.InputStream
import java.security.MessageDigest

private const val MANIFEST = "manifest.json"
private const val MANIFEST_BYTES = 1 shl 20
private const val PART = ".part"

/** There is too little room for the bundle. */
class NoRoom(val room: Room) : Exception("no room: $room")

/**
 * The bundles that the app has copied to its private files, one folder each under [root]. A folder is complete or not
 * there: copies grow aside and are renamed when every byte has its hash.
 */
class BundleStore(val root: File) {
    /** The folder of bundle [name], as [install] named it; null if it is gone. */
    fun find(name: String): File? = File(root, name).takeIf { File(it, MANIFEST).isFile }

    /**
     * The folder with the bundle of [source], copied if it is not there yet. [room] is asked before the first byte is
     * written. May take seconds. Raises [BundleError] for what is not a bundle, [NoRoom], or [IOException].
     */
    fun install(source: BundleSource, room: (Needs) -> Room): File {
        val text = source.manifest()
        val listing = Listing.parse(text)
        val folder = File(root, "bundle-" + digest().run { digest(text.toByteArray()) }.hex().take(16))
        if (File(folder, MANIFEST).isFile) return folder
        val found = room(listing.needs)
        if (found != Room.Enough) throw NoRoom(found)
        val part = File(root, folder.name + PART)
        part.deleteRecursively()
        if (!part.mkdirs()) throw IOException("$part cannot be made")
        try {
            copy(source, listing, part)
            File(part, MANIFEST).writeText(text)
            folder.deleteRecursively()
            if (!part.renameTo(folder)) throw IOException("$part cannot be renamed")
        } finally {
            part.deleteRecursively()
        }
        return folder
    }

    /** What the bundle in [folder] takes. Raises [BundleError]. */
    fun needs(folder: File): Needs = Listing.parse(File(folder, MANIFEST).readText()).needs

    /** Delete every bundle but [used]. */
    fun keepOnly(used: File) {
        for (folder in root.listFiles().orEmpty()) if (folder != used) folder.deleteRecursively()
    }

    private fun copy(source: BundleSource, listing: Listing, part: File) {
        val left = listing.files.toMutableMap()
        source.read { name, stream ->
            left.remove(name)?.let { copy(stream, File(part, name), it) }
        }
        if (left.isNotEmpty()) throw BundleError("the bundle has no ${left.keys.first()}; copy the whole folder")
    }

    private fun copy(stream: InputStream, to: File, entry: Listing.Entry) {
        val hash = digest()
        var bytes = 0L
        to.outputStream().use { out ->
            val buffer = ByteArray(1 shl 16)
            while (true) {
                val count = stream.read(buffer).takeIf { it >= 0 } ?: break
                bytes += count
                if (bytes > entry.bytes) break // whatever more comes is not this file
                hash.update(buffer, 0, count)
                out.write(buffer, 0, count)
            }
        }
        if (bytes != entry.bytes || hash.digest().hex() != entry.sha256) {
            throw BundleError("${to.name} differs from the manifest; download the bundle again")
        }
    }

    private fun digest() = MessageDigest.getInstance("SHA-256")

    private fun ByteArray.hex() = joinToString("") { (it.toInt() and 0xFF).toString(16).padStart(2, '0') }
}

/** Where a bundle comes from. */
interface BundleSource {
    /** The text of manifest.json. Raises [BundleError] where there is none. */
    fun manifest(): String

    /** Hands every file to [take], in any order; the stream is valid during the call alone. */
    fun read(take: (name: String, stream: InputStream) -> Unit)
}

/** Reads at most as much as a manifest may have. */
internal fun manifestText(stream: InputStream): String {
    val buffer = ByteArray(MANIFEST_BYTES)
    var size = 0
    while (size < buffer.size) size += stream.read(buffer, size, buffer.size - size).takeIf { it >= 0 } ?: break
    if (size == buffer.size) throw BundleError("$MANIFEST is too long to be one")
    return String(buffer, 0, size, Charsets.UTF_8)
}

/** What a manifest says of files, as far as copying needs it; [dev.outrider.core.runtime.Bundle] checks the rest. */
internal class Listing(val files: Map<String, Entry>, val needs: Needs) {
    class Entry(val bytes: Long, val sha256: String)

    companion object {
        fun parse(text: String): Listing {
            val raw = try {
                Json.parse(text) as? Map<*, *>
            } catch (error: JsonError) {
                throw BundleError("$MANIFEST does not parse: ${error.message}; export the bundle again")
            }
            val files = (raw?.get("files") as? Map<*, *>).orEmpty().map { (name, entry) -> parse(name, entry) }.toMap()
            if (files.isEmpty()) throw BundleError("$MANIFEST lists no files; export the bundle again")
            val weights = (raw?.get("engines") as? Map<*, *>).orEmpty().values.maxOfOrNull { engine ->
                listOf("file", "data").sumOf { key -> files[(engine as? Map<*, *>)?.get(key)]?.bytes ?: 0 }
            }
            return Listing(files, Needs(files.values.sumOf { it.bytes }, weights ?: 0))
        }

        private fun parse(name: Any?, entry: Any?): Pair<String, Entry> {
            val bytes = (entry as? Map<*, *>)?.get("bytes") as? Long
            val sha256 = (entry as? Map<*, *>)?.get("sha256") as? String
            val plain = name is String && name.isNotEmpty() && File(name).name == name && name != "." && name != ".."
            if (!plain || name == MANIFEST || bytes == null || bytes < 0 || sha256 == null) {
                throw BundleError("$MANIFEST does not belong to a bundle; export the bundle again")
            }
            return name to Entry(bytes, sha256)
        }
    }
}
