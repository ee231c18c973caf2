package dev.outrider.engines

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.ints
import dev.outrider.core.protocol.OutriderError
import dev.outrider.core.targets.Decoding
import dev.outrider.core.targets.TargetBundle
import dev.outrider.core.targets.Understudy
import dev.outrider.core.targets.UnderstudyModel
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import kotlin.system.exitProcess

/**
 * Runs a target bundle: `Understudies FOLDER MANIFEST_SHA256 MAX_CONTEXT THREADS LOGITS`.
 *
 * Standard input is a JSON object. Of its `steps`, each `past`, `tokens` and `wanted`, LOGITS gets the logits, float32,
 * little-endian. For each of its `answers` (`text`, `begin`, `drafted`, `count`, `sampling`) a JSON line goes out: how
 * many of the `drafted` tokens after the text agree, and the `count` tokens written after these, with their
 * probabilities. The same for each of its `chains` (`text`, `count`, `sampling`), see [chain]. An error is one line on
 * standard error.
 */
fun main(arguments: Array<String>) {
    val (folder, sha256, maxContext, threads, logits) = arguments
    try {
        val target = TargetBundle.open(File(folder), sha256)
        val asked = Json.parse(readln())
        OnnxUnderstudy(target, maxContext.toInt(), threads.toInt()).use { model ->
            File(logits).outputStream().buffered().use { out ->
                for (step in asked.field<List<Any?>>("steps")) {
                    for (row in model.step(step.int("past"), step.ints("tokens"), step.int("wanted"))) {
                        val bytes = ByteBuffer.allocate(4 * row.size).order(ByteOrder.LITTLE_ENDIAN)
                        bytes.asFloatBuffer().put(row)
                        out.write(bytes.array())
                    }
                }
            }
        }
        val understudy = Understudy({ "" }) { OnnxUnderstudy(target, maxContext.toInt(), threads.toInt()) }
        for (answer in asked.field<List<Any?>>("answers")) {
            println(Json.write(written(understudy, answer)))
            understudy.unload()
        }
        for (asked in asked.field<List<Any?>>("chains")) {
            println(Json.write(chain(OnnxUnderstudy(target, maxContext.toInt(), threads.toInt()), asked)))
        }
    } catch (error: OutriderError) {
        System.err.println("${error.javaClass.simpleName}: ${error.message}")
        exitProcess(1)
    }
}

private fun written(understudy: Understudy, answer: Any?): Map<String, Any?> {
    val given = answer.ints("text")
    val decoding = Decoding(answer.int("begin"), Vectors.sampling(answer.field<Any>("sampling")))
    val drafted = answer.ints("drafted")
    val agreed = checkNotNull(understudy.agreed(given + drafted, given.size, decoding))
    val text = (given + drafted.take(agreed)).toMutableList()
    val probabilities = List(answer.int("count")) {
        val (token, probability) = understudy.nextToken(text, decoding)
        text += token
        probability
    }
    return mapOf("agreed" to agreed, "tokens" to text.drop(given.size), "probabilities" to probabilities)
}

private class Counted(private val model: UnderstudyModel) : UnderstudyModel by model {
    var steps = 0
        private set

    override fun step(past: Int, tokens: List<Int>, wanted: Int): List<FloatArray> {
        steps++
        return model.step(past, tokens, wanted)
    }
}

/**
 * Return the draft after the text, with its scores; the continuation by drafting ahead; the draft after the correct
 * tokens and the next one; and the model's steps for all of it.
 */
private fun chain(model: OnnxUnderstudy, asked: Any?): Map<String, Any?> {
    val counted = Counted(model)
    val understudy = Understudy({ "" }) { counted }
    val text = asked.ints("text")
    val count = asked.int("count")
    val decoding = Decoding(text.size, Vectors.sampling(asked.field<Any>("sampling")))
    val (tokens, scores) = understudy.draft(text, count, decoding)
    understudy.draftAhead(count) { false }
    val (more, _) = understudy.draft(text + tokens, count, decoding)
    val (after, _) = understudy.draft(text + tokens + more.take(1), count - 1, decoding)
    val steps = counted.steps
    understudy.unload()
    return mapOf("tokens" to tokens, "scores" to scores, "more" to more, "after" to after, "steps" to steps)
}
