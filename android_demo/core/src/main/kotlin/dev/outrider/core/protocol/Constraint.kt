package dev.outrider.core.protocol

import kotlin.math.abs

/** Bounds of a constraint: biases and how large each is either way, characters of a schema. */
internal const val MAX_BIASES = 1024
internal const val MAX_BIAS = 100f
internal const val MAX_SCHEMA = 1 shl 15

/** Supported constraints, as bits of [Welcome.constraints]: biases and penalties; JSON grammars; tools. */
internal const val OBEYS_BIAS = 1
internal const val OBEYS_JSON = 2
internal const val OBEYS_TOOLS = 4

/** Kinds of grammar: none, any JSON object, JSON that a schema describes, text or calls of functions. */
internal const val GRAMMAR_NONE = 0
internal const val GRAMMAR_JSON_OBJECT = 1
internal const val GRAMMAR_JSON_SCHEMA = 2
internal const val GRAMMAR_TOOLS = 3

/**
 * The constraint on an answer beside its sampling parameters; it applies to every draw (docs/protocol.md).
 *
 * begin: index of the answer's first token; biases: amounts by token id, each -100..100; penalties: -2..2; schema: the
 * JSON schema of [GRAMMAR_JSON_SCHEMA] or the tools of [GRAMMAR_TOOLS], as text. Raises [IllegalArgumentException]
 * outside these bounds.
 */
internal data class Constraint(
    val begin: Int,
    val frequencyPenalty: Double = 0.0,
    val presencePenalty: Double = 0.0,
    val biases: Map<Int, Float> = emptyMap(),
    val grammar: Int = GRAMMAR_NONE,
    val schema: String = "",
) {
    init {
        require(begin >= 0) { "begin $begin is negative" }
        require(frequencyPenalty in -2.0..2.0) { "frequencyPenalty $frequencyPenalty is not in -2..2" }
        require(presencePenalty in -2.0..2.0) { "presencePenalty $presencePenalty is not in -2..2" }
        require(biases.size <= MAX_BIASES) { "${biases.size} biases are more than $MAX_BIASES" }
        require(biases.values.all { abs(it) <= MAX_BIAS }) { "a bias is not in -$MAX_BIAS..$MAX_BIAS" }
        require(grammar in GRAMMAR_NONE..GRAMMAR_TOOLS) { "grammar $grammar is not known" }
        require((grammar >= GRAMMAR_JSON_SCHEMA) == schema.isNotEmpty()) { "a schema belongs to its own grammar" }
        require(schema.codePointCount(0, schema.length) <= MAX_SCHEMA) { "the schema is too long" }
    }

    /** OBEYS_* that a verifier must have. */
    val needs: Int
        get() {
            val biased = biases.isNotEmpty() || frequencyPenalty != 0.0 || presencePenalty != 0.0
            val obeys = when (grammar) {
                GRAMMAR_NONE -> 0
                GRAMMAR_TOOLS -> OBEYS_TOOLS
                else -> OBEYS_JSON
            }
            return (if (biased) OBEYS_BIAS else 0) or obeys
        }

    /** Biases and penalties by token, which the draw after [text], prompt included, adds to logits. */
    fun amounts(text: List<Int>): Map<Int, Double> {
        val amounts = HashMap<Int, Double>()
        for ((token, bias) in biases) amounts[token] = bias.toDouble()
        if (frequencyPenalty != 0.0 || presencePenalty != 0.0) {
            for ((token, count) in text.drop(begin).groupingBy { it }.eachCount()) {
                amounts[token] = (amounts[token] ?: 0.0) - count * frequencyPenalty - presencePenalty
            }
        }
        return amounts
    }
}
