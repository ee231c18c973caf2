/**
 * Writes conversations with tools for chat templates that cannot, in plain turns and a form of our own
 * (`outrider_core/chat/tools.py`). Templates that write tools themselves need more of Jinja than [ChatTemplate]
 * supports.
 */
package dev.outrider.core.bundle

import java.net.URLDecoder

private const val RESULT_TAG = "<tool_response>"
private val RESULT_TAGS = Regex("""<(/?\s*tool_response)""", RegexOption.IGNORE_CASE)

private const val DESCRIBED = """You may call functions. They are described in <tools></tools>, one JSON object a line:
<tools>
%s
</tools>
To call one, write exactly this, once for each call:
<tool_call>
{"name": "the function's name", "arguments": {...}}
</tool_call>"""

private val NAME = Regex("[A-Za-z0-9_-]{1,64}")

private val NO_PROPERTIES = mapOf("properties" to emptyMap<String, Any>())

/** Keywords that may ask for properties in ways that are not examined here. */
private val FURTHER =
    listOf("not", "if", "dependencies", "dependentSchemas", "\$dynamicRef", "\$recursiveRef", "minProperties")

/**
 * A function that the answer may call. name: 1 to 64 of `A-Za-z0-9_-`; parameters: JSON schema of the arguments, an
 * object, as text; null: none. Raises [IllegalArgumentException] otherwise.
 */
public data class Tool(val name: String, val description: String? = null, val parameters: String? = null) {
    internal val schema: Map<*, *>? = parameters?.let { objectOf(it, "the parameters of $name") }

    init {
        require(NAME.matches(name)) { "a function's name must match ${NAME.pattern}, not \"$name\"" }
        require((schema?.get("type") ?: "object") == "object") {
            "$name: arguments are objects, so the type of parameters must be object"
        }
        require("x-guidance" !in schema.orEmpty()) { "$name: x-guidance is not taken here" }
    }

    /** In the form of chat templates. */
    internal val shown: Map<String, Any?>
        get() = mapOf("type" to "function", "function" to shownFunction)

    private val shownFunction: Map<String, Any?>
        get() = buildMap {
            put("name", name)
            if (description != null) put("description", description)
            put("parameters", schema.orEmpty().ifEmpty { mapOf("type" to "object") + NO_PROPERTIES })
        }

    /** The schema of a call's arguments: an object, in all parts without properties that it does not name. */
    internal val closed: Map<*, *>
        get() {
            val whole = mapOf("type" to "object") + schema.orEmpty().ifEmpty { NO_PROPERTIES }
            val own = whole["properties"] as? Map<*, *>
            val names = namesOf(whole, whole, HashSet())
            if (own == null || names == null || "additionalProperties" in whole) return whole
            val others = names.filter { it !in own }.associateWith { true }
            return whole + mapOf("properties" to own + others, "additionalProperties" to false)
        }
}

/** Return all properties that an object of this schema names; null if that cannot be determined. */
private fun namesOf(schema: Any?, root: Map<*, *>, seen: MutableSet<String>): List<String>? {
    if (schema !is Map<*, *>) return emptyList()
    if (FURTHER.any { it in schema }) return null
    val names = (schema["properties"] as? Map<*, *>).orEmpty().keys.filterIsInstance<String>().toMutableList()
    names += (schema["required"] as? List<*>).orEmpty().filterIsInstance<String>()
    val parts = listOf("allOf", "anyOf", "oneOf").flatMap { (schema[it] as? List<*>).orEmpty() }.toMutableList()
    val reference = schema["\$ref"] as? String
    if (reference != null && seen.add(reference)) parts.add(pointed(root, reference) ?: return null)
    for (part in parts) names += namesOf(part, root, seen) ?: return null
    return names
}

/** Return the part that a reference within a schema leads to; null if it is not a path that exists. */
private fun pointed(root: Map<*, *>, reference: String): Any? {
    if (reference != "#" && !reference.startsWith("#/")) return null
    val path = try {
        URLDecoder.decode(reference.replace("+", "%2B"), "UTF-8")
    } catch (_: IllegalArgumentException) {
        reference
    }
    return path.split("/").drop(1).fold<String, Any?>(root) { there, part ->
        when (there) {
            is Map<*, *> -> there[part.replace("~1", "/").replace("~0", "~")]
            is List<*> -> part.toIntOrNull()?.let(there::getOrNull)
            else -> null
        }
    }
}

/** A call in an assistant's turn. arguments: an object. Raises [IllegalArgumentException] on other JSON. */
public data class ToolCall(val name: String, val arguments: String) {
    init {
        require(Json.parse(arguments) is Map<*, *>) { "the arguments of $name are not the text of a JSON object" }
    }

