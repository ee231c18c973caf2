package dev.outrider.app.chat

import dev.outrider.core.events.Event
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.core.runtime.Request
import dev.outrider.core.session.AnswerRecord
import dev.outrider.core.session.Writer
import java.io.IOException
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.ExperimentalCoroutinesApi
import kotlinx.coroutines.Job
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.asStateFlow
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch
import kotlinx.coroutines.sync.Mutex
import kotlinx.coroutines.sync.withLock
import kotlinx.coroutines.withContext

/**
 * A conversation that outlives screens and, through its [journal], the process.
 *
 * Nothing here blocks its caller: bundles are opened, answers followed and files written on other threads. [state] has
 * every change. explain: describes an error in one line for people; answerTokens: most verified tokens of one answer;
 * now: seconds on a monotonic clock.
 */
class ChatSession(
    private val scope: CoroutineScope,
    private val journal: Journal,
    private val explain: (Exception) -> String = { it.message ?: it.javaClass.simpleName },
    private val answerTokens: Int = 256,
    private val now: () -> Double = { 1e-9 * System.nanoTime() },
) {
    private val mutable = MutableStateFlow(ChatState())
    val state: StateFlow<ChatState> = mutable.asStateFlow()

    private val turn = Mutex() // opening, closing and asking take turns
    private val saves = Channel<Entry>(Channel.CONFLATED)
    @Volatile
    private var opened: Opened? = null
    private var answer: Job? = null
    private var restored = false

    @Volatile
    private var visible = false

    /** The record of an answer that waits for a runtime. */
    private var unfinished: String? = null

    /** The beginning of the answer in progress. */
    private class Begin(val seconds: Double, val up: Long, val down: Long)

    @OptIn(ExperimentalCoroutinesApi::class)
    private val disk = Dispatchers.IO.limitedParallelism(1)

    init {
        scope.launch(disk) { for (entry in saves) save(entry) }
    }

    /**
     * Replace the open runtime by that of [opener], and continue the answer in progress. An exception of [opener]
     * becomes the state's problem.
     */
    fun open(opener: () -> Opened) = scope.launch(Dispatchers.IO) {
        turn.withLock {
            if (restored) interrupt() else restore()
            opened?.close()
            opened = null
            mutable.update { it.copy(ready = false, problem = null) }
            try {
                val next = opener()
                opened = next
                if (visible) next.runtime.foreground()
                mutable.update { it.copy(ready = true, deviceOnly = next.deviceOnly) }
                unfinished?.let { resume(next, it) }
            } catch (error: Exception) {
                if (error is CancellationException) throw error
                mutable.update { it.copy(problem = explain(error)) }
            }
        }
    }

    /** Ask a question; ignored while an answer is in progress or no runtime is open. */
    fun ask(question: String) = scope.launch(Dispatchers.Default) {
        turn.withLock {
            val open = opened ?: return@withLock
            if (question.isBlank() || mutable.value.answering) return@withLock
            val turns = mutable.value.turns + Turn(USER, listOf(Piece(Kind.VERIFIED, question.trim())))
            mutable.update { it.copy(turns = turns, reply = Reply(), figures = null, problem = null) }
            follow(open) {
                val room = open.bundle.maxContext - answerTokens
                val messages = fitting(turns.map(Turn::message), room) { open.bundle.renderChat(it).size }
                open.runtime.generate(messages, Request(answerTokens))
            }
        }
    }

    /** End the answer in progress; its text stays. */
    fun stop() = scope.launch(Dispatchers.Default) {
        turn.withLock {
            answer?.cancelAndJoin()
            if (mutable.value.answering) keep() // it waited for a runtime
        }
    }

    /** Forget the conversation, here and on disk. */
    fun clear() = scope.launch(Dispatchers.Default) {
        turn.withLock {
            answer?.cancelAndJoin()
            unfinished = null
            mutable.update { it.copy(turns = emptyList(), reply = null, figures = null, problem = null) }
            saves.send(Entry(emptyList()))
        }
    }

    /** Note that a network came or went. [online]: the system has one. */
    fun online(online: Boolean) {
        mutable.update { it.copy(online = online) }
        if (online) opened?.runtime?.networkChanged()
    }

    /** Set whether a screen of the app is visible. Without one, the connection ends with the answer. */
    fun visible(visible: Boolean) {
        this.visible = visible
        opened?.runtime?.run { if (visible) foreground() else background() }
    }

    /** Free memory, as the system is short of it. */
    fun trimMemory() {
        opened?.runtime?.trimMemory()
    }

    /** Show the journal's conversation, and note its unfinished answer. */
    private fun restore() {
        restored = true
        val entry = journal.read() ?: return
        unfinished = entry.record
        val reply = if (entry.record == null) null else Reply(
            entry.reply.filter { it.kind == Kind.VERIFIED || it.kind == Kind.KEPT }.joinToString("") { it.text },
            entry.reply.filter { it.kind == Kind.PROVISIONAL }.joinToString("") { it.text },
        )
        mutable.update { it.copy(turns = entry.turns, reply = reply) }
    }

    /** End the answer in progress so that another runtime can continue it. */
    private suspend fun interrupt() {
        val record = opened?.runtime?.record?.toJson() ?: return
        val before = mutable.value
        answer?.cancelAndJoin()
        unfinished = record
        mutable.update { it.copy(turns = before.turns, reply = before.reply) }
        saves.send(Entry(before.turns, before.reply?.pieces().orEmpty(), record))
    }

    private suspend fun resume(open: Opened, json: String) {
        val record = try {
            AnswerRecord.parse(json)
        } catch (error: IllegalArgumentException) { // damaged: its text stays, with its marks
            keep()
            throw error
        }
        follow(open, Reply(kept = keptRanges(record, open.bundle::decode))) { open.runtime.resume(record) }
    }

    /** Show the events. fresh: the reply to which the first one adds all text so far; null: the present one. */
    private fun follow(open: Opened, fresh: Reply? = null, events: () -> Flow<Event>) {
        unfinished = null
        val traffic = open.runtime.traffic
        val begin = Begin(now(), traffic?.up ?: 0, traffic?.down ?: 0)
        answer = scope.launch(Dispatchers.Default) {
            var first = fresh
            try {
                events().collect { event ->
                    show(open.runtime, begin, event, first)
                    first = null
                }
            } catch (error: CancellationException) {
                throw error
            } catch (error: Exception) { // a refusal, an engine's failure, a prompt that is too long
                mutable.update { it.copy(problem = explain(error)) }
            } finally {
                withContext(NonCancellable) { keep() }
            }
        }
    }

    private fun show(runtime: EdgeRuntime, begin: Begin, event: Event, fresh: Reply?) {
        mutable.update { state ->
            val reply = (fresh ?: state.reply ?: Reply()).after(event)
            val traffic = runtime.traffic
            state.copy(
                reply = reply,
                figures = Figures(
                    reply.tokens, reply.end?.stats?.seconds ?: (now() - begin.seconds), (traffic?.up ?: 0) - begin.up,
                    (traffic?.down ?: 0) - begin.down, runtime.roundTrip, reply.rolledBack,
                ),
            )
        }
        val state = mutable.value
        saves.trySend(Entry(state.turns, state.reply?.pieces().orEmpty(), runtime.record?.toJson()))
    }

    /** Make a turn of the answer as it is. */
    private suspend fun keep() {
        unfinished = null
        mutable.update { state ->
            val pieces = state.reply?.pieces().orEmpty().filter { it.kind != Kind.WITHDRAWN }
            val turns = if (pieces.isEmpty()) state.turns else state.turns + Turn(ASSISTANT, pieces)
            state.copy(turns = turns, reply = null)
        }
        saves.send(Entry(mutable.value.turns))
    }

    private fun save(entry: Entry) {
        try {
            journal.write(entry)
        } catch (error: IOException) { // a full disk: the conversation continues without its safety net
            mutable.update { it.copy(problem = error.message) }
        }
    }
}

/** Return the parts of the verified text that the target did not write. */
internal fun keptRanges(record: AnswerRecord, decode: (List<Int>) -> String): List<IntRange> {
    fun length(tokens: Int) = decode(record.committed.take(tokens)).length
    return record.writers.filter { it.writer != Writer.TARGET && it.begin < record.committed.size }
        .map { length(it.begin) until length(it.end) }
}
