package dev.outrider.testing

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.ChatTemplate
import dev.outrider.core.bundle.Manifest
import dev.outrider.core.bundle.Tokenizer
import java.io.File

internal const val EOS = 2
private const val FIRST = 3

/** Token [FIRST] + n is the byte n of UTF-8. */
private object Bytes : Tokenizer {
    override fun encode(text: String) = text.toByteArray().map { FIRST + (it.toInt() and 0xFF) }

    override fun decode(ids: List<Int>) =
        String(ids.filter { it >= FIRST }.map { (it - FIRST).toByte() }.toByteArray())
}

/**
 * A bundle without files, for tests: a token is a byte of UTF-8, a prompt has a line for each message, such as `user:
 * Why?`. [maxContext]: most tokens of a conversation and its answer.
 */
public fun fakeBundle(maxContext: Int = 1024): Bundle {
    val manifest = Manifest("fake", "target", "drafter", FIRST + 256, setOf(EOS), maxContext, 1, 1, 2, emptyMap())
    val template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return Bundle(File("."), manifest, Bytes, IntArray(256) { FIRST + it }, null, template, emptyMap())
}
