package dev.outrider.core.runtime

import dev.outrider.core.answer.Answer
import dev.outrider.core.answer.DrafterThread
import dev.outrider.core.answer.InboxEvent
import dev.outrider.core.answer.UnderstudyThread
import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.ChatMessage
import dev.outrider.core.bundle.Tool
import dev.outrider.core.drafting.Drafter
import dev.outrider.core.drafting.Engine
import dev.outrider.core.drafting.TreeShape
import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.link.LOOPBACK
import dev.outrider.core.link.Link
import dev.outrider.core.link.LinkEvent
import dev.outrider.core.link.LinkRefused
import dev.outrider.core.link.SocketTransport
import dev.outrider.core.link.Traffic
import dev.outrider.core.link.Transport
import dev.outrider.core.protocol.Close
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.PROTOCOL_VERSION
import dev.outrider.core.protocol.STREAMS
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.commonPrefix
import dev.outrider.core.session.AnswerRecord
import dev.outrider.core.session.LARGEST
import dev.outrider.core.session.Patience
import dev.outrider.core.session.Policy
import dev.outrider.core.session.RoundTimer
import dev.outrider.core.session.RowsSeen
import dev.outrider.core.session.Session
import dev.outrider.core.session.Tuning
import dev.outrider.core.session.UnderstudyUse
import dev.outrider.core.session.WhoWrites
import dev.outrider.core.session.recordOf
import dev.outrider.core.session.restore
import dev.outrider.core.speed.Arm
import dev.outrider.core.speed.Controller
import dev.outrider.core.targets.Understudy
import java.io.Closeable
import java.net.ProxySelector
import java.security.SecureRandom
import java.util.concurrent.atomic.AtomicBoolean
import javax.net.ssl.SSLSocketFactory
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.emitAll
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.flow.onEach
import kotlinx.coroutines.withContext

/** How long close waits for a thread: an engine step or two. */
private const val CLOSE_SECONDS = 5L

/**
 * An app's settings for a runtime. policy: who writes, and what happens to offline text. lookup: draft tokens that
 * followed the same few tokens earlier in this text, or in an earlier one of this runtime. token: returns the
 * verifier's bearer token; called before the first dial, and again after HTTP 401, as it may have expired. clearText:
 * hosts that may be dialled without TLS. idle: seconds without an answer after which the connection is closed; nothing
 * is sent or dialled until the next answer.
 *
 * tls: whom to trust ([trusting]). pins: the public keys that the verifier's own certificate may have, as `sha256/` and
 * the base64 of the SHA-256 of its SubjectPublicKeyInfo; empty: any. proxies: selects HTTP proxies, used by CONNECT
 * with the credentials of [java.net.Authenticator]; by default the system's. transport: carries the link in place of
 * the library's own sockets, and then decides these three itself.
 *
 * logger: takes messages for developers, with the error of a failure: links, ends of answers, failed engines. Called
 * from any thread, in the order of events; must be quick. Messages never contain text of a conversation.
 *
 *     Options(logger = { message, error -> Log.w("outrider", message, error) })
 *
 * Raises [IllegalArgumentException] for a transport together with tls or pins, which it would ignore, and for invalid
 * pins.
 */
public data class Options(
    val policy: Policy = Policy(),
    val patience: Patience = Patience(),
    val lookup: Boolean = true,
    val token: (suspend () -> String)? = null,
    val tls: SSLSocketFactory? = null,
    val pins: Set<String> = emptySet(),
    val proxies: ProxySelector? = ProxySelector.getDefault(),
    val transport: Transport? = null,
    val clearText: Set<String> = LOOPBACK,
    val logger: ((message: String, error: Throwable?) -> Unit)? = null,
    val idle: Double = 60.0,
) {
    init {
        require(transport == null || tls == null && pins.isEmpty()) { "a transport brings its own TLS and pins" }
        for (pin in pins) require(PIN.matches(pin)) { "$pin is not a pin: sha256/ and 44 characters of base64" }
    }
}

private val PIN = Regex("sha256/[A-Za-z0-9+/]{43}=")

