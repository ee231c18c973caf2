// An app's use of the AAR, as docs/embedding.md describes it; test_aar.py compiles it against what the AAR and its POM give.
package com.example.consumer

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.Shown
import dev.outrider.core.protocol.OutriderError
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.core.runtime.Options
import dev.outrider.core.runtime.Request
import dev.outrider.engines.openEngine
import java.io.File
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.runBlocking

/** Arguments: a bundle's folder and a question; the verifier's address, if any. Prints tokens. */
fun main(arguments: Array<String>) = runBlocking {
    val bundle = try {
        Bundle.open(File(arguments[0]))
    } catch (error: OutriderError) {
        return@runBlocking println(error.message)
    }
    val options = Options(logger = { message, error -> System.err.println("$message ${error ?: ""}") })
    val runtime = EdgeRuntime(bundle, openEngine(bundle, threads = 1), arguments.getOrNull(2), options)
    val shown = Shown()
    val events: List<Event> = runtime.generate(arguments[1], Request(maxNewTokens = 40)).toList()
    for (event in events) {
        shown.add(event)
        if (event is Finished) println(event.tokenIds.joinToString(" "))
        if (event is Finished) check(shown.verified + shown.provisional == bundle.decode(event.tokenIds))
    }
    runtime.shutdown()
}
