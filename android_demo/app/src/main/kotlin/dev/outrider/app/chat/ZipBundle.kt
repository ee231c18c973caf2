package dev.outrider.app.chat

import dev.outrider.core.runtime.BundleError
import java.io.InputStream
import java.util.zip.ZipEntry
import java.util.zip.ZipException
import java.util.zip.ZipInputStream

/**
 * A zipped bundle folder, as a user picks one: the files at the top or in one folder. [open] is called for each pass
 * over it. Only names count, so an entry's path leads nowhere.
 */
class ZipBundle(private val open: () -> InputStream) : BundleSource {
    override fun manifest(): String {
        var text: String? = null
        each { name, stream -> if (name == "manifest.json" && text == null) text = manifestText(stream) }
        return text ?: throw BundleError("the file is not a zipped bundle: it has no manifest.json")
    }

    override fun read(take: (name: String, stream: InputStream) -> Unit) = each(take)

    private fun each(take: (name: String, stream: InputStream) -> Unit) {
        try {
            ZipInputStream(open().buffered()).use { zip ->
                generateSequence<ZipEntry> { zip.nextEntry }.filterNot { it.isDirectory }.forEach { entry ->
                    take(entry.name.substringAfterLast('/').substringAfterLast('\\'), zip)
                }
            }
        } catch (error: ZipException) {
            throw BundleError("the file does not unzip: ${error.message}; download it again")
        }
    }
}
