package dev.outrider.core

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.Tokenizer
import dev.outrider.core.bundle.double
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.ints
import dev.outrider.core.bundle.strings
import dev.outrider.core.drafting.Engine
import dev.outrider.core.events.Adopted
import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.HandedOver
import dev.outrider.core.events.LinkChange
import dev.outrider.core.events.Provisional
import dev.outrider.core.events.RolledBack
import dev.outrider.core.events.Shown
import dev.outrider.core.events.Verified
import dev.outrider.core.link.HttpClientTransport
import dev.outrider.core.link.LinkRefused
import dev.outrider.core.link.trusting
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.core.runtime.Options
import dev.outrider.core.runtime.Pinned
import dev.outrider.core.runtime.requestOf
import dev.outrider.core.session.AnswerRecord
import dev.outrider.core.session.Offline
import dev.outrider.core.session.OnReturn
import dev.outrider.core.session.Patience
import dev.outrider.core.session.Policy
import dev.outrider.core.session.UnderstudyUse
import dev.outrider.core.session.WhoWrites
import dev.outrider.core.speed.Arm
import dev.outrider.core.targets.Understudy
import dev.outrider.testing.FakeEngine
import java.io.File
import kotlin.concurrent.thread
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.runBlocking

/** Words w4, w5, ... as the tests' tiny target has them. */
private class Words : Tokenizer {
    override fun encode(text: String) = text.split(' ').map { it.drop(1).toInt() }

    override fun decode(ids: List<Int>) = ids.filter { it > 3 }.joinToString(" ") { "w$it" }
}

/** What a hash that is an understudy likes to write in this answer. */
@Volatile
private var understudyScript = emptyList<Int>()

/** A device for tests/android whose engine is a hash, and whose understudy, where "hash_understudy" asks for one. */
fun main() = device(
    { Words() },
    { bundle, settings ->
        if (settings.field<Boolean?>("hash_understudy") != true) null else {
            Understudy(bundle::decode, maxContext = bundle.manifest.maxContext) {
                HashModel(bundle.manifest.vocabSize) { understudyScript }
            }
        }
    },
) { bundle, _ -> FakeEngine(bundle) }

/**
 * Serves standard input: one JSON line of settings, then one line per answer; each event goes out as a JSON line. A
 * line may also be "pause", "proceed", "record" or "quit".
 */
internal fun device(
    readTokenizer: (String) -> Tokenizer,
    understudy: (Bundle, settings: Any?) -> Understudy?,
    open: (Bundle, settings: Any?) -> Engine,
) {
    val settings = Json.parse(readln())
    val bundle = Bundle.open(File(settings.field<String>("bundle")), verify = true, readTokenizer)
    val engine = open(bundle, settings)
    val patience = settings.field<Any>("patience")
    val options = Options(
        Policy(
            WhoWrites.valueOf(settings.field<String>("writer")), OnReturn.valueOf(settings.field<String>("on_return")),
            Offline.valueOf(settings.field<String>("offline")), offlineRate = settings.double("offline_rate"),
            understudy = UnderstudyUse.valueOf(settings.field<String>("understudy")),
        ),
        patience = Patience(
            patience.double("open"), patience.double("connect"), patience.double("silence"), patience.double("offline"),
        ),
        token = settings.field<String?>("token")?.let { { it } },
        tls = settings.field<String?>("ca_file")?.let { trusting(File(it).inputStream()) },
        pins = settings.strings("pins").toSet(),
        transport = if (settings.field<Boolean>("own_transport")) HttpClientTransport() else null,
    )
    val pinned = Pinned(
        mode = settings.field<String?>("mode")?.let(Arm::valueOf), ahead = settings.field<Boolean?>("ahead"),
    )
    val server = settings.field<String?>("server")
    try {
        EdgeRuntime(bundle, engine, server, options, understudy(bundle, settings), pinned).use { serve(it, engine) }
    } catch (error: LinkRefused) {
        say("refused", "text" to error.message)
    }
}

private fun serve(runtime: EdgeRuntime, engine: Engine) {
    val asked = Channel<String>(Channel.UNLIMITED)
    thread(isDaemon = true) {
        generateSequence(::readlnOrNull).forEach {
            when (it) {
                "pause" -> runtime.pause()
                "proceed" -> runtime.proceed()
                "record" -> say("record", "record" to runtime.record?.toJson())
                else -> asked.trySend(it)
            }
        }
        asked.trySend("quit")
    }
    runtime.foreground()
    runBlocking {
        while (true) {
            val line = asked.receive()
            if (line == "quit") return@runBlocking
            answer(runtime, engine, Json.parse(line))
        }
    }
}

private suspend fun answer(runtime: EdgeRuntime, engine: Engine, of: Any?) {
    if (engine is FakeEngine) engine.script = of.ints("script")
    understudyScript = of.ints("understudy_script")
    val record = of.field<String?>("record")
    val events = if (record != null) {
        runtime.resume(AnswerRecord.parse(record))
    } else {
        val sampling = Vectors.sampling(of.field<Any>("sampling"))
        val held = (of as Map<*, *>)["held_to"] as Map<*, *>? ?: emptyMap<String, Any>()
        val request = requestOf(held.mapKeys { "${it.key}" })
        runtime.generateFromIds(
            of.ints("prompt"), request.copy(of.int("max_new"), sampling, of.strings("stop")),
        )
    }
    val text = Shown()
    events.collect { tell(it, text.add(it)) }
}

private fun tell(event: Event, text: Shown) {
    val shown = arrayOf("verified" to text.verified, "provisional" to text.provisional)
    when (event) {
        is Verified -> say("verified", *shown, "tokens" to event.tokens, "confirmed" to event.confirmed)
        is Provisional -> say("written", *shown, "token" to event.token, "writer" to event.writer.name.lowercase())
        is HandedOver -> say(
            "handed_over", *shown, "writer" to event.writer.name.lowercase(), "detail" to event.detail,
        )
        is RolledBack -> say("rolled_back", *shown, "count" to event.count)
        is Adopted -> say("adopted", *shown, "tokens" to event.tokens)
        is LinkChange -> say("link", *shown, "state" to event.state.name.lowercase(), "detail" to event.detail)
        is Finished -> say(
            "finished", *shown, "reason" to event.reason.name.lowercase(), "token_ids" to event.tokenIds,
            "detail" to event.detail,
            "spans" to event.spans.map { listOf(it.begin, it.end, it.writer.name.lowercase()) },
            "stats" to with(event.stats) {
                mapOf(
                    "tokens" to tokens, "tau" to tau, "seconds" to seconds, "bytes_up" to bytesUp,
                    "bytes_down" to bytesDown,
                )
            } + with(event.stats.counts) {
                mapOf(
                    "rounds" to rounds, "chains" to chains, "calls" to calls, "streamed" to streamed,
                    "provisional" to provisional, "kept" to kept, "rolled_back" to rolledBack, "adopted" to adopted,
                    "stalls" to stalls, "understudy" to understudy, "pauses" to pauses, "opens" to opens,
                    "ahead_hits" to aheadHits,
                )
            },
        )
    }
}

private fun say(event: String, vararg fields: Pair<String, Any?>) = synchronized(System.out) {
    println(Json.write(mapOf("event" to event) + fields))
    System.out.flush()
}