/**
 * Choices that a runtime otherwise makes by measurement, for benchmarks and tests. shaping: send smaller trees than
 * [shape] when they bring more tokens per second. ahead: draft on while a verdict is awaited; null: if that makes
 * rounds shorter. mode: null: whichever is faster.
 */
internal data class Pinned(
    val shape: TreeShape = LARGEST,
    val shaping: Boolean = true,
    val ahead: Boolean? = null,
    val mode: Arm? = null,
)

/**
 * The options of an answer. maxNewTokens, at least 1: most verified tokens. sampling: the same seed gives the same
 * text. stop: strings that end the answer; they are not part of it. Raises [IllegalArgumentException] on a lower
 * maxNewTokens.
 *
 * responseFormat, logitBias (by token id, -100 to 100), the penalties (-2 to 2) and tools: as in OpenAI's API
 * (docs/api.md). All writers obey them. No grammar library runs here, so under a responseFormat or tools only the
 * target writes, and such an answer waits for the link. Calls appear in the text as `<tool_call>`; a prompt of token
 * ids must describe the tools itself.
 */
public data class Request(
    val maxNewTokens: Int = 256,
    val sampling: Sampling = Sampling(),
    val stop: List<String> = emptyList(),
    val responseFormat: ResponseFormat? = null,
    val logitBias: Map<Int, Float> = emptyMap(),
    val frequencyPenalty: Double = 0.0,
    val presencePenalty: Double = 0.0,
    val tools: List<Tool> = emptyList(),
    val toolChoice: ToolChoice = ToolChoice.Auto,
    val parallelToolCalls: Boolean = true,
) {
    init {
        require(maxNewTokens >= 1) { "maxNewTokens must be at least 1, not $maxNewTokens" }
    }
}

/**
 * The public API: answers prompts and streams typed events ([Event]).
 *
 *     EdgeRuntime(Bundle.open(folder), engine, "wss://verifier.example").use { runtime ->
 *         val shown = Shown()
 *         runtime.generate("Why is the sky blue?").collect { shown.add(it); draw(shown.verified, shown.provisional) }
 *     }
 *
 * A bundle, its engine and one link; answers one prompt at a time. server: `host:port`, `ws://...` or `wss://...` of a
 * verifier; null: write on this device alone. understudy: writes when the verifier is silent; null: only the drafter
 * does. The engine and the understudy are closed with the runtime. Times a few of the engine's steps: not for an app's
 * main thread. Raises [LinkRefused] for an unusable address, and the engine's errors.
 */
