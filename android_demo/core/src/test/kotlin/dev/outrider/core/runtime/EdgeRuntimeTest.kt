package dev.outrider.core.runtime

import dev.outrider.core.HashModel
import dev.outrider.core.Peer
import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.ChatTemplate
import dev.outrider.core.bundle.Manifest
import dev.outrider.core.bundle.Tokenizer
import dev.outrider.core.drafting.DraftStep
import dev.outrider.core.drafting.Engine
import dev.outrider.core.drafting.EngineError
import dev.outrider.core.drafting.NoDrafter
import dev.outrider.core.drafting.StepResult
import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.HandedOver
import dev.outrider.core.events.LinkChange
import dev.outrider.core.events.LinkState
import dev.outrider.core.events.Provisional
import dev.outrider.core.events.Shown
import dev.outrider.core.eventually
import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.protocol.OutriderError
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.session.AnswerRecord
import dev.outrider.core.session.Policy
import dev.outrider.core.session.Span
import dev.outrider.core.session.UnderstudyUse
import dev.outrider.core.session.Writer
import dev.outrider.core.targets.Decoding
import dev.outrider.core.targets.Understudy
import dev.outrider.core.targets.UnderstudyModel
import dev.outrider.testing.FakeEngine
import java.io.File
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.CountDownLatch
import java.util.concurrent.TimeUnit
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertIs
import kotlin.test.assertNotNull
import kotlin.test.assertNull
import kotlin.test.assertTrue
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.async
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.flow.onEach
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

    private fun runtime(
        server: String? = null,
        engine: Engine = FakeEngine(draftIds, 2, 2),
        understudy: Understudy? = null,
        policy: Policy = Policy(),
        of: Manifest = manifest,
    ): EdgeRuntime {
        val template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
        val ids = if (of.hasDrafter) draftIds else intArrayOf(0)
        val bundle = Bundle(File("."), of, letters, ids, null, template, emptyMap())
        return EdgeRuntime(bundle, engine, server, Options(policy, logger = { line, _ -> log += line }), understudy)
    }

    private val log = CopyOnWriteArrayList<String>()

    /** The text that a user sees after [events]. */
    private fun shown(events: List<Event>) = Shown().apply { events.forEach(::add) }

    @Test
    fun writesAloneAndSaysSo() = runBlocking {
        runtime().use { runtime ->
            val events = runtime.generate("Why?", Request(maxNewTokens = 12)).toList()
            val end = assertIs<Finished>(events.last())
            assertEquals(FinishReason.LENGTH, end.reason)
            assertEquals(12, end.tokenIds.size)
            assertEquals(letters.decode(end.tokenIds), shown(events).provisional)
            assertEquals("", shown(events).verified)
            assertTrue(events.filterIsInstance<Provisional>().all { it.appended.length == 1 && it.dropped == 0 })
            val states = events.filterIsInstance<LinkChange>().map { it.state }
            assertEquals(listOf(LinkState.CONNECTING, LinkState.ALONE), states)
            assertEquals(end.tokenIds, events.filterIsInstance<Provisional>().map { it.token })
            assertNull(runtime.record)
        }
    }

    @Test
    fun whoWritesAloneIsHeldToBiasesAndRefusesGrammars() = runBlocking {
        runtime().use { runtime ->
            val refused = assertFailsWith<IllegalArgumentException> {
                runtime.generate("Why?", Request(responseFormat = ResponseFormat.JsonObject)).first()
            }
            assertTrue("need a verifier: this device writes alone and does not support" in refused.message.orEmpty())
            suspend fun written(request: Request) =
                (runtime.generate("Why?", request).toList().last() as Finished).tokenIds
            assertEquals(listOf(7, 7, 7), written(Request(3, logitBias = mapOf(7 to 100f))))
            val either = Request(12, logitBias = mapOf(7 to 90f, 8 to 90f))
            val counts = { tokens: List<Int> -> tokens.groupingBy { it }.eachCount().values.sorted() }
            val spread = counts(written(either.copy(frequencyPenalty = 2.0)))
            assertTrue(spread.last() < counts(written(either)).last(), "a penalty spreads them: $spread")
        }
    }

    @Test
    fun aDrafterIsTimedIfTheCloudMayVerify() {
        for ((server, of, wanted) in listOf(
            Triple("wss://fake.invalid", manifest, 4), Triple(null, manifest, 0),
            Triple("wss://fake.invalid", manifest.copy(drafterHash = ""), 0),
        )) {
            var steps = 0
            val fake = FakeEngine(draftIds, 2, 2)
            val engine = object : Engine by fake {
                override fun step(step: DraftStep) = fake.step(step).also { steps++ }
            }
            runtime(server, engine, of = of).close()
            assertEquals(wanted, steps)
        }
    }

    @Test
    fun aSeedGivesTheSameTextAgain() = runBlocking {
        runtime().use { runtime ->
            suspend fun text(seed: Long) =
                shown(runtime.generate("Why?", Request(20, Sampling(1.0, seed = seed))).toList()).provisional
            assertEquals(text(7), text(7))
            assertTrue(text(7) != text(8))
        }
    }

    @Test
    fun oneAnswerAtATime() = runBlocking {
        runtime("127.0.0.1:9").use { runtime -> // without a listener
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
    fun anUnderstudyWritesAlone() = runBlocking {
        val model = HashModel(50)
        val understudy = Understudy(letters::decode) { model }
        runtime(understudy = understudy).use { runtime ->
            val events = runtime.generate("Why?", Request(maxNewTokens = 12)).toList()
            val end = assertIs<Finished>(events.last())
            val again = Understudy(letters::decode) { HashModel(50) }
            val prompt = letters.encode("Why?")
            val wanted = ArrayList<Int>()
            while (wanted.size < 12 && 2 !in wanted) {
                wanted += again.nextToken(prompt + wanted, Decoding(prompt.size)).token
            }
            assertEquals(wanted, end.tokenIds)
            assertEquals(listOf(Span(0, wanted.size, Writer.UNDERSTUDY)), end.spans)
            assertEquals(wanted.size, end.stats.counts.understudy)
            assertEquals(listOf("UNDERSTUDY"), events.filterIsInstance<HandedOver>().map { it.writer.name + it.detail })
            assertTrue(events.filterIsInstance<Provisional>().all { it.writer == Writer.UNDERSTUDY })
        }
        assertTrue(model.closed && !understudy.loaded)
    }

    @Test
    fun trimmingMemoryUnloadsTheUnderstudyUntilItIsNeeded() = runBlocking {
        val understudy = Understudy(letters::decode) { HashModel(50) }
        runtime(understudy = understudy).use { runtime ->
            repeat(2) {
                assertIs<Finished>(runtime.generate("Why?", Request(12)).toList().last())
                assertTrue(understudy.loaded)
                runtime.trimMemory()
                eventually { !understudy.loaded }
            }
        }
    }

    @Test
    fun connectsOnTheScreenAndForAnAnswer() = Peer().use { peer ->
        runtime(peer.address).use { runtime ->
            assertEquals(0, peer.dials.size)
            runtime.foreground()
            eventually { runtime.roundTrip != null }
            assertEquals(1, peer.dials.size)
            runtime.background()
            eventually { peer.frames.lastOrNull() == 0x88 }
            runBlocking { runtime.generate("Why?").first { it is Provisional } } // the peer never answers
            assertTrue(peer.dials.size > 1)
            eventually { peer.connected == 0 }
        }
    }

    @Test
    fun withoutADrafterTheUnderstudyWrites() = runBlocking {
        val undrafted = manifest.copy(drafterHash = "", headDim = 1)
        for (there in listOf(true, false)) {
            val understudy = Understudy(letters::decode, { there }, barred = listOf(2)) { HashModel(50) }
            runtime(engine = NoDrafter, understudy = understudy, of = undrafted).use { runtime ->
                val end = assertIs<Finished>(runtime.generate("Why?", Request(maxNewTokens = 12)).toList().last())
                val written = if (there) listOf(Span(0, 12, Writer.UNDERSTUDY)) else emptyList()
                assertEquals(written, end.spans)
                assertEquals(if (there) FinishReason.LENGTH else FinishReason.UNREACHABLE, end.reason)
            }
        }
    }

    @Test
    fun aBrokenUnderstudyLeavesTheDrafterToWrite() = runBlocking {
        val understudy = Understudy(letters::decode) { throw EngineError("it has\ngone") }
        runtime(understudy = understudy).use { runtime ->
            val events = runtime.generate("Why?", Request(12)).toList()
            assertEquals(listOf(Span(0, 12, Writer.DRAFTER)), assertIs<Finished>(events.last()).spans)
            val over = events.filterIsInstance<HandedOver>().single()
            assertEquals(Writer.DRAFTER to "it has gone", over.writer to over.detail)
        }
    }

    @Test
    fun anUnderstudyThatFailsOnItsWayHandsOver() = runBlocking {
        val sound = HashModel(50)
        val understudy = Understudy(letters::decode) {
            object : UnderstudyModel by sound {
                override fun step(past: Int, tokens: List<Int>, wanted: Int): List<FloatArray> {
                    if (sound.steps == 5) throw OutOfMemoryError("no room\nhere")
                    return sound.step(past, tokens, wanted)
                }
            }
        }
        runtime(understudy = understudy).use { runtime ->
            val events = runtime.generate("Why?", Request(12)).toList()
            val end = assertIs<Finished>(events.last())
            assertEquals(listOf(Span(0, 5, Writer.UNDERSTUDY), Span(5, 12, Writer.DRAFTER)), end.spans)
            val last = events.filterIsInstance<HandedOver>().last()
            assertEquals(Writer.DRAFTER to "no room here", last.writer to last.detail)
            assertTrue(sound.closed)
        }
    }

    @Test
    fun anUnderstudyThatIsNotWantedOrNotThereIsNotLoaded() = runBlocking {
        for ((there, use) in listOf(true to UnderstudyUse.OFF, false to UnderstudyUse.WARM)) {
            val understudy = Understudy(letters::decode, { there }) { error("it was opened") }
            runtime(understudy = understudy, policy = Policy(understudy = use)).use { runtime ->
                val end = assertIs<Finished>(runtime.generate("Why?", Request(12)).toList().last())
                assertEquals(listOf(Span(0, 12, Writer.DRAFTER)), end.spans)
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
        val quick = FakeEngine(draftIds, 2, 2)
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
            assertEquals(1, assertIs<Finished>(events.last()).stats.counts.pauses)
            val states = events.filterIsInstance<LinkChange>().map { it.state }
            val expected = listOf(LinkState.CONNECTING, LinkState.ALONE, LinkState.WAITING, LinkState.ALONE)
            assertEquals(expected, states)
        }
    }

    @Test
    fun aBrokenEngineEndsTheAnswer() = runBlocking {
        val sound = FakeEngine(draftIds, 2, 2)
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
    fun whatACancelledAnswerAskedForFailsAlone() = runBlocking {
        val sound = FakeEngine(draftIds, 2, 2)
        val (begun, fail) = CountDownLatch(1) to CountDownLatch(1)
        val engine = object : Engine by sound {
            override fun step(step: DraftStep): StepResult {
                if (fail.count == 0L) return sound.step(step)
                begun.countDown()
                check(!fail.await(20, TimeUnit.SECONDS)) { "broken" }
                return sound.step(step)
            }
        }
        runtime(engine = engine).use { runtime ->
            runtime.generate("Why?").first { begun.await(20, TimeUnit.SECONDS) }
            val events = runtime.generate("What?", Request(4)).onEach { fail.countDown() }.toList()
            assertEquals(4, assertIs<Finished>(events.last()).tokenIds.size)
        }
    }

    @Test
    fun anEngineThatFailsEndsTheAnswerAsFailed() = runBlocking {
        val engine = object : Engine by FakeEngine(draftIds, 2, 2) {
            override fun step(step: DraftStep): StepResult = error("out of memory")
        }
        runtime(engine = engine).use { runtime ->
            val events = mutableListOf<Event>()
            val thrown = assertFailsWith<IllegalStateException> { runtime.generate("Why?").collect { events += it } }
            assertEquals("out of memory", thrown.message)
            val end = assertIs<Finished>(events.last())
            assertEquals(FinishReason.FAILED, end.reason)
            assertTrue("engine failed: out of memory" in end.detail, end.detail)
        }
    }

    @Test
    fun whatDoesNotFitIsRefused(): Unit = runBlocking {
        runtime().use { runtime ->
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(emptyList()).first() }
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(List(64) { 3 }).first() }
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(listOf(3, manifest.vocabSize)).first() }
            assertFailsWith<IllegalArgumentException> { runtime.generateFromIds(listOf(-1)).first() }
            assertFailsWith<IllegalArgumentException> { Request(maxNewTokens = 0) }
            val record = AnswerRecord(
                listOf(3), listOf(4), emptyList(), listOf(Span(0, 1, Writer.TARGET)), Sampling(), 9, 1, 1,
                ByteArray(16), "other", emptyList(),
            )
            assertFailsWith<IllegalArgumentException> { runtime.resume(record).first() }
        }
    }

    @Test
    fun recordsAreTakenUp() = runBlocking {
        runtime().use { runtime ->
            val record = AnswerRecord(
                listOf(3, 4), listOf(5), listOf(6, 7), listOf(Span(0, 1, Writer.TARGET), Span(1, 3, Writer.DRAFTER)),
                Sampling(), 9, 1, 1, ByteArray(16), "target", emptyList(),
            )
            val events = runtime.resume(record).toList()
            assertEquals("F" to "GH", events.first().added to events.first().appended)
            assertEquals(listOf(5, 6, 7), assertIs<Finished>(events.last()).tokenIds.take(3))
            val end = assertIs<Finished>(events.last())
            assertEquals(9, end.tokenIds.size)
            assertEquals(listOf(Span(0, 1, Writer.TARGET), Span(1, 9, Writer.DRAFTER)), end.spans)
        }
    }

    @Test
    fun logsSayWhatEndedAndNothingOfTheText() = runBlocking {
        runtime().use { runtime -> runtime.generate("Why?", Request(4)).toList() }
        assertEquals(listOf("answer ended: length"), log.map { it.substringBefore(",") })
        log.clear()
        val failing = object : Engine by FakeEngine(draftIds, 2, 2) {
            override fun step(step: DraftStep): StepResult = throw EngineError("no memory")
        }
        runtime(engine = failing).use { runtime ->
            assertFailsWith<OutriderError> { runtime.generate("Why?").toList() }
        }
        assertEquals("an engine failed: no memory", log.last())
    }

    @Test
    fun nothingHappensBeforeAFlowIsCollected() = runBlocking {
        val bundle = Bundle(
            File("."), manifest,
            object : Tokenizer {
                override fun encode(text: String) = letters.encode(text).also { threads += Thread.currentThread().name }
                override fun decode(ids: List<Int>) = letters.decode(ids)
            },
            draftIds, null, ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"), emptyMap(),
        )
        EdgeRuntime(bundle, FakeEngine(draftIds, 2, 2), null).use { runtime ->
            val answer = runtime.generate("Why?", Request(2))
            assertTrue(threads.isEmpty())
            repeat(2) { assertIs<Finished>(answer.toList().last()) }
            assertTrue(threads.isNotEmpty() && Thread.currentThread().name !in threads, "$threads")
        }
    }

    private val threads = CopyOnWriteArrayList<String>()

    @Test
    fun shutdownEndsTheAnswerAndClosesTheEngine() = runBlocking {
        var closed = false
        val engine = object : Engine by FakeEngine(draftIds, 2, 2) {
            override fun close() {
                closed = Thread.currentThread() !== caller
            }
        }
        val runtime = runtime(engine = engine)
        val answer = async(Dispatchers.Default) { runtime.generate("Why?", Request(40)).toList() }
        runtime.shutdown()
        answer.cancel()
        assertTrue(closed)
    }

    private val caller = Thread.currentThread()
}
