package dev.outrider.app.chat

import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.JsonError
import java.io.File
import java.io.FileOutputStream
import java.io.IOException

private const val VERSION = 1L

/** The state that outlives the process. record: of the answer in progress, from the library; [reply]: its text. */
data class Entry(val turns: List<Turn>, val reply: List<Piece> = emptyList(), val record: String? = null)

/** Keeps one [Entry] in [file], whole or not at all. Blocks: do not use it on an app's main thread. */
class Journal(private val file: File) {
    /** Raises [IOException]. */
    fun write(entry: Entry) {
        val aside = File(file.path + ".new")
        FileOutputStream(aside).use {
            it.write(toJson(entry).toByteArray())
            it.fd.sync() // otherwise a crash of the system may leave an empty file after the rename
        }
        if (!aside.renameTo(file)) throw IOException("$aside cannot be renamed")
    }

    /** Return the last entry; null if there is no readable one. */
    fun read(): Entry? = try {
        if (file.isFile) parse(file.readText()) else null
    } catch (_: JsonError) {
        null
    } catch (_: IllegalArgumentException) {
        null
    }

    private fun toJson(entry: Entry) = Json.write(
        mapOf(
            "version" to VERSION,
            "turns" to entry.turns.map { mapOf("role" to it.role, "pieces" to it.pieces.map(::row)) },
            "reply" to entry.reply.map(::row), "record" to entry.record,
        ),
    )

    private fun row(piece: Piece) = listOf(piece.kind.name, piece.text)

    private fun parse(json: String): Entry {
        val fields = Json.parse(json) as? Map<*, *>
        require(fields?.get("version") == VERSION) { "a journal of another version" }
        return Entry(
            (fields["turns"] as? List<*>).orEmpty().map { turn ->
                Turn((turn as? Map<*, *>)?.get("role") as? String ?: "", pieces((turn as? Map<*, *>)?.get("pieces")))
            },
            pieces(fields["reply"]), fields["record"] as? String,
        )
    }

    private fun pieces(rows: Any?): List<Piece> = (rows as? List<*>).orEmpty().map { row ->
        val (kind, text) = (row as? List<*>)?.takeIf { it.size == 2 } ?: throw JsonError("no piece of text")
        Piece(Kind.valueOf(kind as? String ?: ""), text as? String ?: throw JsonError("no text"))
    }
}
