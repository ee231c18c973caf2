package dev.outrider.core.bundle

/** A chat template that cannot be read or rendered here. */
internal class TemplateError(message: String) : IllegalArgumentException(message)

/**
 * A bundle's chat_template.jinja: the part of Jinja that chat templates need, with `trim_blocks` and `lstrip_blocks`.
 *
 * Statements: for (with `loop`), if, elif, else, set. Expressions: see [Expression]. Anything else raises
 * [TemplateError] when the template is read.
 */
internal class ChatTemplate(internal val source: String) {
    private val body: List<Node>

    init {
        val parts = Parts(source.replace("\r\n", "\n").replace('\r', '\n').removeSuffix("\n")).all()
        val reader = Reader(parts)
        body = reader.block()
        if (!reader.atEnd) throw TemplateError("the template has {% ${reader.next()} %} without a beginning")
    }

    /** Render the text for [variables], such as `messages`. Raises [TemplateError]. */
    fun render(variables: Map<String, Any?>): String {
        val scope = Scope(variables.toMutableMap())
        return buildString { body.forEach { it.write(scope, this) } }
    }

    /** Names and their values; a loop's own are forgotten after it. */
    internal class Scope(private val names: MutableMap<String, Any?>, private val outer: Scope? = null) {
        operator fun get(name: String): Any? =
            if (name in names) names[name] else if (outer != null) outer[name] else Undefined

        operator fun set(name: String, value: Any?) {
            names[name] = value
        }
    }

    /** The value of an undefined name: empty text, and false. */
    internal object Undefined {
        override fun toString() = ""
    }

    private fun interface Node {
        fun write(scope: Scope, out: StringBuilder)
    }

    /** A statement's words, or an expression to print, or text. */
    private class Part(val kind: Kind, val text: String)

    private enum class Kind { TEXT, PRINT, STATEMENT }

    /** Cuts a template at its tags and removes insignificant white space. */
    private class Parts(private val source: String) {
        private val tag = Regex("""\{([%{#])([-+]?)""")

        fun all(): List<Part> = buildList {
            var at = 0
            var lineBegins = true // only white space since the line's beginning
            var strip = false // the last tag ended with -
            while (true) {
                val found = tag.find(source, at)
                var text = source.substring(at, found?.range?.first ?: source.length)
                val sign = found?.groupValues?.get(2)
                val lastLine = text.substringAfterLast('\n')
                val opensLine = lineBegins || '\n' in text
                val block = sign != null && found.groupValues[1] != "{"
                if (strip) text = text.trimStart()
                if (sign == "-") text = text.trimEnd()
                if (sign == "" && block && opensLine && lastLine.isBlank()) text = text.dropLast(lastLine.length)
                if (text.isNotEmpty()) add(Part(Kind.TEXT, text))
                if (found == null) return@buildList
                val kind = found.groupValues[1]
                val start = found.range.last + 1
                val end = closing(kind, start)
                var inner = source.substring(start, end)
                strip = inner.endsWith('-')
                val keep = inner.endsWith('+')
                if (strip || keep) inner = inner.dropLast(1)
                if (kind != "#") add(Part(if (kind == "{") Kind.PRINT else Kind.STATEMENT, inner.trim()))
                at = end + 2
                lineBegins = kind != "{" && !strip && !keep && source.startsWith("\n", at)
                if (lineBegins) at++
            }
        }

        /** Return the end of the tag; strings in it are skipped. */
        private fun closing(kind: String, from: Int): Int {
            val mark = if (kind == "{") "}}" else "$kind}"
            var quote: Char? = null
            var at = from
            while (at < source.length) {
                val char = source[at]
                when {
                    quote != null -> if (char == '\\') at++ else if (char == quote) quote = null
                    source.startsWith(mark, at) -> return at
                    kind != "#" && (char == '"' || char == '\'') -> quote = char
                }
                at++
            }
            throw TemplateError("the template has a tag that does not end")
        }
    }

