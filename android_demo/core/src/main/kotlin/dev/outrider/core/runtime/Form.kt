/** The requested form of an answer, as in the verifier's OpenAI-style calls, and its [Constraint]. */
package dev.outrider.core.runtime

import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.Tool
import dev.outrider.core.bundle.objectOf
import dev.outrider.core.protocol.Constraint
import dev.outrider.core.protocol.GRAMMAR_JSON_OBJECT
import dev.outrider.core.protocol.GRAMMAR_JSON_SCHEMA
import dev.outrider.core.protocol.GRAMMAR_NONE
import dev.outrider.core.protocol.GRAMMAR_TOOLS
import dev.outrider.core.protocol.MAX_BIAS
import dev.outrider.core.protocol.MAX_BIASES
import dev.outrider.core.protocol.MAX_SCHEMA
import dev.outrider.core.session.Policy
import dev.outrider.core.session.WhoWrites
import kotlin.math.abs

private const val MAX_TOOLS = 128
private const val MAX_PENALTY = 2.0

/** Why this device alone cannot write under a grammar. */
private const val NO_GRAMMARS = "no grammar library runs here"

/** The form of an answer; null in its place: any text. */
public sealed interface ResponseFormat {
    /** Any JSON object. */
    public object JsonObject : ResponseFormat

    /** JSON that obeys [schema], a JSON schema as text; the verifier refuses schemas that it does not support. */
    public data class JsonSchema(val schema: String) : ResponseFormat
}

/** The choice of tools that an answer may call. */
public sealed interface ToolChoice {
    /** None: the functions are left out of the prompt. */
    public object None : ToolChoice

    /** Text, or calls. */
    public object Auto : ToolChoice

    /** Calls alone. */
    public object Required : ToolChoice

    /** A call of this function. */
    public data class Named(val name: String) : ToolChoice

    /** Only these, though the prompt describes all; required: calls alone. */
    public data class Allowed(val names: Set<String>, val required: Boolean = false) : ToolChoice
}

/** The functions in the prompt, and the rules of calls in wire form. */
internal class ToolUse(val prompt: List<Tool>, val rules: List<Any?>)

/** The tools of [request]; null: none may be called. Raises [IllegalArgumentException]. */
internal fun toolUseOf(request: Request): ToolUse? {
    val (tools, choice) = request.tools to request.toolChoice
    require(tools.size <= MAX_TOOLS) { "${tools.size} tools; at most $MAX_TOOLS are taken" }
    val names = tools.map { it.name }
    names.groupingBy { it }.eachCount().forEach { (name, count) ->
        require(count == 1) { "two tools have the name $name" }
    }
    val asked = when (choice) {
        is ToolChoice.Named -> setOf(choice.name)
        is ToolChoice.Allowed -> choice.names.also { require(it.isNotEmpty()) { "allowed_tools names no tool" } }
        else -> null
    }
    val required = choice is ToolChoice.Required || choice is ToolChoice.Named ||
        choice is ToolChoice.Allowed && choice.required
    if (tools.isEmpty()) {
        require(asked == null && !required) { "tool_choice asks for a call, but there are no tools" }
        return null
    }
    if (choice is ToolChoice.None) return null
    for (name in asked.orEmpty()) require(name in names) { "tool_choice names $name, which is not among the tools" }
    val functions = tools.filter { asked == null || it.name in asked }.map { listOf(it.name, it.closed) }
    return ToolUse(tools, listOf(functions, required, request.parallelToolCalls && choice !is ToolChoice.Named))
}

/**
 * Return the constraint of an answer to [request] whose first token has index [begin]; null if there is none. Raises
 * [IllegalArgumentException] on impossible options.
 */
internal fun constraintOf(begin: Int, vocabSize: Int, request: Request, use: ToolUse?): Constraint? {
    val format = request.responseFormat
    var grammar = when (format) {
        null -> GRAMMAR_NONE
        is ResponseFormat.JsonObject -> GRAMMAR_JSON_OBJECT
        is ResponseFormat.JsonSchema -> GRAMMAR_JSON_SCHEMA
    }
    var schema = (format as? ResponseFormat.JsonSchema)?.schema.orEmpty()
    val form = (format as? ResponseFormat.JsonSchema)?.let { objectOf(it.schema, "the schema") }
    if (use != null) {
        grammar = GRAMMAR_TOOLS
        schema = Json.write(use.rules + (form ?: if (format == null) null else mapOf("type" to "object")))
    }
    val length = schema.codePointCount(0, schema.length)
    require(length <= MAX_SCHEMA) { "the schemas have $length characters; at most $MAX_SCHEMA are taken" }
    val bias = request.logitBias.filterValues { it != 0f }
    for ((token, amount) in bias) {
        require(token in 0 until vocabSize) {
            "logit_bias names token $token; the model has tokens 0 to ${vocabSize - 1}"
        }
        require(abs(amount) <= MAX_BIAS) { "logit_bias of token $token must be a number from -100 to 100" }
    }
    require(bias.size <= MAX_BIASES) { "logit_bias has ${bias.size} entries; at most $MAX_BIASES are taken" }
    val penalties = mapOf(
        "frequency_penalty" to request.frequencyPenalty, "presence_penalty" to request.presencePenalty,
    )
    for ((name, amount) in penalties) require(abs(amount) <= MAX_PENALTY) { "$name must be a number from -2 to 2" }
    if (grammar == GRAMMAR_NONE && bias.isEmpty() && penalties.values.all { it == 0.0 }) return null
    return Constraint(begin, request.frequencyPenalty, request.presencePenalty, bias, grammar, schema)
}

/** Whether the device's own writers do not support this. */
internal val Constraint?.unsupported: Boolean get() = this != null && grammar != GRAMMAR_NONE

/** Raise [IllegalArgumentException] if no writer could obey [constraint]. */
internal fun checkSupported(constraint: Constraint?, policy: Policy) =
    require(!constraint.unsupported || policy.writer != WhoWrites.DEVICE_ONLY) {
        "response_format and tools need a verifier: this device writes alone and does not support them: $NO_GRAMMARS"
    }
