package dev.outrider.app.chat

import dev.outrider.core.bundle.BundleError
import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.JsonError
import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.io.InputStream
import java.security.MessageDigest

private const val MANIFEST = "manifest.json"
private const val MANIFEST_BYTES = 1 shl 20
private const val PART = ".part"

/** There is too little room for the bundle. */
class NoRoom(val room: Room) : Exception("no room: $room")

/**
 * The bundles that the app has copied to its private files, one folder each under [root]. A folder is complete or
 * missing: copies are made in another folder and renamed once every hash is checked.
 */
class BundleStore(val root: File) {
    /** Return the folder of bundle [name], as [install] named it; null if it is gone. */
    fun find(name: String): File? = File(root, name).takeIf { File(it, MANIFEST).isFile }

    /**
     * Return the folder with the bundle of [source], and with its understudy if [source] has one. Missing parts are
     * copied. [room] is called before the first byte is written. May take seconds. Raises [BundleError] if it is not a
     * bundle, [NoRoom], or [IOException].
     */
    fun install(source: BundleSource, room: (Needs) -> Room): File {
        val text = source.manifest() ?: throw BundleError("the file is not a zipped bundle: it has no $MANIFEST")
        val listing = Listing.parse(text)
        val folder = File(root, "bundle-" + hash(text).take(16))
        val new = if (File(folder, MANIFEST).isFile) emptyList() else listOf(Copied("", text, listing))
        val copied = new + listOfNotNull(listing.understudy?.let { understudyOf(source, it, folder) })
        if (copied.isEmpty()) return folder
        val files = copied.sumOf { it.listing.needs.files }
        val found = room(Needs(files, listing.needs.weights))
        if (found != Room.Enough) throw NoRoom(found)
        val part = File(root, folder.name + PART)
        part.deleteRecursively()
        try {
            copy(source, copied, part)
            if (new.isNotEmpty()) move(part, folder) else for (one in copied) {
                move(File(part, one.folder), File(folder, one.folder))
            }
        } finally {
            part.deleteRecursively()
        }
        return folder
    }

    /** Return the understudy to copy from [source] into [bundle]; null if it is there already, or not in the source. */
    private fun understudyOf(source: BundleSource, entry: Listing.Understudy, bundle: File): Copied? {
        if (File(File(bundle, entry.folder), MANIFEST).isFile) return null
        val text = source.manifest(entry.folder) ?: return null
        if (hash(text) != entry.manifestSha256) throw differs("${entry.folder}/$MANIFEST")
        return Copied(entry.folder, text, Listing.parse(text))
    }

    /** Return the space that the bundle in [folder] takes. Raises [BundleError]. */
    fun needs(folder: File): Needs = Listing.parse(File(folder, MANIFEST).readText()).needs

    /** Delete every bundle but [used]. */
    fun keepOnly(used: File) {
        for (folder in root.listFiles().orEmpty()) if (folder != used) folder.deleteRecursively()
    }

    private fun copy(source: BundleSource, parts: List<Copied>, to: File) {
        val left = HashMap<String, Listing.Entry>()
        for (part in parts) {
            if (!part.within(to).mkdirs() && !part.within(to).isDirectory) throw IOException("$to cannot be made")
            for ((name, entry) in part.listing.files) left[part.path(name)] = entry
        }
        source.read { path, stream ->
            // files in other folders than the understudy's belong to the bundle itself
            val known = if (path in left) path else path.substringAfterLast('/')
            left.remove(known)?.let { copy(stream, File(to, known), it) }
        }
        if (left.isNotEmpty()) throw BundleError("the bundle has no ${left.keys.first()}; copy the whole folder")
        for (part in parts) File(part.within(to), MANIFEST).writeText(part.text)
    }

