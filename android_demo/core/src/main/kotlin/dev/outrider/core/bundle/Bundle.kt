package dev.outrider.core.bundle

import dev.outrider.core.drafting.NoDrafter
import dev.outrider.core.protocol.EngineApi
import dev.outrider.core.protocol.OutriderError
import dev.outrider.core.protocol.RowShape
import java.io.File
import java.io.FileNotFoundException
import java.io.InputStream
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest

private const val FORMAT_VERSION = 2L
internal const val MANIFEST = "manifest.json"
private val SENTENCE_ENDS = setOf('.', '!', '?', '。')

/** The folder is not a usable bundle. The message is one line that says what to do. */
public class BundleError(message: String, cause: Throwable? = null) : OutriderError(message, cause)

/**
 * An exported device half. file: the graph; data: the file beside it with its weights, if they are separate; quant:
 * "fp32", "fp16", "int8" or "int4"; maxWidth: most tokens of one step.
 */
@EngineApi
public data class EngineEntry(val file: String, val data: String?, val quant: String, val maxWidth: Int)

/**
 * A complete model in its own folder, which may arrive later than the bundle, or never. bits: of its linear layers;
 * bytes: of all its files; sourceHash: identity of the model it was made from; manifestSha256: of its manifest, which
 * has the hashes of its other files; barred: ids with a meaning only to this model, which it must not write.
 */
@EngineApi
public data class UnderstudyEntry(
    val folder: String,
    val name: String,
    val sourceHash: String,
    val format: String,
    val bits: Int,
    val bytes: Long,
    val manifestSha256: String,
    val barred: List<Int> = emptyList(),
)

/**
 * The contents of manifest.json. Widths in values; hashes as the exporter defines them. A bundle without a drafter has
 * no engines, and widths of 1; its understudy drafts.
 */
@EngineApi
public data class Manifest(
    val target: String,
    val targetHash: String,
    val drafterHash: String,
    val vocabSize: Int,
    val eosIds: Set<Int>,
    val maxContext: Int,
    val saKvHeads: Int,
    val caKvHeads: Int,
    val headDim: Int,
    val engines: Map<String, EngineEntry>,
    val understudy: UnderstudyEntry? = null,
    val confidenceTemperature: Double = 1.0,
) {
    internal val rowShape: RowShape get() = RowShape(caKvHeads, headDim)

    /** Whether it has a drafter; otherwise its understudy drafts. */
    internal val hasDrafter: Boolean get() = drafterHash.isNotEmpty()
}

/**
 * A checked bundle: the folder that `python -m export bundle` writes and an app ships.
 *
 * draftIds `[draft_vocab]` maps the LM head's rows to the target's token ids ([NoDrafter]'s: one); nullRow `[2 (K, V),
 * heads, headDim]`, flat, is the row that cross-attention always sees, null for a drafter without one.
 */
