package dev.outrider.core.bundle

import dev.outrider.core.bundle.ChatTemplate.Companion.shown
import dev.outrider.core.bundle.ChatTemplate.Companion.truth
import dev.outrider.core.bundle.ChatTemplate.Scope
import dev.outrider.core.bundle.ChatTemplate.Undefined

/** Evaluates a template's expression. Values: text, [Long], [Boolean], null, lists, maps, [Undefined]. */
internal typealias Value = (Scope) -> Any?

/**
 * Reads an expression of a chat template.
 *
 * Literals, lists, names, `a.b`, `a['b']`, slices, `+ - % ~`, comparisons, `in`, `and or not`, `x if y else z`, the
 * filters trim, length, upper, lower, tojson and the tests defined, none, string; Python's strip, startswith and their
 * kin.
 */
internal class Expression private constructor(private val tokens: List<String>) {
    private var at = 0

    private fun whole(): Value = choice().also { if (at < tokens.size) unknown(tokens[at]) }

    private fun choice(): Value {
        val yes = either()
        if (!take("if")) return yes
        val test = either()
        val no: Value = if (take("else")) choice() else { _ -> Undefined }
        return { scope -> if (truth(test(scope))) yes(scope) else no(scope) }
    }

    private fun either(): Value = joined("or", ::both) { one, other, scope ->
        one(scope).let { if (truth(it)) it else other(scope) }
    }

    private fun both(): Value = joined("and", ::negation) { one, other, scope ->
        one(scope).let { if (truth(it)) other(scope) else it }
    }

    private fun negation(): Value {
        if (!take("not")) return comparison()
        val value = negation()
        return { scope -> !truth(value(scope)) }
    }

    private fun comparison(): Value {
        val one = sum()
        val operator = tokens.getOrNull(at)
        if (operator == "not" && tokens.getOrNull(at + 1) == "in") {
            at += 2
            val other = sum()
            return { scope -> !contains(other(scope), one(scope)) }
        }
        if (operator !in COMPARISONS) return one
        at++
        val other = sum()
        return { scope -> compare(operator!!, one(scope), other(scope)) }
    }

    private fun sum(): Value {
        var one = term()
        while (true) {
            val operator = listOf("+", "-", "~").firstOrNull(::take) ?: return one
            val before = one
            val other = term()
            one = { scope ->
                val left = before(scope)
                val right = other(scope)
                when {
                    operator == "~" -> shown(left) + shown(right)
                    operator == "+" && left is String && right is String -> left + right
                    operator == "+" && left is Long && right is Long -> left + right
                    operator == "-" && left is Long && right is Long -> left - right
                    else -> throw TemplateError("the template joins by $operator what has no sum")
                }
            }
        }
    }

    private fun term(): Value = joined("%", ::filtered) { one, other, scope ->
        val divisor = other(scope) as? Long ?: unknown("%")
        (one(scope) as? Long ?: unknown("%")).mod(divisor)
    }

    private fun filtered(): Value {
        var value = primary()
        while (true) {
            val inner = value
            value = when {
                take("|") -> filter(next()).let { filter -> { scope -> filter(inner(scope)) } }
                take("is") -> {
                    val not = take("not")
                    val test = test(next())
                    val result: Value = { scope -> test(inner(scope)) != not }
                    result
                }
                else -> return value
            }
        }
    }

    private fun primary(): Value {
        var value = atom()
        while (true) {
            val inner = value
            value = when {
                take(".") -> {
                    val name = next()
                    if (take("(")) method(inner, name) else { scope -> member(inner(scope), name) }
                }
                take("[") -> subscript(inner)
                else -> return value
            }
        }
    }

    private fun atom(): Value {
        val token = next()
        val constant: Any? = when {
            token == "(" -> return choice().also { expect(")") }
            token == "[" -> return until("]").let { items -> { scope -> items.map { it(scope) } } }
            token == "-" -> return primary().let { value -> { scope -> -(value(scope) as? Long ?: unknown("-")) } }
            token[0] == '"' || token[0] == '\'' -> text(token)
            token[0].isDigit() -> token.toLong()
            token == "true" || token == "True" -> true
            token == "false" || token == "False" -> false
            token == "none" || token == "None" -> null
            token[0].isLetter() || token[0] == '_' -> return { scope -> scope[token] }
            else -> unknown(token)
        }
        return { constant }
    }

    private fun subscript(of: Value): Value {
        val first = if (peek(":")) null else choice()
        if (!take(":")) {
            expect("]")
            return { scope -> member(of(scope), first!!(scope)) }
        }
        val last = if (peek("]")) null else choice()
        expect("]")
        return { scope ->
            val value = of(scope)
            val size = (value as? List<*>)?.size ?: (value as? String)?.length ?: unknown("[:]")
            fun bound(at: Any?, otherwise: Int) =
                (at as Long?)?.let { if (it < 0) it + size else it }?.coerceIn(0L, size.toLong())?.toInt() ?: otherwise
            val from = bound(first?.invoke(scope), 0)
            val to = maxOf(from, bound(last?.invoke(scope), size))
            if (value is String) value.substring(from, to) else (value as List<*>).subList(from, to)
        }
    }

