package dev.outrider.core.bundle

import dev.outrider.core.protocol.REPLACEMENT

private val BYTE = Regex("<0x([0-9A-Fa-f]{2})>")

/** Turns tokens into pieces of text. */
internal fun interface TokenDecoder {
    fun decode(tokens: List<String>): List<String>

    companion object {
        /** Make one from tokenizer.json's `decoder`. Raises [TokenizerError]. */
        fun of(row: Map<String, Any?>): TokenDecoder = when (val type = row.field<String>("type")) {
            "Sequence" -> {
                val steps = row.field<List<Map<String, Any?>>>("decoders").map(::of)
                TokenDecoder { tokens -> steps.fold(tokens) { pieces, step -> step.decode(pieces) } }
            }
            "ByteLevel" -> TokenDecoder { tokens ->
                val bytes = ByteBuffer8()
                for (token in tokens) ByteLevel.bytes(token, bytes)
                listOf(decodeUtf8(bytes.array, bytes.size))
            }
            "ByteFallback" -> TokenDecoder(::withoutBytes)
            "Fuse" -> TokenDecoder { listOf(it.joinToString("")) }
            "Replace" -> {
                val pattern = PreTokenizer.pattern(row)
                val content = Regex.escapeReplacement(row.field("content"))
                each { pattern.replace(it, content) }
            }
            "Strip" -> {
                val content = row.field<String>("content").single()
                val (start, stop) = row.int("start") to row.int("stop")
                each { token ->
                    val cut = token.drop(token.take(start).takeWhile { it == content }.length)
                    cut.dropLast(cut.takeLast(stop).takeLastWhile { it == content }.length)
                }
            }
            "Metaspace" -> {
                val mark = row.field<String>("replacement").single()
                val kept = PreTokenizer.scheme(row) == "never"
                TokenDecoder { tokens ->
                    tokens.mapIndexed { place, token ->
                        if (place == 0 && !kept) token.filter { it != mark } else token.replace(mark, ' ')
                    }
                }
            }
            else -> throw TokenizerError("tokenizer.json has decoder $type, which is not known here")
        }

        private fun each(change: (String) -> String) = TokenDecoder { it.map(change) }

        /** Replace runs of byte tokens by the text that they spell, or by one U+FFFD each if that is not valid. */
        private fun withoutBytes(tokens: List<String>): List<String> {
            val pieces = ArrayList<String>()
            val run = ArrayList<Byte>()
            fun end() {
                val bytes = run.toByteArray()
                val text = decodeUtf8(bytes, bytes.size)
                if (text.toByteArray().contentEquals(bytes)) pieces += text else run.mapTo(pieces) { "$REPLACEMENT" }
                run.clear()
            }
            for (token in tokens) {
                val byte = BYTE.matchEntire(token)?.let { it.groupValues[1].toInt(16).toByte() }
                if (byte != null) {
                    run += byte
                } else {
                    end()
                    pieces += token
                }
            }
            end()
            return pieces
        }
    }
}