    /** Builds the nodes of one block after another. */
    private class Reader(private val parts: List<Part>) {
        private var at = 0

        val atEnd: Boolean get() = at >= parts.size

        fun next(): String = if (atEnd) throw TemplateError("the template ends inside a block") else parts[at++].text

        /** Read nodes up to a statement that belongs to the enclosing block. */
        fun block(): List<Node> = buildList {
            while (!atEnd) {
                val part = parts[at]
                when (part.kind) {
                    Kind.TEXT -> add(Node { _, out -> out.append(part.text) }).also { at++ }
                    Kind.PRINT -> {
                        val value = Expression.parse(part.text)
                        add(Node { scope, out -> out.append(shown(value(scope))) }).also { at++ }
                    }
                    Kind.STATEMENT -> add(statement() ?: return@buildList)
                }
            }
        }

        private fun statement(): Node? {
            val words = parts[at].text
            val rest = words.substringAfter(' ', "")
            return when (val word = words.substringBefore(' ')) {
                "elif", "else", "endif", "endfor" -> null
                "if" -> { at++; condition(rest) }
                "for" -> { at++; loop(rest) }
                "set" -> { at++; assignment(rest) }
                else -> throw TemplateError("the template has {% $word %}, which is not known here")
            }
        }

        private fun condition(test: String): Node {
            val value = Expression.parse(test)
            val yes = block()
            val words = next()
            val no = when {
                words == "endif" -> emptyList()
                words == "else" -> block().also { expect("endif") }
                words.startsWith("elif ") -> listOf(condition(words.removePrefix("elif ")))
                else -> throw TemplateError("the template has {% $words %} in an if")
            }
            return Node { scope, out -> (if (truth(value(scope))) yes else no).forEach { it.write(scope, out) } }
        }

        private fun loop(words: String): Node {
            val (name, of) = FOR.matchEntire(words)?.destructured
                ?: throw TemplateError("the template has {% for $words %}, which is not known here")
            val items = Expression.parse(of)
            val body = block()
            expect("endfor")
            return Node { scope, out ->
                val list = items(scope) as? List<*> ?: throw TemplateError("$of is not a list")
                for ((index, item) in list.withIndex()) {
                    val loop = mapOf(
                        "index" to index + 1L, "index0" to index.toLong(), "first" to (index == 0),
                        "last" to (index == list.lastIndex), "length" to list.size.toLong(),
                    )
                    val inner = Scope(mutableMapOf(name to item, "loop" to loop), scope)
                    body.forEach { it.write(inner, out) }
                }
            }
        }

        private fun assignment(words: String): Node {
            val (name, of) = SET.matchEntire(words)?.destructured
                ?: throw TemplateError("the template has {% set $words %}, which is not known here")
            val value = Expression.parse(of)
            return Node { scope, _ -> scope[name] = value(scope) }
        }

        private fun expect(word: String) {
            val found = next()
            if (found != word) throw TemplateError("the template has {% $found %} instead of {% $word %}")
        }
    }

    internal companion object {
        private val FOR = Regex("""(\w+)\s+in\s+(.+)""", RegexOption.DOT_MATCHES_ALL)
        private val SET = Regex("""(\w+)\s*=(?!=)\s*(.+)""", RegexOption.DOT_MATCHES_ALL)

        /** Format a value as Python prints it. */
        fun shown(value: Any?): String = when (value) {
            null -> "None"
            is Boolean -> if (value) "True" else "False"
            is String, is Long, Undefined -> value.toString()
            else -> throw TemplateError("the template prints a value that is not a text")
        }

        fun truth(value: Any?): Boolean = when (value) {
            null, false, Undefined, 0L, "" -> false
            is Collection<*> -> value.isNotEmpty()
            is Map<*, *> -> value.isNotEmpty()
            else -> true
        }
    }
}
