package dev.outrider.testing

import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.Provisional
import dev.outrider.core.events.Shown
import dev.outrider.core.events.Verified
import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.core.runtime.Options
import dev.outrider.core.session.Policy
import dev.outrider.core.session.WhoWrites
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertIs
import kotlin.test.assertTrue
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.runBlocking

/** The behaviour that an app's tests rely on. */
class FakeVerifierTest {
    private val bundle = fakeBundle()
    private val answer = "Because air scatters blue light more than red. ☀"

    private fun ask(verifier: FakeVerifier, policy: Policy = Policy(), each: (Event) -> Unit = {}): List<Event> =
        runBlocking {
            val options = Options(policy, transport = verifier)
            EdgeRuntime(bundle, FakeEngine(bundle), "wss://fake.invalid", options).use { runtime ->
                val events = ArrayList<Event>()
                runtime.generate("Why?").collect { events += it; each(it) }
                events
            }
        }

    private fun verified(events: List<Event>) = Shown().apply { events.forEach(::add) }.verified

    @Test
    fun itsAnswerIsVerified() {
        val prompts = ArrayList<String>()
        val events = ask(FakeVerifier(bundle) { prompts += it; answer })
        assertEquals(answer, verified(events))
        assertEquals(listOf("user: Why?\n"), prompts)
        assertEquals(FinishReason.STOP, assertIs<Finished>(events.last()).reason)
    }

    @Test
    fun outOfReachTheDeviceWritesAndTheAnswerIsTheSame() {
        val verifier = FakeVerifier(bundle, 5) { answer }
        val events = ask(verifier) {
            if (it is Verified) verifier.reachable = false
            if (it is Provisional) verifier.reachable = true
        }
        assertEquals(answer, verified(events))
        assertTrue(events.any { it is Provisional })
    }

    @Test
    fun everyTurnHasAnAnswerOfItsOwn() = runBlocking {
        val options = Options(Policy(WhoWrites.CLOUD_ONLY), transport = FakeVerifier(bundle) { "$it!" })
        EdgeRuntime(bundle, FakeEngine(bundle), "wss://fake.invalid", options).use { runtime ->
            for (question in listOf("One?", "Two?", "Two?")) {
                assertEquals("user: $question\n!", verified(runtime.generate(question).toList()))
            }
        }
    }
}
