/** The verifier's address. */
package dev.outrider.core.link

import java.net.URI

private const val PATH = "/v1/verify"
private val PORTS = 1..65535

/** Parse [url]. Raises [LinkRefused] unless it is ws://host or wss://host, with or without a port. */
internal fun parseAddress(url: String): URI {
    val parsed = runCatching { URI(url) }.getOrNull()
    val known = parsed?.scheme == "ws" || parsed?.scheme == "wss"
    if (parsed == null || !known || parsed.host == null || (parsed.port != -1 && parsed.port !in PORTS)) {
        throw LinkRefused("$url is not an address; write wss://host or wss://host:port, with ports up to 65535")
    }
    return parsed
}

/** `host:port`, `ws://host:port` or `wss://...` -> the WebSocket URL of the verifier's endpoint. */
internal fun verifierUrl(server: String): String {
    val url = (if ("://" in server) server else "ws://$server")
        .replaceFirst("http://", "ws://").replaceFirst("https://", "wss://").trimEnd('/')
    return if (url.endsWith(PATH)) url else url + PATH
}