public class Bundle internal constructor(
    public val folder: File,
    @property:EngineApi public val manifest: Manifest,
    internal val tokenizer: Tokenizer,
    @property:EngineApi public val draftIds: IntArray,
    internal val nullRow: FloatArray?,
    internal val template: ChatTemplate,
    internal val specialTokens: Map<String, String>,
) {
    private val boundary = ChatBoundary(tokenizer, template.source)
    private val takesResults by lazy { takesResults(::rendered) }
    private val tagsResults by lazy { tagsResults(template.source, tokenizer) && takesResults }

    /** Whether there is an understudy that runs here. Nothing of it has been checked. */
    public val hasUnderstudy: Boolean
        get() = manifest.understudy.let { it?.format == "onnx" && File(File(folder, it.folder), MANIFEST).isFile }

    /** Most tokens of a conversation and its answer. */
    public val maxContext: Int get() = manifest.maxContext

    /** Return the text of token ids. Incomplete characters become U+FFFD. */
    public fun decode(ids: List<Int>): String = tokenizer.decode(ids)

    /** Tokens that end a sentence or a line. */
    internal val sentenceEnds: Set<Int> by lazy { sentenceEnds(tokenizer, manifest.vocabSize) }

    /**
     * Return token ids of a conversation up to where the assistant's next turn begins, with callable [tools]. Content
     * is text: what looks like a special token in it is not one. Raises [IllegalArgumentException] on an unknown role
     * and on calls that are not an assistant's, [BundleError] if the template fails.
     */
    public fun renderChat(messages: List<ChatMessage>, tools: List<Tool> = emptyList()): List<Int> {
        val turns = asTemplatesTake(messages)
        val used = usesTools(turns, tools)
        val said = if (used && tagsResults) withoutResults(turns) else turns
        return boundary.encode(if (used) plainMessages(said, tools, takesResults) else said) { turns ->
            try {
                rendered(turns)
            } catch (error: TemplateError) {
                throw BundleError("$folder: chat template failed: ${error.message}")
            }
        }
    }

    private fun rendered(messages: List<ChatMessage>): String {
        val turns = messages.map { mapOf("role" to it.role, "content" to it.content) }
        return template.render(specialTokens + mapOf("messages" to turns, "add_generation_prompt" to true))
    }

    public companion object {
        /**
         * Open [folder], checking format, completeness and (unless [verify] is false) every sha256.
         *
         * Raises [BundleError] with one clear line.
         */
        public fun open(folder: File, verify: Boolean = true): Bundle = open(folder, verify, SubwordTokenizer::parse)

        /** Do the same; readTokenizer: makes the tokenizer from the text of tokenizer.json. */
        internal fun open(folder: File, verify: Boolean, readTokenizer: (String) -> Tokenizer): Bundle {
            val file = File(folder, MANIFEST)
            if (!file.isFile) throw BundleError("$folder: no $MANIFEST there; write one with: python -m export bundle")
            return try {
                BundleReader(folder, Json.parse(file.readText()), verify).read(readTokenizer)
            } catch (error: IllegalArgumentException) { // raised by JSON, tokenizer and template
                throw BundleError("$folder does not load: ${error.message}; export the bundle again")
            } catch (error: FileNotFoundException) {
                throw BundleError("$folder: ${error.message}; copy the whole folder or export again")
            }
        }
    }
}

/**
 * One turn of a conversation. role: "system" or "developer", "user", "assistant", or "tool" for the result of a call;
 * calls: an assistant's calls.
 */
public data class ChatMessage(val role: String, val content: String, val calls: List<ToolCall> = emptyList())

/** Reads a bundle's files one after another, by their names in the [raw] manifest. */
private class BundleReader(private val folder: File, private val raw: Any?, private val verify: Boolean) {
    private val files = raw.field<Map<String, Any?>>("files")

    fun read(readTokenizer: (String) -> Tokenizer): Bundle {
        val version = raw.field<Long>("format_version")
        if (version != FORMAT_VERSION) {
            throw BundleError("$folder: format $version, this runtime reads $FORMAT_VERSION; export again or update")
        }
        val manifest = manifest()
        for ((name, entry) in files) check(name, entry)
        val draftIds = draftIds(manifest)
        val settings = Json.parse(text("tokenizer_config.json"))
        val special = listOf("bos_token", "eos_token", "unk_token", "pad_token")
            .associateWith { special(settings.field<Any?>(it)) }
        return Bundle(
            folder, manifest, readTokenizer(text("tokenizer.json")), draftIds, nullRow(manifest),
            ChatTemplate(text("chat_template.jinja")), special,
        )
    }

    private fun manifest() = Manifest(
        raw.field("target"), raw.field("target_hash"), raw.field("drafter_hash"), positive("vocab_size"),
        raw.ints("eos_ids").toSet(), positive("max_context"), width("sa_kv_heads"), width("ca_kv_heads"),
        width("head_dim"),
        raw.field<Map<String, Any?>>("engines").mapValues { (_, row) ->
            EngineEntry(
                listed(row.field("file")), row.field<String?>("data")?.let(::listed), row.field("quant"),
                row.int("max_width"),
            )
        },
        (raw as Map<*, *>)["understudy"]?.let(::understudy), confidenceTemperature(),
    )

    private val hasDrafter = raw.field<Map<String, Any?>>("engines").isNotEmpty().also {
        if (!it && (raw as Map<*, *>)["understudy"] == null) {
            throw BundleError("$folder/$MANIFEST describes neither a drafter nor an understudy; export it again")
        }
    }

