/** HTTP proxies, through which CONNECT reaches a verifier. */
package dev.outrider.core.link

import java.io.IOException
import java.io.InputStream
import java.net.Authenticator
import java.net.InetSocketAddress
import java.net.Proxy
import java.net.ProxySelector
import java.net.Socket
import java.net.URI
import kotlin.io.encoding.Base64
import kotlin.io.encoding.ExperimentalEncodingApi

/** Most characters of an HTTP head. */
private const val LONGEST_HEAD = 16 * 1024

/** Return the HTTP proxy that [proxies] names for [url]; null: none. Connections to this device use none. */
internal fun proxyOf(url: URI, proxies: ProxySelector?): InetSocketAddress? {
    if (proxies == null || bareHost(url) in LOOPBACK) return null
    val scheme = if (url.scheme == "wss") "https" else "http"
    val proxy = proxies.select(URI(scheme, null, url.host, portOf(url), "/", null, null)).firstOrNull()
    return if (proxy?.type() == Proxy.Type.HTTP) proxy.address() as InetSocketAddress else null
}

/**
 * Ask the [proxy] behind [socket] for a connection to the host of [url]. Credentials are those of
 * [java.net.Authenticator], if the app has set one that knows this proxy. Raises [IOException].
 */
@OptIn(ExperimentalEncodingApi::class) // of Base64 in Kotlin 2.1
internal fun tunnel(socket: Socket, url: URI, proxy: InetSocketAddress) {
    val host = "${url.host}:${portOf(url)}"
    val user = Authenticator.requestPasswordAuthentication(
        proxy.hostString, proxy.address, proxy.port, "http", "", "Basic", null, Authenticator.RequestorType.PROXY,
    )
    val credentials = user?.let { "${it.userName}:${it.password.concatToString()}".toByteArray() }
    val header = credentials?.let { "Proxy-Authorization: Basic ${Base64.encode(it)}\r\n" }.orEmpty()
    socket.getOutputStream().write("CONNECT $host HTTP/1.1\r\nHost: $host\r\n$header\r\n".toByteArray())
    val status = readHead(socket.getInputStream()).first()
    if (!Regex("""HTTP/1\.[01] 2\d\d( .*)?""").matches(status)) {
        throw IOException("the proxy ${proxy.hostString}:${proxy.port} answered: ${status.take(100)}")
    }
}

/** Return the lines of an HTTP head; nothing after it is read. Raises [IOException]. */
internal fun readHead(input: InputStream): List<String> {
    val head = StringBuilder()
    while (!head.endsWith("\r\n\r\n")) {
        if (head.length > LONGEST_HEAD) throw WebSocketError("the other side's handshake does not end")
        head.append(readByte(input).toChar())
    }
    return head.trim().lines()
}
