// An app's use of the AAR, as docs/embedding.md describes it; test_aar.py compiles it against what the AAR and its POM give.
package com.example.consumer

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.protocol.Opened
import dev.outrider.core.protocol.decodeServer
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.core.runtime.Request
import dev.outrider.engines.openEngine
import java.io.File
import kotlinx.coroutines.flow.last
import kotlinx.coroutines.runBlocking

/** Arguments: a frame in hexadecimal digits; a bundle's folder and a question, if any; the verifier's address, if any. */
fun main(arguments: Array<String>) {
    val frame = ByteArray(arguments[0].length / 2) { arguments[0].substring(2 * it, 2 * it + 2).toInt(16).toByte() }
    val message = decodeServer(frame)
    if (message is Opened) println("${message.stream} ${message.committed} ${message.cached}")
    if (arguments.size > 1) {
        val bundle = Bundle.open(File(arguments[1]))
        val last: Event = EdgeRuntime(bundle, openEngine(bundle, threads = 1), arguments.getOrNull(3)).use { runtime ->
            runtime.start()
            runBlocking { runtime.generate(arguments[2], Request(maxNewTokens = 40)).last() }
        }
        if (last is Finished) println(last.tokenIds.joinToString(" "))
    }
}