    /** Return a width of the drafter's engines; 1 without a drafter. */
    private fun width(name: String) = if (hasDrafter) positive(name) else 1

    /** Older bundles have none. */
    private fun confidenceTemperature(): Double {
        val name = "confidence_temperature"
        val given = if (name in (raw as Map<*, *>)) raw.double(name) else 1.0
        return given.also { if (it !in 0.05..20.0) throw JsonError("$name is $it") }
    }

    private fun understudy(entry: Any): UnderstudyEntry {
        val understudy = UnderstudyEntry(
            entry.field("folder"), entry.field("name"), entry.field("source_hash"), entry.field("format"),
            entry.int("bits"), entry.field("bytes"), entry.field("manifest_sha256"),
            if ("barred" in (entry as Map<*, *>)) entry.ints("barred") else emptyList(),
        )
        val place = understudy.folder
        if (place in setOf("", ".", "..") || File(place).name != place) throw notPlain(place)
        return understudy
    }

    private fun draftIds(manifest: Manifest): IntArray {
        if (!hasDrafter) return intArrayOf(0)
        val numbers = numbers(raw.field("draft_ids_file"))
        val ids = IntArray(numbers.remaining() / 4) { numbers.int }
        if (ids.size != positive("draft_vocab_size") || ids.any { it !in 0 until manifest.vocabSize }) {
            throw BundleError("$folder/${raw.field<String>("draft_ids_file")} does not fit the manifest; export again")
        }
        return ids
    }

    private fun nullRow(manifest: Manifest): FloatArray? {
        val name = raw.field<String?>("null_row_file") ?: return null
        val numbers = numbers(name)
        if (numbers.remaining() != 4 * manifest.rowShape.values) {
            throw BundleError("$folder/$name does not fit the manifest; export again")
        }
        return FloatArray(manifest.rowShape.values) { numbers.float }
    }

    private fun numbers(name: String) =
        ByteBuffer.wrap(File(folder, listed(name)).readBytes()).order(ByteOrder.LITTLE_ENDIAN)

    private fun text(name: String) = File(folder, listed(name)).readText()

    private fun positive(name: String) = raw.int(name).also { if (it < 1) throw JsonError("$name is $it") }

    /** Return a special token's text; tokenizer_config.json has a string or `{"content": ...}`. */
    private fun special(token: Any?) = token as? String ?: (token as? Map<*, *>)?.get("content") as? String ?: ""

    private fun listed(name: String): String {
        if (name !in files) throw BundleError("$folder/$MANIFEST lists no $name; export the bundle again")
        return name
    }

    private fun check(name: String, entry: Any?) {
        val file = File(folder, name)
        val bytes = entry.field<Long>("bytes")
        if (File(name).name != name) throw notPlain(name)
        if (!file.isFile) throw BundleError("$file is missing; copy the whole folder or export again")
        if (file.length() != bytes) throw BundleError("$file has ${file.length()} bytes, not $bytes; copy it again")
        if (verify && sha256(file) != entry.field<String>("sha256")) {
            throw BundleError("$file differs from its sha256 in the manifest; copy it again")
        }
    }

    private fun notPlain(name: String) =
        BundleError("$folder/$MANIFEST names $name, which is not a plain file name")
}

/** Return the ids below [vocabSize] that end a sentence or a line. */
internal fun sentenceEnds(tokenizer: Tokenizer, vocabSize: Int): Set<Int> =
    (0 until vocabSize).filterTo(HashSet()) { token ->
        val text = tokenizer.decode(listOf(token))
        '\n' in text || text.trimEnd().lastOrNull() in SENTENCE_ENDS
    }

/** SHA-256 of a file's bytes, in hexadecimal. */
internal fun sha256(file: File): String = file.inputStream().use(::sha256)

internal fun sha256(stream: InputStream): String {
    val digest = MessageDigest.getInstance("SHA-256")
    val buffer = ByteArray(1 shl 16)
    generateSequence { stream.read(buffer).takeIf { it >= 0 } }.forEach { digest.update(buffer, 0, it) }
    return digest.digest().toHex()
}
