package dev.outrider.core.bundle

import dev.outrider.core.Vectors
import dev.outrider.core.protocol.Detokeniser
import dev.outrider.core.protocol.StopStrings
import java.io.File
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertTrue

/** Tokenizer, text in pieces and chat templates against the vectors. */
class TextTest {
    private companion object {
        /** Texts with half of a surrogate pair, and their normalised forms. */
        val HALVES = listOf("a\uD83D b" to "a\uFFFD b", "\uDE00\uD83D" to "\uFFFD\uFFFD", "😀\uD800" to "😀\uFFFD")

        /** The vectors of a tokenizer, and the tokenizer; the default bundle's is read from the bundle. */
        val tokenizers by lazy {
            (Vectors.read("tokenizer") + Vectors.read("sentencepiece")).map { row ->
                val inFile = row.field<Any?>("tokenizer")?.let(Json::write)
                row to SubwordTokenizer.parse(inFile ?: File(Vectors.bundle, "tokenizer.json").readText())
            }
        }
    }

    @Test
    fun encodesAndDecodesAsTheVectorsHaveIt() {
        assertEquals(10, tokenizers.size)
        for ((row, tokenizer) in tokenizers) {
            val name = row.field<String>("name")
            for (case in row.field<List<Any?>>("encode")) {
                val text = case.field<String>("text")
                assertEquals(case.ints("ids"), tokenizer.encode(text), "$name: ${Json.write(text)}")
            }
            for (case in row.field<List<Any?>>("decode")) {
                val ids = case.ints("ids")
                assertEquals(case.field<String>("text"), tokenizer.decode(ids), "$name: $ids")
            }
        }
    }

    @Test
    fun halvesOfCharactersAreReplaced() {
        for ((row, tokenizer) in tokenizers) {
            val name = row.field<String>("name")
            for ((broken, whole) in HALVES) {
                assertEquals(tokenizer.encode(whole), tokenizer.encode(broken), name)
                assertEquals(tokenizer.encode(whole), tokenizer.encodeMarked(broken, '\uE000', emptySet()), name)
            }
        }
    }

    @Test
    fun sentencesEndWhereTheVectorsHaveIt() {
        for ((row, tokenizer) in tokenizers) {
            val ends = row.ints("sentence_ends")
            assertTrue(ends.isNotEmpty())
            assertEquals(ends.toSet(), sentenceEnds(tokenizer, row.int("vocab_size")), row.field<String>("name"))
        }
    }

    @Test
    fun textArrivesInTheSamePieces() {
        for ((row, tokenizer) in tokenizers) {
            for (case in row.field<List<Any?>>("decode")) {
                val detokeniser = Detokeniser(tokenizer::decode)
                val pieces = case.ints("ids").map(detokeniser::push) + detokeniser.flush()
                assertEquals(case.strings("pieces"), pieces)
            }
        }
    }

    @Test
    fun longRunsAreQuick() {
        val text = "is".repeat(50_000)
        for ((row, tokenizer) in tokenizers) {
            val name = row.field<String>("name")
            val once = tokenizer.decode(tokenizer.encode(text)).trim()
            if (name != "unigram") assertEquals(text, once, name) // which lacks some letters, and has no bytes
        }
    }

    @Test
    fun unknownKindsOfTokenizerAreRefused() {
        val row = tokenizers.first().first.field<Map<String, Any?>>("tokenizer")
        for ((name, value) in listOf(
            "model" to mapOf("type" to "WordLevel"), "normalizer" to mapOf("type" to "Lowercase"),
            "pre_tokenizer" to mapOf("type" to "Whitespace"), "decoder" to mapOf("type" to "CTC"),
            "truncation" to mapOf("max_length" to 5),
        )) {
            assertFailsWith<TokenizerError>(name) { SubwordTokenizer.parse(Json.write(row + (name to value))) }
        }
        assertFailsWith<JsonError> { SubwordTokenizer.parse("{") }
    }

    @Test
    fun stopStringsFollowTheVectors() {
        for (row in Vectors.read("stops")) {
            val stops = StopStrings(row.strings("stops"))
            assertEquals(row.strings("shown"), row.strings("pieces").map(stops::push) + stops.flush())
            assertEquals(row.field<Boolean>("hit"), stops.hit)
        }
    }

    @Test
    fun aForkGoesOnAlone() {
        val stops = StopStrings(listOf("end"))
        assertEquals("x", stops.push("xe"))
        val fork = stops.fork()
        assertEquals("", fork.push("nd"))
        assertTrue(fork.hit && !stops.hit)
        assertEquals("eX", stops.push("X"))
    }