public class EdgeRuntime internal constructor(
    private val bundle: Bundle,
    private val engine: Engine,
    server: String?,
    private val options: Options,
    private val understudy: Understudy?,
    private val pinned: Pinned,
) : Closeable {
    public constructor(
        bundle: Bundle, engine: Engine, server: String?, options: Options = Options(), understudy: Understudy? = null,
    ) : this(bundle, engine, server, options, understudy, Pinned())

    private val alone = server == null || options.policy.writer == WhoWrites.DEVICE_ONLY
    private val policy = if (alone) options.policy.copy(writer = WhoWrites.DEVICE_ONLY) else options.policy
    private val manifest = bundle.manifest
    private val inbox = Channel<InboxEvent>(Channel.UNLIMITED)
    private val link = if (alone) null else Link(
        server!!, Hello(PROTOCOL_VERSION, manifest.targetHash, manifest.drafterHash, "outrider-kotlin"),
        ::linked, options.token,
        options.transport ?: SocketTransport(options.tls, options.pins, options.proxies), options.clearText,
    )
    private val controller = Controller(pinned.mode)
    private val worker = DrafterThread(
        Drafter(
            engine, bundle.draftIds, manifest.rowShape, manifest.saKvHeads, manifest.maxContext, options.lookup,
            bundle.nullRow, manifest.confidenceTemperature,
        ).also { // an engine that fails ends an answer, and says why
            if (manifest.hasDrafter && !alone) controller.tree.step = runCatching(it::timeStep).getOrNull()
        },
    )
    private val understudyThread = understudy?.let(::UnderstudyThread)
    private val timer = RoundTimer()
    private val busy = AtomicBoolean()
    private val connecting = Any() // held while deciding whether to connect

    @Volatile
    private var inBackground = false
    private var sessionId = ByteArray(16).also(SecureRandom()::nextBytes)
    private var text = emptyList<Int>() // committed tokens of the last answer and its conversation
    private var rowsSeen = RowsSeen() // of `text`
    private var forgotten = false // since the last answer began
    private val memory = Any() // held while these three change
    private var stream = 0

    /**
     * The data for [resume] to continue the answer in progress; null if there is none. From any thread.
     *
     * Save it after every event that matters to you: an app that is killed in mid-answer then loses nothing.
     */
    @Volatile
    public var record: AnswerRecord? = null
        private set

    /** Bytes on the wire since the runtime began; null if no verifier is contacted. */
    public val traffic: Traffic? get() = link?.traffic

    /** Why there is no connection; "" while there is one, none was tried yet or none is contacted. */
    public val linkError: String get() = link?.error.orEmpty()

    /** Seconds between HELLO and WELCOME of the last connection; null before the first. */
    public val roundTrip: Double? get() = link?.roundTrip

    /**
     * Connect, as the app is on the screen and a question is likely. Without this call the first answer connects. From
     * any thread, like the three below.
     */
    public fun foreground() {
        inBackground = false
        connect()
    }

    /** Hang up once no answer is in progress, as the app has left the screen, and do not dial until [foreground]. */
    public fun background() {
        inBackground = true
        connect()
    }

    /** Dial over the device's new network at once, as connections over the old one die with it. */
    public fun networkChanged() {
        link?.networkChanged()
    }

    /** Free the understudy's memory, as the system is short of it. The understudy is loaded again when needed. */
    public fun trimMemory() {
        understudyThread?.unload()
    }

    /** Stay connected while an answer is in progress, and for some time before and after it on the screen. */
    private fun connect(): Unit = synchronized(connecting) {
        link?.stay(if (busy.get()) Double.POSITIVE_INFINITY else if (inBackground) 0.0 else options.idle)
    }

    private fun linked(event: LinkEvent) {
        logged(event)?.let { options.logger?.invoke(it, null) }
        inbox.trySend(InboxEvent.Linked(event))
    }

    /**
     * Cancel the answer in progress, tell the verifier to forget the conversation, hang up and stop the threads and
     * engines. May take seconds: use [shutdown] on an app's main thread.
     */
    override fun close() {
        inbox.trySend(InboxEvent.Asked(InboxEvent.Wish.CANCEL))
        link?.close(Close(stream))
        worker.close(CLOSE_SECONDS)
        engine.close()
        understudyThread?.close(CLOSE_SECONDS)
    }

    /** Do the same as [close] on another thread, even if the caller is cancelled meanwhile. */
    public suspend fun shutdown(): Unit = withContext(NonCancellable + Dispatchers.IO) { close() }

    /** Answer a question, as one message by the user. */
    public fun generate(question: String, request: Request = Request()): Flow<Event> =
        generate(listOf(ChatMessage("user", question)), request)

    /**
     * Answer a conversation. The flow is cold: collecting it starts the answer, on other threads than the collector's,
     * and to stop collecting cancels it. Its last event is [Finished].
     *
     * The collector gets an [IllegalArgumentException] on a prompt that leaves no room, and on options that neither
     * device nor verifier supports; an [IllegalStateException] if another answer is in progress; and after [Finished]
     * the engine's error.
     */
    public fun generate(messages: List<ChatMessage>, request: Request = Request()): Flow<Event> =
        asked(request) { bundle.renderChat(messages, toolUseOf(request)?.prompt.orEmpty()) }

    /** Answer token ids [prompt]. */
    public fun generateFromIds(prompt: List<Int>, request: Request = Request()): Flow<Event> = asked(request) { prompt }

    private fun asked(request: Request, render: () -> List<Int>): Flow<Event> =
        answer(request.stop.filter(String::isNotEmpty)) {
            val prompt = render()
            require(prompt.size in 1 until manifest.maxContext) {
                "the prompt has ${prompt.size} tokens; 1 to ${manifest.maxContext - 1} fit this bundle"
            }
            require(prompt.all { it in 0 until manifest.vocabSize }) {
                "token ids of the prompt must be at least 0 and below ${manifest.vocabSize}"
            }
            val constraint = constraintOf(prompt.size, manifest.vocabSize, request, toolUseOf(request))
            checkSupported(constraint, policy)
            stream = (stream + 1) % STREAMS
            begin(prompt, request.sampling, request.maxNewTokens, constraint)
        }

    /**
     * Continue an answer that [record] described, perhaps in a process that has ended. Events as from [generate]; the
     * first brings the text so far. The collector gets an [IllegalArgumentException] on a record of another target.
     */
    public fun resume(record: AnswerRecord): Flow<Event> = answer(record.stop) {
        require(record.target == manifest.targetHash) {
            "the record is of another target than this bundle's; ask again"
        }
        checkSupported(record.constraint, policy)
        sessionId = record.session
        stream = record.stream
        begin(record.prompt, record.sampling, record.maxNew, record.constraint).also { restore(it, record) }
    }

    /** Stop writing offline until [proceed], e.g. as the battery is low. The target's text continues. */
    public fun pause() {
        inbox.trySend(InboxEvent.Asked(InboxEvent.Wish.PAUSE))
    }

    /** Allow writing offline again, as the policy says. */
    public fun proceed() {
        inbox.trySend(InboxEvent.Asked(InboxEvent.Wish.PROCEED))
    }

    private fun answer(stop: List<String>, begin: () -> Session): Flow<Event> = flow {
        var failure: Exception? = null // raised after the last event, which it would overtake otherwise
        emitAll(written(stop, begin) { failure = it }.buffer(Channel.UNLIMITED).flowOn(Dispatchers.Default))
        failure?.let {
            options.logger?.invoke("an engine failed: ${it.message}", it)
            throw it
        }
    }.onEach { event -> logged(event)?.let { options.logger?.invoke(it, null) } }

    private fun written(stop: List<String>, begin: () -> Session, failed: (Exception) -> Unit): Flow<Event> = flow {
        check(busy.compareAndSet(false, true)) {
            "an answer is on its way; collect it to its end or cancel it, or make a runtime for each conversation"
        }
        try {
            connect()
            val session = begin()
            val answer = Answer(session, link, worker, understudyThread, inbox, bundle.tokenizer::decode, stop)
            try {
                answer.run(this) { record = recordOf(session, manifest.targetHash, stop) }?.let(failed)
            } finally {
                answer.close()
                synchronized(memory) {
                    if (forgotten) forget()
                    else session.let { text = it.committed.toList(); rowsSeen = it.rowsSeen }
                }
                record = null
                val cold = manifest.hasDrafter && policy.understudy == UnderstudyUse.COLD
                if (cold && link?.welcome != null) understudyThread?.unload()
            }
        } finally {
            busy.set(false)
            connect()
        }
    }

    /**
     * Forget all conversations so far, e.g. for another user: lookup no longer uses them.
     *
     * They are kept in memory alone, and bounded. An answer in progress continues, and is forgotten when it is over.
     * From any thread.
     */
    public fun forget(): Unit = synchronized(memory) {
        text = emptyList()
        rowsSeen = RowsSeen()
        forgotten = true
        worker.submit { it.forget() }
    }

    /** Make a session for [ids]. The common prefix with the text before keeps its rows, here and on the verifier. */
    private fun begin(ids: List<Int>, sampling: Sampling, maxNew: Int, constraint: Constraint?): Session {
        val rowsKept = synchronized(memory) {
            val before = text
            val same = commonPrefix(ids, before)
            if (same < before.size) worker.submit { it.remember(before) } // another conversation, or a repeated turn
            worker.submit { it.keepRows(same) }
            forgotten = false
            rowsSeen.upTo(same)
        }
        return Session(
            ids, sampling, manifest.eosIds, maxNew, manifest.maxContext, manifest.rowShape, sessionId, stream,
            rowsKept, options.patience, timer,
            if (constraint.unsupported) policy.copy(writer = WhoWrites.CLOUD_ONLY) else policy,
            Tuning(controller, pinned.shape, pinned.shaping, pinned.ahead), understudy?.present() == true,
            bundle.sentenceEnds, constraint = constraint, drafter = manifest.hasDrafter,
        )
    }
}
