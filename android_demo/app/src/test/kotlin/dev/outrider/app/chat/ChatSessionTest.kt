package dev.outrider.app.chat

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.ChatTemplate
import dev.outrider.core.bundle.Manifest
import dev.outrider.core.bundle.Tokenizer
import dev.outrider.core.drafting.DraftStep
import dev.outrider.core.drafting.Engine
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.testing.FakeEngine
import java.io.File
import java.util.concurrent.Semaphore
import kotlin.test.AfterTest
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertNotNull
import kotlin.test.assertNull
import kotlin.test.assertTrue
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.cancel
import kotlinx.coroutines.delay
import kotlinx.coroutines.flow.filterNotNull
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.runBlocking
import kotlinx.coroutines.withTimeout

/** Without a verifier; with one: tests/android/test_app.py. */
class ChatSessionTest {
    private val folder = File.createTempFile("session", "").apply { delete() }.apply { mkdirs() }
    private val journal = Journal(File(folder, "conversation.json"))
    private val scopes = mutableListOf<CoroutineScope>()
    private val closed = mutableListOf<Engine>()

    /** Steps that the engine may still take. */
    private val steps = Semaphore(0)

    @AfterTest
    fun clean() {
        steps.release(1 shl 20)
        scopes.forEach { it.cancel() }
        folder.deleteRecursively()
    }

    private val letters = object : Tokenizer {
        override fun encode(text: String) = text.map { 3 + (it.code % 40) }

        override fun decode(ids: List<Int>) = ids.joinToString("") { ('A' + it).toString() }
    }

    private fun opened(target: String = "target"): Opened {
        val manifest = Manifest("t", target, "drafter", 50, setOf(2), 200, 1, 1, 2, emptyMap())
        val draftIds = IntArray(40) { 3 + it }
        val template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
        val bundle = Bundle(File("."), manifest, letters, draftIds, null, template, emptyMap())
        val hash = FakeEngine(draftIds, 2, 2)
        val engine = object : Engine by hash {
            override fun step(step: DraftStep) = steps.acquire().let { hash.step(step) }

            override fun close() {
                closed += this
            }
        }
        return Opened(bundle, EdgeRuntime(bundle, engine, null), true)
    }

    private fun session(): ChatSession {
        val scope = CoroutineScope(SupervisorJob() + Dispatchers.Default).also(scopes::add)
        return ChatSession(scope, journal, answerTokens = 20)
    }

    private suspend fun ChatSession.wait(what: (ChatState) -> Boolean) = withTimeout(20_000) { state.first(what) }

    private suspend fun journaled(what: (Entry) -> Boolean): Entry = withTimeout(20_000) {
        flow { while (true) emit(journal.read().also { delay(5) }) }.filterNotNull().first(what)
    }

    private fun done(state: ChatState) = state.turns.size == 2 && !state.answering

    /** A session with an answer in progress, of [letters] so far or a few more. */
    private suspend fun answering(letters: Int): ChatSession {
        steps.release(5)
        val session = session()
        session.open { opened() }
        session.wait { it.ready }
        session.ask("Why?")
        session.wait { (it.reply?.pieces()?.sumOf { piece -> piece.text.length } ?: 0) >= letters }
        return session
    }

    @Test
    fun anAnswerBecomesATurn() = runBlocking {
        steps.release(1000)
        val session = session()
        assertEquals(Badge.LOADING, session.state.value.badge)
        session.ask("too early").join()
        session.open { opened() }
        session.wait { it.ready }
        session.ask("Why?").join()
        val state = session.wait(::done)
        assertEquals(listOf(USER, ASSISTANT), state.turns.map { it.role })
        assertEquals(listOf(Kind.PROVISIONAL), state.turns[1].pieces.map { it.kind })
        assertEquals(20, state.turns[1].text.length)
        assertEquals(0, assertNotNull(state.figures).tokens)
        assertEquals(state.turns, journaled { it.record == null && it.turns.size == 2 }.turns)
        session.clear().join()
        assertEquals(emptyList(), session.state.value.turns)
        assertEquals(emptyList(), journaled { it.turns.isEmpty() }.turns)
    }

    @Test
    fun aProcessThatDiesLosesNothing() = runBlocking {
        steps.release(1000)
        val whole = session().run {
            open { opened() }
            wait { it.ready }
            ask("Why?")
            wait(::done).turns[1].text
        }
        journaled { it.turns.size == 2 }
        scopes.last().cancel()
        steps.drainPermits()
        steps.release(6)
        val first = session()
        first.open { opened() }
        first.wait { it.ready }
        first.clear().join()
        first.ask("Why?")
        val entry = journaled { it.reply.sumOf { piece -> piece.text.length } >= 5 }
        scopes.last().cancel() // as if this process had ended
        assertNotNull(entry.record)
        journal.write(entry)
        steps.release(1000)
        val second = session()
        second.open { opened() }
        val state = second.wait(::done)
        assertEquals(whole, state.turns[1].text)
        assertEquals("Why?", state.turns[0].text)
    }

    @Test
    fun otherSettingsGoOnWithTheAnswer() = runBlocking {
        val session = answering(4)
        steps.release(1)
        session.open { error("the address is none") }.join()
        val stuck = session.state.value
        assertEquals("the address is none" to Badge.PROBLEM, stuck.problem to stuck.badge)
        assertTrue(stuck.answering, "the answer waits for a runtime")
        assertEquals(1, closed.size)
        assertNotNull(journaled { it.record != null }.record)
        steps.release(1000)
        session.open { opened() }
        val state = session.wait(::done)
        assertEquals(20, state.turns[1].text.length)
        assertNull(state.problem)
    }

    @Test
    fun whatIsClearedDoesNotComeBack() = runBlocking {
        val session = answering(3)
        steps.release(1)
        session.open { error("no") }.join()
        session.clear().join()
        steps.release(1000)
        session.open { opened() }.join()
        val state = session.wait { it.ready }
        assertEquals(emptyList(), state.turns)
        assertNull(state.reply)
        assertNull(journaled { it.turns.isEmpty() }.record)
    }

    @Test
    fun anAnswerOfAnotherTargetStaysAsItIs() = runBlocking {
        val session = answering(4)
        steps.release(1000)
        session.open { opened("another") }
        val state = session.wait { it.ready && done(it) && it.problem != null }
        assertTrue(state.turns[1].text.length >= 4)
        assertTrue("target" in state.problem!!, state.problem)
        session.ask("And now?")
        session.wait { it.turns.size == 4 && it.problem == null }
        Unit
    }

    @Test
    fun stoppingKeepsWhatIsThere() = runBlocking {
        val session = answering(3)
        session.stop().join()
        val state = session.wait(::done)
        assertTrue(state.turns[1].text.length in 3..6, state.turns[1].text)
        assertNull(journaled { it.turns.size == 2 }.record)
    }
}
