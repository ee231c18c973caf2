package dev.outrider.core.bundle

import dev.outrider.core.protocol.EngineApi

/** The text is not JSON, or not the expected JSON. */
@EngineApi
public class JsonError(message: String) : IllegalArgumentException(message)

/**
 * JSON (RFC 8259) as Kotlin values: [Map], [List], [String], [Boolean], null, and [Long] or, beyond its range and for
 * fractions, [Double]. Implemented here so that the library has no dependencies.
 */
@EngineApi
public object Json {
    /** Raises [JsonError]. */
    public fun parse(text: String): Any? = JsonParser(text).parse()

    /** Write the value as JSON without line breaks. Raises [JsonError] for values that JSON lacks. */
    public fun write(value: Any?): String = buildString { put(value, this) }

    private fun put(value: Any?, out: StringBuilder) {
        when (value) {
            null, is Boolean, is Int, is Long -> out.append(value)
            is Double -> if (value.isFinite()) out.append(value) else throw JsonError("JSON has no number $value")
            is String -> quote(value, out)
            is List<*> -> {
                out.append('[')
                for ((index, item) in value.withIndex()) {
                    if (index > 0) out.append(',')
                    put(item, out)
                }
                out.append(']')
            }
            is Map<*, *> -> {
                out.append('{')
                for ((index, entry) in value.entries.withIndex()) {
                    if (index > 0) out.append(',')
                    quote(entry.key.toString(), out)
                    out.append(':')
                    put(entry.value, out)
                }
                out.append('}')
            }
            else -> throw JsonError("JSON has no form for ${value::class}")
        }
    }

    private fun quote(text: String, out: StringBuilder) {
        out.append('"')
        for (char in text) {
            when {
                char == '"' || char == '\\' -> out.append('\\').append(char)
                char < ' ' || char in '\uD800'..'\uDFFF' -> // lone surrogates have no UTF-8 form
                    out.append("\\u").append(char.code.toString(16).padStart(4, '0'))
                else -> out.append(char)
            }
        }
        out.append('"')
    }
}

/** Return a JSON object's field of the requested type; a missing one counts as null. Raises [JsonError]. */
internal inline fun <reified T> Any?.field(name: String): T {
    val fields = this as? Map<*, *> ?: throw JsonError("no object where one must be")
    val value = fields[name]
    if (value is T) return value
    throw JsonError("$name is ${if (name in fields) "of the wrong type" else "missing"}")
}

/** A field that is a whole number within the range of [Int]. Raises [JsonError]. */
internal fun Any?.int(name: String): Int {
    val value = field<Long>(name)
    if (value !in Int.MIN_VALUE..Int.MAX_VALUE) throw JsonError("$name is out of range")
    return value.toInt()
}

/** A field that is a number. Raises [JsonError]. */
internal fun Any?.double(name: String): Double = field<Number>(name).toDouble()

/** A field that is a list of whole numbers. Raises [JsonError]. */
internal fun Any?.ints(name: String): List<Int> = field<List<*>>(name).map {
    if (it !is Long || it !in Int.MIN_VALUE..Int.MAX_VALUE) throw JsonError("$name holds no numbers")
    it.toInt()
}

/** A field that is a list of strings. Raises [JsonError]. */
internal fun Any?.strings(name: String): List<String> =
    field<List<*>>(name).map { it as? String ?: throw JsonError("$name holds no strings") }

private class JsonParser(private val text: String) {
    private var at = 0
    private var depth = 0

    fun parse(): Any? {
        val value = value()
        space()
        if (at < text.length) fail("text behind the value")
        return value
    }

    private fun value(): Any? {
        space()
        return when (peek()) {
            '{' -> nested { map() }
            '[' -> nested { list() }
            '"' -> string()
            't' -> word("true", true)
            'f' -> word("false", false)
            'n' -> word("null", null)
            else -> number()
        }
    }

    private fun map(): Map<String, Any?> = buildMap {
        items('}') {
            space()
            if (peek() != '"') fail("no name")
            val name = string()
            space()
            if (next() != ':') fail("no colon")
            put(name, value())
        }
    }

    private fun list(): List<Any?> = buildList { items(']') { add(value()) } }

    private inline fun items(end: Char, item: () -> Unit) {
        at++
        space()
        if (peek() == end) {
            at++
            return
        }
        while (true) {
            item()
            space()
            when (next()) {
                ',' -> continue
                end -> return
                else -> fail("no comma")
            }
        }
    }

    private fun string(): String {
        at++
        val start = at
        while (peek() != '"' && peek() != '\\') at++
        if (peek() == '"') return text.substring(start, at++)
        val out = StringBuilder(text.substring(start, at))
        while (true) {
            when (val char = next()) {
                '"' -> return out.toString()
                '\\' -> out.append(escaped())
                else -> out.append(char)
            }
        }
    }

    private fun escaped(): Char = when (val char = next()) {
        '"', '\\', '/' -> char
        'b' -> '\b'
        'f' -> '\u000C'
        'n' -> '\n'
        'r' -> '\r'
        't' -> '\t'
        'u' -> {
            val digits = text.substring(at, minOf(at + 4, text.length))
            at += 4
            if (digits.length < 4) fail("no escape")
            digits.toIntOrNull(16)?.toChar() ?: fail("no escape")
        }
        else -> fail("no escape")
    }

    private fun number(): Number {
        val start = at
        while (at < text.length && text[at] in "+-0123456789.eE") at++
        val digits = text.substring(start, at)
        if (!NUMBER.matches(digits)) fail("no value")
        return digits.toLongOrNull() ?: digits.toDouble()
    }

    private fun <T> word(word: String, value: T): T {
        if (!text.startsWith(word, at)) fail("no value")
        at += word.length
        return value
    }

    private inline fun <T> nested(read: () -> T): T {
        if (++depth > DEPTH) fail("nested too deeply")
        return read().also { depth-- }
    }

    private fun space() {
        while (at < text.length && text[at] in " \t\r\n") at++
    }

    private fun peek(): Char = if (at < text.length) text[at] else fail("it ends too soon")

    private fun next(): Char = peek().also { at++ }

    private fun fail(what: String): Nothing = throw JsonError("no JSON: $what at character $at")

    private companion object {
        const val DEPTH = 200
        val NUMBER = Regex("-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][+-]?[0-9]+)?")
    }
}
