package dev.outrider.core

import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.SubwordTokenizer
import java.io.File

/** `Tokenizers FILE`: for each text of standard input, one JSON string a line, its token ids and their text. */
fun main(arguments: Array<String>) {
    val tokenizer = SubwordTokenizer.parse(File(arguments[0]).readText())
    val out = System.out.bufferedWriter()
    for (line in generateSequence(System.`in`.bufferedReader()::readLine)) {
        val ids = tokenizer.encode(Json.parse(line) as String)
        out.appendLine(Json.write(listOf(ids, tokenizer.decode(ids))))
    }
    out.flush()
}
