package dev.outrider.core.runtime

import dev.outrider.core.Vectors
import dev.outrider.core.bundle.Bundle
import dev.outrider.core.bundle.ChatMessage
import dev.outrider.core.bundle.ChatTemplate
import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.Tool
import dev.outrider.core.bundle.ToolCall
import dev.outrider.core.bundle.asTemplatesTake
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.ints
import dev.outrider.core.session.AnswerRecord
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertTrue

/** Constraints of requests, and prompts with tools, against Python's vectors. */
class FormTest {
    @Test
    fun messagesAreReadInOnePlace() {
        assertEquals(listOf(ChatMessage("system", "a")), asTemplatesTake(listOf(ChatMessage("developer", "a"))))
        val call = listOf(ToolCall("f", "{}"))
        for (wrong in listOf(ChatMessage("usr", "a"), ChatMessage("user", "a", call))) {
            val refused = assertFailsWith<IllegalArgumentException> { asTemplatesTake(listOf(wrong)) }
            assertTrue("messages[0]: " in refused.message.orEmpty(), refused.message)
        }
    }

    @Test
    fun requestsBecomeTheSameConstraints() {
        for (row in Vectors.read("constraints")) {
            val fields = row.field<Map<String, Any?>>("request")
            val where = Json.write(fields)
            if (row.field("refused")) {
                assertFailsWith<IllegalArgumentException>(where) { constraint(fields) }
                continue
            }
            val wanted = (row as Map<*, *>)["constraint"]?.let(Vectors::constraint)
            val made = constraint(fields)
            assertEquals(wanted?.copy(grammar = 1, schema = ""), made?.copy(grammar = 1, schema = ""), where)
            assertEquals(wanted?.grammar, made?.grammar, where)
            assertEquals(schema(wanted?.schema), schema(made?.schema), where)
        }
        val long = """{"title": "${"x".repeat(40_000)}"}"""
        assertFailsWith<IllegalArgumentException> {
            constraintOf(0, 9, Request(responseFormat = ResponseFormat.JsonSchema(long)), null)
        }
        for (wrong in listOf({ Tool("a b") }, { Tool("a\n") }, { Tool("a", parameters = "[]") })) {
            assertFailsWith<IllegalArgumentException> { wrong() }
        }
        assertFailsWith<IllegalArgumentException> { Tool("a", parameters = """{"type": "string"}""") }
    }

    @Test
    fun biasesAndPenaltiesAddTheSame() {
        for (row in Vectors.read("amounts")) {
            val added = Vectors.constraint(row.field<Any>("constraint")).amounts(row.ints("text"))
            val wanted = row.field<List<List<Number>>>("amounts").associate { (id, of) -> id.toInt() to of.toDouble() }
            assertEquals(wanted, added)
        }
    }

    @Test
    fun conversationsWithToolsHaveTheSameTokens() {
        val bundle = Bundle.open(Vectors.bundle)
        for (row in Vectors.read("tool_chats")) {
            val template = ChatTemplate(row.field<String>("template").ifEmpty { bundle.template.source })
            val other = Bundle(
                bundle.folder, bundle.manifest, bundle.tokenizer, bundle.draftIds, bundle.nullRow, template,
                bundle.specialTokens,
            )
            val messages = row.field<List<Any?>>("messages").map { message ->
                val calls = (message as Map<*, *>)["tool_calls"] as List<*>? ?: emptyList<Any>()
                ChatMessage(message.field("role"), message.field("content"), calls.map(::call))
            }
            val tools = row.field<List<Any?>>("tools").map(::tool)
            assertEquals(row.ints("ids"), other.renderChat(messages, tools), Json.write(row))
        }
    }

    @Test
    fun recordsKeepTheConstraint() {
        val held = Vectors.read("constraints").mapNotNull { (it as Map<*, *>)["constraint"]?.let(Vectors::constraint) }
        for (constraint in held) {
            val record = AnswerRecord(
                listOf(1), emptyList(), emptyList(), emptyList(), dev.outrider.core.protocol.Sampling(), 5, 0, 0,
                ByteArray(16), "t", emptyList(), constraint = constraint,
            )
            val json = record.toJson()
            assertEquals(constraint, AnswerRecord.parse(json).constraint)
            val damages = listOf("\"version\":1" to "\"version\":2", "\"97" to "\"96", "\"arithmetic\"" to "\"a\"")
            for ((right, wrong) in damages) {
                assertTrue(right in json)
                assertFailsWith<IllegalArgumentException> { AnswerRecord.parse(json.replace(right, wrong)) }
            }
        }
    }

    private fun schema(text: String?) = if (text.isNullOrEmpty()) text else Json.parse(text)

    private fun constraint(fields: Map<String, Any?>) =
        requestOf(fields).let { constraintOf(4, 1000, it, toolUseOf(it)) }

    private fun call(of: Any?): ToolCall = of.field<Any>("function").let {
        ToolCall(it.field("name"), Json.write(it.field<Any>("arguments")))
    }
}

/** Make a request from OpenAI's fields. */
internal fun requestOf(fields: Map<String, Any?>): Request {
    val format = fields["response_format"]
    return Request(
        responseFormat = when ((format as Map<*, *>?)?.get("type")) {
            "json_object" -> ResponseFormat.JsonObject
            "json_schema" -> ResponseFormat.JsonSchema(
                Json.write(format.field<Any>("json_schema").field<Any>("schema")),
            )
            else -> null
        },
        logitBias = (fields["logit_bias"] as Map<*, *>?).orEmpty().entries.associate { (id, of) ->
            "$id".toInt() to (of as Number).toFloat()
        },
        frequencyPenalty = (fields["frequency_penalty"] as Number?)?.toDouble() ?: 0.0,
        presencePenalty = (fields["presence_penalty"] as Number?)?.toDouble() ?: 0.0,
        tools = (fields["tools"] as List<*>?).orEmpty().map(::tool),
        toolChoice = choiceOf(fields["tool_choice"]),
        parallelToolCalls = fields["parallel_tool_calls"] as Boolean? ?: true,
    )
}

private fun tool(of: Any?): Tool = of.field<Map<*, *>>("function").let {
    Tool(it.field("name"), it["description"] as String?, it["parameters"]?.let(Json::write))
}

private fun choiceOf(choice: Any?): ToolChoice = when (choice) {
    null, "auto" -> ToolChoice.Auto
    "none" -> ToolChoice.None
    "required" -> ToolChoice.Required
    else -> if (choice.field<String>("type") == "function") {
        ToolChoice.Named(choice.field<Any>("function").field("name"))
    } else {
        val allowed = choice.field<Any>("allowed_tools")
        val names = allowed.field<List<Any?>>("tools").map { it.field<Any>("function").field<String>("name") }
        ToolChoice.Allowed(names.toSet(), allowed.field<String>("mode") == "required")
    }
}
