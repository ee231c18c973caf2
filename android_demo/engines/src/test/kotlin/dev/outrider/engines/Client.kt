package dev.outrider.engines

import dev.outrider.core.device
import dev.outrider.core.runtime.BytePairTokenizer
import dev.outrider.core.runtime.field
import dev.outrider.core.runtime.int

/** A device for tests/android that drafts with a bundle's own engine; settings `engine` and `threads`. */
fun main() = device(BytePairTokenizer::parse, { _, _ -> null }) { bundle, settings ->
    openEngine(bundle, settings.field<String?>("engine"), settings.int("threads"))
}
