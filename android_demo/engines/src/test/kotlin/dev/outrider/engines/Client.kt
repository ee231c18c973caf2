package dev.outrider.engines

import dev.outrider.core.bundle.SubwordTokenizer
import dev.outrider.core.bundle.field
import dev.outrider.core.bundle.int
import dev.outrider.core.device

/** A device for tests/android with a bundle's own engine and understudy; settings `engine` and `threads`. */
fun main() = device(
    SubwordTokenizer::parse, { bundle, settings -> openUnderstudy(bundle, settings.int("threads")) },
) { bundle, settings -> openEngine(bundle, settings.field<String?>("engine"), settings.int("threads")) }