    @Test
    fun chatTemplatesFollowTheVectors() {
        for (row in Vectors.read("chat")) {
            val template = ChatTemplate(row.field("template"))
            val variables = row.field<Map<String, Any?>>("special") +
                mapOf("messages" to row.field<Any>("messages"), "add_generation_prompt" to true)
            assertEquals(row.field<String>("text"), template.render(variables), row.field<String>("template"))
        }
    }

    @Test
    fun whatIsSaidIsNeverATokenOfTheTemplate() {
        val known = HashMap<String, SubwordTokenizer>()
        for (row in Vectors.read("boundary")) {
            val tokenizer = known.getOrPut(row.field("tokenizer")) {
                val inFile = row.field<Any?>("json")?.let(Json::write)
                SubwordTokenizer.parse(inFile ?: File(Vectors.bundle, "tokenizer.json").readText())
            }
            val template = ChatTemplate(row.field("template"))
            val messages = row.field<List<Any?>>("messages").map {
                ChatMessage(it.field<String>("role"), it.field<String>("content"))
            }
            val ids = ChatBoundary(tokenizer, template.source).encode(messages) { said ->
                val turns = said.map { mapOf("role" to it.role, "content" to it.content) }
                template.render(mapOf("messages" to turns, "add_generation_prompt" to true))
            }
            assertEquals(row.ints("ids"), ids, Json.write(row.field<Any?>("messages")))
        }
        assertFailsWith<IllegalArgumentException> {
            ChatBoundary(known.getValue("bundle"), "").encode(listOf(ChatMessage("user<|im_end|>", ""))) { "" }
        }
    }

    @Test
    fun aTemplateThatChangesCaseOrTrimsMakesNoTokens() {
        val row = Vectors.read("boundary").first { it.field<Any?>("json") != null }
        val tokenizer = SubwordTokenizer.parse(Json.write(row.field<Any?>("json")))
        val token = tokenizer.addedTokens.first { one -> one.special && one.content.any { it.isLetter() } }
        val middle = token.content.length / 2
        val parted = listOf(token.content.take(middle) + " ", " " + token.content.drop(middle))
        val upper = listOf(token.content.uppercase())
        val cases = listOf<Pair<List<String>, (String) -> String>>(upper to String::lowercase, parted to String::trim)
        for ((contents, write) in cases) {
            val messages = contents.map { ChatMessage("user", it) }
            val ids = ChatBoundary(tokenizer, "").encode(messages) { said ->
                said.joinToString("") { write(it.content) } + token.content
            }
            assertEquals(1, ids.count { it == token.id }, contents.toString())
        }
    }

    @Test
    fun templatesWriteJsonAsPythonDoes() {
        val tool = mapOf("name" to "add", "list" to listOf(1L, null, "é<'\n"))
        val text = ChatTemplate("{{ tool | tojson }}").render(mapOf("tool" to tool))
        assertEquals("""{"name": "add", "list": [1, null, "é<'\n"]}""", text)
    }

    @Test
    fun templatesThatAreNotKnownAreRefused() {
        for (source in listOf(
            "{% macro m() %}{% endmacro %}", "{% if a %}", "{{ a", "{{ a | dictsort }}", "{{ a.b( }}", "{% endif %}",
            "{% for a, b in c %}{% endfor %}", "{{ 'a' 'b' }}", "{% if a %}{% endfor %}", "{{ a is divisibleby(3) }}",
        )) assertFailsWith<TemplateError>(source) { ChatTemplate(source) }
        for (source in listOf(
            "{{ a.b.c }}", "{{ 1 + 'a' }}", "{{ raise_exception('no') }}", "{{ messages }}", "{{ a | tojson }}",
        )) {
            assertFailsWith<TemplateError>(source) { ChatTemplate(source).render(mapOf("messages" to listOf("x"))) }
        }
    }

    @Test
    fun jsonKeepsValues() {
        val text = """{"a":[1,-2.5,1e3,true,false,null,"q\"\\\u00e9\ud83d\ude00\n"],"b":{},"c":[]}"""
        val value = Json.parse(text)
        assertEquals(value, Json.parse(Json.write(value)))
        assertEquals(listOf(1L, -2.5, 1000.0, true, false, null, "q\"\\é😀\n"), value.field<List<Any?>>("a"))
        for (wrong in listOf(
            "", "{", "[1,]", "{\"a\"}", "01", "+1", "1.", "nul", "\"\\x\"", "\"", "1 2", "[".repeat(300),
        )) assertFailsWith<JsonError>(wrong) { Json.parse(wrong) }
    }
}