    private fun move(from: File, to: File) {
        // otherwise a crash of the system may leave zeros in files of a folder that counts as whole
        for (file in from.walk()) if (file.isFile) FileOutputStream(file, true).use { it.fd.sync() }
        to.deleteRecursively()
        if (!from.renameTo(to)) throw IOException("$from cannot be renamed")
    }

    private fun copy(stream: InputStream, to: File, entry: Listing.Entry) {
        val hash = digest()
        var bytes = 0L
        to.outputStream().use { out ->
            val buffer = ByteArray(1 shl 16)
            while (true) {
                val count = stream.read(buffer).takeIf { it >= 0 } ?: break
                bytes += count
                if (bytes > entry.bytes) break // further bytes do not belong to this file
                hash.update(buffer, 0, count)
                out.write(buffer, 0, count)
            }
        }
        if (bytes != entry.bytes || hash.digest().hex() != entry.sha256) {
            throw differs(to.name)
        }
    }

    private fun differs(name: String) = BundleError("$name differs from the manifest; download the bundle again")

    private fun digest() = MessageDigest.getInstance("SHA-256")

    private fun hash(text: String) = digest().digest(text.toByteArray()).hex()

    private fun ByteArray.hex() = joinToString("") { (it.toInt() and 0xFF).toString(16).padStart(2, '0') }
}

/** A folder to copy. folder: "" for the bundle's own, otherwise the name of one in it. */
private class Copied(val folder: String, val text: String, val listing: Listing) {
    fun within(bundle: File) = if (folder.isEmpty()) bundle else File(bundle, folder)

    fun path(name: String) = if (folder.isEmpty()) name else "$folder/$name"
}

/** The source of a bundle. */
interface BundleSource {
    /** Return the text of manifest.json in the bundle, or in its [folder]; null if there is none. */
    fun manifest(folder: String = ""): String?

    /**
     * Pass every file to [take], in any order; the stream is valid only during the call. path: the file's name, after
     * the name of its folder, if it is in one.
     */
    fun read(take: (path: String, stream: InputStream) -> Unit)
}

/** Read a manifest, but no more than its largest size. */
internal fun manifestText(stream: InputStream): String {
    val buffer = ByteArray(MANIFEST_BYTES)
    var size = 0
    while (size < buffer.size) size += stream.read(buffer, size, buffer.size - size).takeIf { it >= 0 } ?: break
    if (size == buffer.size) throw BundleError("$MANIFEST is too long to be one")
    return String(buffer, 0, size, Charsets.UTF_8)
}

/** The files that a manifest lists, for copying; [dev.outrider.core.bundle.Bundle] checks the rest. */
internal class Listing(val files: Map<String, Entry>, val needs: Needs, val understudy: Understudy?) {
    class Entry(val bytes: Long, val sha256: String)

    /** A folder beside the files, with a manifest of its own. */
    class Understudy(val folder: String, val manifestSha256: String)

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
            val understudy = (raw?.get("understudy") as? Map<*, *>)?.let(::understudy)
            return Listing(files, Needs(files.values.sumOf { it.bytes }, weights ?: 0), understudy)
        }

        private fun understudy(entry: Map<*, *>): Understudy {
            val folder = entry["folder"] as? String
            val sha256 = entry["manifest_sha256"] as? String
            if (folder == null || !plain(folder) || sha256 == null) throw noBundle()
            return Understudy(folder, sha256)
        }

        private fun parse(name: Any?, entry: Any?): Pair<String, Entry> {
            val bytes = (entry as? Map<*, *>)?.get("bytes") as? Long
            val sha256 = (entry as? Map<*, *>)?.get("sha256") as? String
            if (name !is String || !plain(name) || name == MANIFEST || bytes == null || bytes < 0 || sha256 == null) {
                throw noBundle()
            }
            return name to Entry(bytes, sha256)
        }

        private fun plain(name: String) = name.isNotEmpty() && File(name).name == name && name != "." && name != ".."

        private fun noBundle() = BundleError("$MANIFEST does not belong to a bundle; export the bundle again")
    }
}
