package dev.outrider.app.chat

import dev.outrider.core.bundle.BundleError
import java.io.InputStream
import java.util.zip.ZipEntry
import java.util.zip.ZipException
import java.util.zip.ZipInputStream

/**
 * A zipped bundle folder, as a user picks one: the files at the top or in one folder, an understudy's in a folder
 * there. [open] is called for each pass over it. Only names of files and of their folders are used, so an entry's path
 * cannot lead outside.
 */
class ZipBundle(private val open: () -> InputStream) : BundleSource {
    override fun manifest(folder: String): String? {
        var text: String? = null
        var depth = Int.MAX_VALUE
        each { path, stream -> // the bundle's own manifest is the topmost one
            val parts = path.split('/')
            val fits = folder.isEmpty() || parts.size > 1 && parts[parts.size - 2] == folder
            if (parts.last() == "manifest.json" && fits && parts.size < depth) {
                depth = parts.size
                text = manifestText(stream)
            }
        }
        return text
    }

    override fun read(take: (path: String, stream: InputStream) -> Unit) = each { path, stream ->
        take(path.split('/').takeLast(2).joinToString("/"), stream)
    }

    private fun each(take: (name: String, stream: InputStream) -> Unit) {
        try {
            ZipInputStream(open().buffered()).use { zip ->
                generateSequence<ZipEntry> { zip.nextEntry }.filterNot { it.isDirectory }.forEach { entry ->
                    take(entry.name.replace('\\', '/'), zip)
                }
            }
        } catch (error: ZipException) {
            throw BundleError("the file does not unzip: ${error.message}; download it again")
        }
    }
}
