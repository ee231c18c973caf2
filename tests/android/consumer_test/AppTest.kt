// An app's own test with outrider-testing, as docs/embedding.md describes it; test_aar.py compiles and runs it.
package com.example.consumer

import dev.outrider.core.events.Shown
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.core.runtime.Options
import dev.outrider.testing.FakeEngine
import dev.outrider.testing.FakeVerifier
import dev.outrider.testing.fakeBundle
import kotlinx.coroutines.runBlocking

/** Prints the answer. */
fun main() = runBlocking {
    val bundle = fakeBundle()
    val verifier = FakeVerifier(bundle) { prompt ->
        check(prompt == "user: Why?\n")
        "Because of Rayleigh scattering."
    }
    EdgeRuntime(bundle, FakeEngine(bundle), "wss://fake.invalid", Options(transport = verifier)).use { runtime ->
        val shown = Shown()
        runtime.generate("Why?").collect { shown.add(it) }
        println(shown.verified)
    }
}