    internal val text: String
        get() = "<tool_call>\n" +
            pythonJson(mapOf("name" to name, "arguments" to Json.parse(arguments))) + "\n</tool_call>"
}

/** The roles of a conversation. */
private val ROLES = listOf("system", "developer", "user", "assistant", "tool")

/**
 * Return the messages in the form of templates: "developer" is "system". Raises [IllegalArgumentException] that names
 * the message.
 */
internal fun asTemplatesTake(messages: List<ChatMessage>): List<ChatMessage> = messages.mapIndexed { index, message ->
    val role = message.role
    require(role in ROLES) { "messages[$index]: role must be one of ${ROLES.joinToString()}, not \"$role\"" }
    require(message.calls.isEmpty() || role == "assistant") { "messages[$index]: only an assistant calls" }
    if (role == "developer") message.copy(role = "system") else message
}

/** Whether there are tools, calls or results to write. */
internal fun usesTools(messages: List<ChatMessage>, tools: List<Tool>): Boolean =
    tools.isNotEmpty() || messages.any { it.role == "tool" || it.calls.isNotEmpty() }

/** Whether a template writes turns of role `tool` that differ from a user's. */
internal fun takesResults(render: (List<ChatMessage>) -> String): Boolean {
    val before = listOf(ChatMessage("user", "probe_u"), ChatMessage("assistant", "probe_c"))
    return try {
        val text = render(before + ChatMessage("tool", "probe_r"))
        "probe_r" in text && text != render(before + ChatMessage("user", "probe_r"))
    } catch (_: TemplateError) {
        false
    }
}

/** Whether the template writes results between tags that are not tokens, which content could hold too. */
internal fun tagsResults(template: String, tokenizer: Tokenizer): Boolean =
    RESULT_TAG in template && tokenizer.addedTokens.none { it.content == RESULT_TAG }

/** Break the tag of results in all content, for templates that write results as text into a user's turn. */
internal fun withoutResults(messages: List<ChatMessage>): List<ChatMessage> =
    messages.map { if (it.role == "assistant") it else it.copy(content = untagged(it.content)) }

/** Return the conversation with content alone. results: it may hold turns of role `tool`. */
internal fun plainMessages(messages: List<ChatMessage>, tools: List<Tool>, results: Boolean): List<ChatMessage> {
    val plain = ArrayList<ChatMessage>()
    var previous = ""
    for ((role, said, calls) in messages) {
        val content = when {
            role == "assistant" -> joined(listOf(said) + calls.map(ToolCall::text))
            role == "tool" && !results -> "$RESULT_TAG\n${pythonJson(said).replace("<", "\\u003c")}\n</tool_response>"
            !results -> untagged(said)
            else -> said
        }
        if (role == "tool" && previous == "tool" && !results) {
            plain[plain.lastIndex] = ChatMessage("user", joined(listOf(plain.last().content, content)))
        } else {
            plain += ChatMessage(if (role == "tool" && !results) "user" else role, content)
        }
        previous = role
    }
    if (tools.isEmpty()) return plain
    val described = DESCRIBED.replace("%s", tools.joinToString("\n") { pythonJson(it.shown) })
    val first = plain.firstOrNull()
    if (first?.role != "system") return listOf(ChatMessage("system", described)) + plain
    plain[0] = ChatMessage("system", "${first.content}\n\n$described".trimStart())
    return plain
}

private fun untagged(content: String) = RESULT_TAGS.replace(content, "&lt;\$1")

private fun joined(parts: List<String>) = parts.filter(String::isNotEmpty).joinToString("\n")

/** Write JSON with Python's spaces and escapes, so that a prompt has the same tokens on every device. */
internal fun pythonJson(value: Any?): String = when (value) {
    is String -> value.map(::escaped).joinToString("", "\"", "\"")
    is List<*> -> value.joinToString(", ", "[", "]", transform = ::pythonJson)
    is Map<*, *> -> value.entries.joinToString(", ", "{", "}") { (key, of) ->
        "${pythonJson(key.toString())}: ${pythonJson(of)}"
    }
    else -> Json.write(value)
}

private fun escaped(char: Char): String = when (char) {
    '"', '\\' -> "\\$char"
    '\n' -> "\\n"
    '\r' -> "\\r"
    '\t' -> "\\t"
    '\b' -> "\\b"
    '\u000C' -> "\\f"
    else -> if (char < ' ') "\\u" + char.code.toString(16).padStart(4, '0') else char.toString()
}

/** Parse the JSON object [text]; [what] names it in errors. Raises [IllegalArgumentException] on other JSON. */
internal fun objectOf(text: String, what: String): Map<*, *> =
    requireNotNull(Json.parse(text) as? Map<*, *>) { "$what: a JSON schema is an object" }
