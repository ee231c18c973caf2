package dev.outrider.core.link

import dev.outrider.core.Peer
import dev.outrider.core.next
import dev.outrider.core.protocol.Close
import dev.outrider.core.protocol.Hello
import java.io.Closeable
import java.io.IOException
import java.net.Authenticator
import java.net.InetAddress
import java.net.InetSocketAddress
import java.net.PasswordAuthentication
import java.net.Proxy
import java.net.ProxySelector
import java.net.ServerSocket
import java.net.Socket
import java.net.SocketAddress
import java.net.URI
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.LinkedBlockingQueue
import kotlin.concurrent.thread
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertIs
import kotlin.test.assertNull

/** A verifier whose name only the proxy knows. With TLS and pins: tests/android/test_link.py. */
class ProxyTest {
    private fun events(proxy: HttpProxy, test: (LinkedBlockingQueue<LinkEvent>) -> Unit) {
        val events = LinkedBlockingQueue<LinkEvent>()
        val link = Link(
            "verifier.invalid:8765", Hello(1, "t", "d"), events::add,
            transport = SocketTransport(proxies = proxy.selector), clearText = setOf("verifier.invalid"),
        )
        link.stay(Double.POSITIVE_INFINITY)
        test(events)
        link.close(Close(1))
    }

    @Test
    fun theVerifierIsReachedThroughIt() = Peer().use { peer ->
        HttpProxy(peer.port).use { proxy ->
            events(proxy) { assertIs<LinkUp>(it.next()) }
            assertEquals(listOf("CONNECT verifier.invalid:8765 HTTP/1.1"), proxy.asked.toList())
        }
    }

    @Test
    fun itsCredentialsAreTheAppsAuthenticators() = Peer().use { peer ->
        HttpProxy(peer.port, "Basic dXNlcjpwYXNzd29yZA==").use { proxy ->
            events(proxy) {
                val reason = "the proxy 127.0.0.1:${proxy.port} answered: HTTP/1.1 407 Proxy Authentication Required"
                assertEquals(reason, assertIs<LinkDown>(it.next()).reason)
            }
            Authenticator.setDefault(object : Authenticator() {
                override fun getPasswordAuthentication() = PasswordAuthentication("user", "password".toCharArray())
                    .takeIf { requestorType == RequestorType.PROXY && requestingPort == proxy.port }
            })
            try {
                events(proxy) { assertIs<LinkUp>(it.next()) }
            } finally {
                Authenticator.setDefault(null)
            }
        }
    }

    @Test
    fun whoIsReachedDirectly() = HttpProxy(1).use { proxy ->
        val there = InetSocketAddress.createUnresolved("127.0.0.1", proxy.port)
        assertEquals(there.port, proxyOf(URI("wss://verifier.invalid/v1"), proxy.selector)?.port)
        assertEquals(listOf("https://verifier.invalid:443/"), proxy.selected.toList())
        for (server in listOf("127.0.0.1:1", "localhost", "[::1]:8765")) {
            assertNull(proxyOf(URI("ws://$server"), proxy.selector), server)
        }
        assertNull(proxyOf(URI("wss://verifier.invalid"), null))
    }
}

/** An HTTP proxy that connects all clients to the port [upstream]. authorization: required header; null: none. */
private class HttpProxy(private val upstream: Int, private val authorization: String? = null) : Closeable {
    private val server = ServerSocket(0, 5, InetAddress.getLoopbackAddress())
    val port get() = server.localPort
    val asked = CopyOnWriteArrayList<String>()
    val selected = CopyOnWriteArrayList<String>()

    val selector = object : ProxySelector() {
        override fun select(uri: URI): List<Proxy> {
            selected += "$uri"
            return listOf(Proxy(Proxy.Type.HTTP, InetSocketAddress("127.0.0.1", port)))
        }

        override fun connectFailed(uri: URI, address: SocketAddress, error: IOException) = Unit
    }

    init {
        thread(isDaemon = true) {
            try {
                while (true) server.accept().also { thread(isDaemon = true) { serve(it) } }
            } catch (_: IOException) {
                // closed
            }
        }
    }

    private fun serve(device: Socket) = device.use {
        val head = readHead(device.getInputStream())
        asked += head.first()
        if (authorization != null && "Proxy-Authorization: $authorization" !in head) {
            val refusal = "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n"
            return@use device.getOutputStream().write(refusal.toByteArray())
        }
        Socket(InetAddress.getLoopbackAddress(), upstream).use { verifier ->
            device.getOutputStream().write("HTTP/1.1 200 OK\r\n\r\n".toByteArray())
            thread(isDaemon = true) { pipe(verifier, device) }
            pipe(device, verifier)
        }
    }

    private fun pipe(from: Socket, to: Socket) {
        try {
            from.getInputStream().copyTo(to.getOutputStream())
        } catch (_: IOException) {
            // one of them has hung up
        }
    }

    override fun close() = server.close()
}
