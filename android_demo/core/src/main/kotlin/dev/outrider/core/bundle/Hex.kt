/** Bytes as hexadecimal text. */
package dev.outrider.core.bundle

internal fun ByteArray.toHex(): String = joinToString("") { (it.toInt() and 0xFF).toString(16).padStart(2, '0') }

/** Decode hexadecimal text. Raises [IllegalArgumentException] on other text. */
internal fun String.hexToBytes(): ByteArray {
    require(length % 2 == 0) { "half a byte" }
    return ByteArray(length / 2) { substring(2 * it, 2 * it + 2).toInt(16).toByte() }
}