    private fun method(of: Value, name: String): Value {
        val arguments = until(")")
        if (name !in METHODS) unknown(".$name()")
        return { scope ->
            val text = of(scope) as? String ?: unknown(".$name()")
            val given = arguments.map { it(scope) as? String ?: unknown(".$name()") }
            when {
                given.isEmpty() && name == "strip" -> text.trim()
                given.isEmpty() && name == "lstrip" -> text.trimStart()
                given.isEmpty() && name == "rstrip" -> text.trimEnd()
                given.isEmpty() && name == "upper" -> text.uppercase()
                given.isEmpty() && name == "lower" -> text.lowercase()
                given.size == 1 && name == "startswith" -> text.startsWith(given[0])
                given.size == 1 && name == "endswith" -> text.endsWith(given[0])
                else -> unknown(".$name()")
            }
        }
    }

    /** Expressions with commas between, up to [end]. */
    private fun until(end: String): List<Value> = buildList {
        while (!take(end)) {
            add(choice())
            if (!peek(end)) expect(",")
        }
    }

    private inline fun joined(word: String, part: () -> Value, crossinline join: (Value, Value, Scope) -> Any?): Value {
        var one = part()
        while (take(word)) {
            val before = one
            val other = part()
            one = { scope -> join(before, other, scope) }
        }
        return one
    }

    private fun peek(token: String) = tokens.getOrNull(at) == token

    private fun take(token: String) = peek(token).also { if (it) at++ }

    private fun next() = tokens.getOrNull(at++) ?: unknown("an end")

    private fun expect(token: String) {
        if (!take(token)) unknown(tokens.getOrElse(at) { "an end" })
    }

    companion object {
        private val TOKEN = Regex(
            """\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\d+|\w+|[=!<>]=|[-+~%|.,:()\[\]<>])\s*""",
            RegexOption.DOT_MATCHES_ALL,
        )
        private val COMPARISONS = setOf("==", "!=", "<", "<=", ">", ">=", "in")
        private val METHODS = setOf("strip", "lstrip", "rstrip", "upper", "lower", "startswith", "endswith")

        /** Raises [TemplateError]. */
        fun parse(source: String): Value {
            val tokens = mutableListOf<String>()
            var at = 0
            while (at < source.length) {
                val found = TOKEN.matchAt(source, at) ?: unknown(source.drop(at))
                tokens += found.groupValues[1]
                at = found.range.last + 1
            }
            return Expression(tokens).whole()
        }

        private fun unknown(what: String): Nothing = throw TemplateError("the template has $what where it is not known")

        private fun text(literal: String): String = buildString {
            var at = 1
            while (at < literal.length - 1) {
                val char = literal[at++]
                append(if (char == '\\') ESCAPES[literal[at++]] ?: unknown("an unknown escape") else char)
            }
        }

        private val ESCAPES = mapOf('n' to '\n', 't' to '\t', 'r' to '\r', '\\' to '\\', '"' to '"', '\'' to '\'')

        private fun member(of: Any?, key: Any?): Any? = when (of) {
            is Map<*, *> -> if (key in of) of[key] else Undefined
            is List<*> -> (key as? Long)?.let { of.getOrNull((if (it < 0) it + of.size else it).toInt()) } ?: Undefined
            else -> throw TemplateError("the template asks for $key of what has no parts")
        }

        private fun contains(of: Any?, value: Any?): Boolean = when (of) {
            is String -> value is String && value in of
            is List<*> -> value in of
            is Map<*, *> -> value in of
            else -> throw TemplateError("the template looks into what has no parts")
        }

        private fun compare(operator: String, one: Any?, other: Any?): Boolean = when (operator) {
            "==" -> one == other
            "!=" -> one != other
            "in" -> contains(other, one)
            else -> {
                val order = when {
                    one is Long && other is Long -> one.compareTo(other)
                    one is String && other is String -> one.compareTo(other)
                    else -> throw TemplateError("the template compares what has no order")
                }
                when (operator) {
                    "<" -> order < 0
                    "<=" -> order <= 0
                    ">" -> order > 0
                    else -> order >= 0
                }
            }
        }

        private fun filter(name: String): (Any?) -> Any? = when (name) {
            "trim" -> { value -> shown(value).trim() }
            "upper" -> { value -> shown(value).uppercase() }
            "lower" -> { value -> shown(value).lowercase() }
            "length" -> { value ->
                ((value as? Collection<*>)?.size ?: (value as? String)?.length ?: unknown("length of no list")).toLong()
            }
            "tojson" -> { value -> if (value == Undefined) unknown("| tojson of nothing") else pythonJson(value) }
            else -> unknown("| $name")
        }

        private fun test(name: String): (Any?) -> Boolean = when (name) {
            "defined" -> { value -> value != Undefined }
            "none" -> { value -> value == null }
            "string" -> { value -> value is String }
            else -> unknown("is $name")
        }
    }
}
