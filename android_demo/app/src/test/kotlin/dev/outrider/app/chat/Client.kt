package dev.outrider.app.chat

import dev.outrider.core.bundle.AddedToken
import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.ChatTemplate
import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.Tokenizer
import dev.outrider.core.runtime.EdgeRuntime
import dev.outrider.core.runtime.Options
import dev.outrider.core.session.Patience
import dev.outrider.core.session.WhoWrites
import dev.outrider.testing.FakeEngine
import java.io.File
import kotlin.system.exitProcess
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking

/** Words w4, w5, ... as the tests' tiny target has them; a turn's text begins the next turn's prompt. */
private class Words : Tokenizer {
    override val addedTokens = emptyList<AddedToken>() // R8 drops the body of a default that the app itself never runs

    override fun encode(text: String) = text.split(' ').map { it.drop(1).toInt() }

    override fun decode(ids: List<Int>) = ids.filter { it > 3 }.joinToString(" ") { "w$it" }
}

/**
 * The app without its screens, for tests/android: one JSON line of settings, then lines of questions; the screen's
 * contents go out as JSON lines. A line may also be "stop", "clear", "quit" or "server ADDRESS".
 */
fun main() {
    val settings = Json.parse(readln()) as Map<*, *>
    val folder = File(settings["bundle"] as String)
    val tiny = settings["tiny"] == true
    val writer = WhoWrites.entries.first { it.name == settings["writer"] }
    var chosen = Settings(settings["server"] as String? ?: "", writer, executorch = settings["executorch"] == true)
    val session = ChatSession(
        CoroutineScope(SupervisorJob() + Dispatchers.Default), Journal(File(settings["journal"] as String)),
        answerTokens = (settings["answer_tokens"] as Long).toInt(),
    )
    CoroutineScope(Dispatchers.Default).launch { session.state.collect(::tell) }
    fun open() = chosen.let { now -> session.open { if (tiny) tiny(folder, now) else Opened.from(folder, now, null) } }
    open()
    runBlocking {
        for (line in generateSequence(::readlnOrNull)) {
            when {
                line == "stop" -> session.stop()
                line == "clear" -> session.clear()
                line == "quit" -> break
                line.startsWith("server ") -> {
                    chosen = chosen.copy(server = line.removePrefix("server "))
                    open()
                }
                else -> session.ask(line)
            }.join()
        }
    }
    exitProcess(0)
}

/** A bundle of words and an engine that is a hash. */
private fun tiny(folder: File, settings: Settings): Opened {
    val read = Bundle.open(folder, verify = true) { Words() }
    val template = ChatTemplate("{% for m in messages %}{{ m.content }}{% if not loop.last %} {% endif %}{% endfor %}")
    val bundle = with(read) { Bundle(folder, manifest, tokenizer, draftIds, nullRow, template, emptyMap()) }
    val engine = FakeEngine(bundle)
    val options = settings.options(null).let {
        Options(it.policy, patience = Patience(0.6, 0.3, 1.0, 60.0), clearText = it.clearText)
    }
    return Opened(bundle, EdgeRuntime(bundle, engine, settings.address, options, null), settings.deviceOnly)
}

private fun tell(state: ChatState) = synchronized(System.out) {
    fun rows(pieces: List<Piece>) = pieces.map { listOf(it.kind.name.lowercase(), it.text) }
    println(
        Json.write(
            mapOf(
                "badge" to state.badge.name.lowercase(), "ready" to state.ready, "problem" to state.problem,
                "turns" to state.turns.map { listOf(it.role, rows(it.pieces)) },
                "reply" to state.reply?.let { rows(it.pieces()) },
                "figures" to state.figures?.let {
                    mapOf(
                        "tokens" to unlessShrunk { it.tokens }, "rate" to it.tokensPerSecond,
                        "up" to it.bytesUp, "down" to it.bytesDown,
                        "round_trip" to it.roundTrip, "rolled_back" to it.rolledBack,
                    )
                },
            ),
        ),
    )
    System.out.flush()
}

/** Read a value; null if R8 removed it, as no screen of the app uses it. */
private fun <T> unlessShrunk(read: () -> T): T? = try {
    read()
} catch (_: NoSuchMethodError) {
    null
}
