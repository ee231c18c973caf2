package dev.outrider.core.targets

import dev.outrider.core.bundle.BundleError
import dev.outrider.core.bundle.Json
import dev.outrider.core.bundle.JsonError
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.int
import dev.outrider.core.bundle.sha256
import dev.outrider.core.protocol.EngineApi
import java.io.File

/** Supported version of the folder's layout and the graph's arithmetic. */
private const val FORMAT_VERSION = 8
private const val MANIFEST = "manifest.json"

/** Counts and widths of a target graph. */
@EngineApi
public data class TargetShape(
    val vocabSize: Int, val layers: Int, val heads: Int, val kvHeads: Int, val headDim: Int, val window: Int,
)

/** A complete model in a folder, lowered by `outrider_core.targets`, whose files are checked. graph: the ONNX file. */
@EngineApi
public class TargetBundle private constructor(public val graph: File, public val shape: TargetShape) {
    public companion object {
        /**
         * Opens [folder] and checks every file; takes a second for 200 MB. manifestSha256: of the manifest that belongs
         * there. Raises [BundleError] with one clear line.
         */
        public fun open(folder: File, manifestSha256: String): TargetBundle {
            val file = File(folder, MANIFEST)
            if (!file.isFile) throw BundleError("$folder is not there; fetch the bundle's understudy")
            if (sha256(file) != manifestSha256) {
                throw BundleError("$folder is another bundle's understudy; copy this bundle's own, or delete it")
            }
            return try {
                val raw = Json.parse(file.readText())
                val version = raw.int("format_version")
                if (version != FORMAT_VERSION) {
                    throw BundleError("$folder: format $version, this runtime reads $FORMAT_VERSION; export again")
                }
                for ((name, entry) in raw.field<Map<String, Any?>>("files")) check(File(folder, name), entry)
                val config = raw.field<Any>("config")
                val windowed = config.field<List<*>?>("windowed_layers").orEmpty()
                val shape = TargetShape(
                    config.int("vocab_size"), config.int("num_hidden_layers"), config.int("num_attention_heads"),
                    config.int("num_key_value_heads"), config.int("head_dim"),
                    if (windowed.isEmpty()) 0 else config.int("sliding_window"),
                )
                TargetBundle(File(folder, "target.onnx"), shape)
            } catch (error: JsonError) {
                throw BundleError("$file is damaged: ${error.message}; copy the understudy again", error)
            }
        }

        private fun check(file: File, entry: Any?) {
            if (!file.isFile) throw BundleError("$file is missing; copy the understudy again")
            if (file.length() != entry.field<Long>("bytes") || sha256(file) != entry.field<String>("sha256")) {
                throw BundleError("$file is not what was written; copy the understudy again")
            }
        }
    }
}
