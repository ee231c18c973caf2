/** The verifier's address. */
package dev.outrider.core.link

import java.net.URI

private val PORTS = 1..65535

/** The address that [url] is. Raises [LinkRefused] unless it is ws://host or wss://host, with or without a port. */
internal fun parseAddress(url: String): URI {
    val parsed = runCatching { URI(url) }.getOrNull()
    val known = parsed?.scheme == "ws" || parsed?.scheme == "wss"
    if (parsed == null || !known || parsed.host == null || (parsed.port != -1 && parsed.port !in PORTS)) {
        throw LinkRefused("$url is not an address; write wss://host or wss://host:port, with ports up to 65535")
    }
    return parsed
}
