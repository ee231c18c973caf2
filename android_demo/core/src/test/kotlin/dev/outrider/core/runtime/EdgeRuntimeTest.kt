package dev.outrider.core.runtime

import dev.outrider.core.HashEngine
import dev.outrider.core.protocol.Sampling
import java.io.File
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertIs
import kotlin.test.assertNotNull
import kotlin.test.assertNull
import kotlin.test.assertTrue
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.runBlocking

/** The public API without a verifier; with one: tests/android/test_client.py. */
class EdgeRuntimeTest {
    private val draftIds = IntArray(40) { 3 + it }
    private val manifest = Manifest("t", "target", "drafter", 50, setOf(2), 64, 1, 1, 2, emptyMap())

    private val letters = object : Tokenizer {
        override fun encode(text: String) = text.map { 3 + (it.code % 40) }

        override fun decode(ids: List<Int>) = ids.joinToString("") { ('A' + it).toString() }
    }

    private fun runtime(server: String? = null, engine: Engine = HashEngine(draftIds, 2, 2)): EdgeRuntime {
        val template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
        return EdgeRuntime(Bundle(File("."), manifest, letters, draftIds, null, template, emptyMap()), engine, server)
    }

    @Test
    fun writesAloneAndSaysSo() = runBlocking {
        runtime().use { runtime ->
            val events = runtime.generate("Why?", Request(maxNewTokens = 12)).toList()
            val end = assertIs<Finished>(events.last())
            assertEquals(FinishReason.UNVERIFIED, end.reason)
            assertEquals(12, end.tokenIds.size)
            assertEquals(letters.decode(end.tokenIds), end.provisional)
            assertEquals("", end.verified)
            val states = events.filterIsInstance<LinkChange>().map { it.state }
            assertEquals(listOf(LinkState.CONNECTING, LinkState.ALONE), states)
            assertEquals(end.tokenIds, events.filterIsInstance<Provisional>().map { it.token })
            assertNull(runtime.record)
        }
    }

    @Test
    fun aSeedGivesTheSameTextAgain() = runBlocking {
        runtime().use { runtime ->
            suspend fun text(seed: Long) =
                runtime.generate("Why?", Request(20, Sampling(1.0, seed = seed))).toList().last().provisional
            assertEquals(text(7), text(7))
            assertTrue(text(7) != text(8))
        }
    }

    @Test
    fun oneAnswerAtATime() = runBlocking {
        runtime("127.0.0.1:9").use { runtime -> // nobody listens there
            runtime.start()
            var closed = false
            runtime.generate("Why?").collect { event ->
                if (event is Provisional && !closed) {
                    assertFailsWith<IllegalStateException> { runtime.generate("What?").first() }
                    val record = AnswerRecord.parse(assertNotNull(runtime.record).toJson())
                    assertEquals(letters.encode("Why?"), record.prompt)
                    assertTrue(record.provisional.isNotEmpty())
                    runtime.close()
                    closed = true
                }
                if (event is Finished) assertEquals(FinishReason.CANCELLED, event.reason)
            }
        }
    }

    @Test
    fun leavingEarlyCancels() = runBlocking {
        runtime().use { runtime ->
            assertIs<LinkChange>(runtime.generate("Why?").first())
            assertIs<Finished>(runtime.generate("What?", Request(4)).toList().last())
        }
    }

    @Test
    fun pausedAnswersGoOnWhenAsked() = runBlocking {
        val quick = HashEngine(draftIds, 2, 2)
        val engine = object : Engine by quick {
            override fun step(step: DraftStep) = quick.step(step).also { Thread.sleep(10) }
        }
        runtime(engine = engine).use { runtime ->
            val events = mutableListOf<Event>()
            runtime.generate("Why?", Request(40)).collect { event ->
                if (event is Provisional && events.none { it is Provisional }) runtime.pause()
                if (event is LinkChange && event.state == LinkState.WAITING) runtime.proceed()
                events += event
            }
            assertEquals(40, assertIs<Finished>(events.last()).tokenIds.size)
            assertEquals(1, assertIs<Finished>(events.last()).stats.pauses)
        }
    }

    @Test
    fun aBrokenEngineEndsTheAnswer() = runBlocking {
        val sound = HashEngine(draftIds, 2, 2)
        var steps = 0
        val engine = object : Engine by sound {
            override fun step(step: DraftStep): StepResult {
                check(++steps != 5) { "broken" }
                return sound.step(step)
            }
        }
        runtime(engine = engine).use { runtime ->
            val error = assertFailsWith<IllegalStateException> { runtime.generate("Why?").toList() }
            assertEquals("broken", error.message)
            assertIs<Finished>(runtime.generate("What?", Request(4)).toList().last())
        }
    }

    @Test
    fun whatDoesNotFitIsRefused() {
        runtime().use { runtime ->
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(emptyList()) }
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(List(64) { 3 }) }
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(listOf(3, manifest.vocabSize)) }
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(listOf(-1)) }
            assertFailsWith<IllegalArgumentException> { Request(maxNewTokens = 0) }
            val record = AnswerRecord(
                listOf(3), listOf(4), emptyList(), emptyList(), Sampling(), 9, 1, 1, ByteArray(16), "other",
                emptyList(),
            )
            assertFailsWith<IllegalArgumentException> { runtime.resume(record) }
        }
    }

    @Test
    fun recordsAreTakenUp() = runBlocking {
        runtime().use { runtime ->
            val record = AnswerRecord(
                listOf(3, 4), listOf(5), listOf(6, 7), emptyList(), Sampling(), 9, 1, 1, ByteArray(16), "target",
                emptyList(),
            )
            val events = runtime.resume(record).toList()
            assertEquals("F" to "GH", events.first().verified to events.first().provisional)
            assertEquals(listOf(5, 6, 7), assertIs<Finished>(events.last()).tokenIds.take(3))
            assertEquals(9, assertIs<Finished>(events.last()).tokenIds.size)
        }
    }
}
