package dev.outrider.core.link

import dev.outrider.core.Peer
import dev.outrider.core.next
import dev.outrider.core.protocol.Close
import dev.outrider.core.protocol.Hello
import java.util.concurrent.LinkedBlockingQueue
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertIs
import kotlin.test.assertTrue

class LinkTest {
    private fun link(server: String, token: String? = null, clearText: Set<String> = LOOPBACK) =
        Link(server, Hello(1, "t", "d"), {}, token?.let { { it } }, clearText = clearText)

    @Test
    fun addressesMayBeShort() {
        for ((server, url) in mapOf(
            "host:8765" to "ws://host:8765/v1/verify", "ws://host:1/" to "ws://host:1/v1/verify",
            "http://host:1" to "ws://host:1/v1/verify", "https://host" to "wss://host/v1/verify",
            "wss://host/outrider" to "wss://host/outrider/v1/verify", "wss://host/v1/verify" to "wss://host/v1/verify",
        )) assertEquals(url, verifierUrl(server))
    }

    @Test
    fun clearTextStaysOnThisMachine() {
        for (server in listOf("127.0.0.1:1", "localhost:1", "[::1]:1", "ws://localhost")) link(server, "token")
        link("wss://example.org", "token")
        link("10.0.2.2:1", clearText = LOOPBACK + "10.0.2.2")
        for (server in listOf("10.0.2.2:1", "ws://example.org", "192.0.2.1:8765", "localhost.example.org:1")) {
            assertTrue("clear text" in assertFailsWith<LinkRefused>(server) { link(server) }.message!!)
        }
    }

    @Test
    fun whatIsNoAddressIsRefused() {
        val odd = listOf("ftp://host", "ws://", "wss://a b", "ws:host", "wss://h:99999", "wss://h:0", "wss://a..b")
        for (server in odd) {
            assertFailsWith<LinkRefused>(server) { link(server) }
        }
    }

    @Test
    fun aTokenThatWasRefusedIsAskedForAgain() {
        Peer(setOf("second")).use { peer ->
            val tokens = ArrayDeque(listOf("two\r\nlines", "first", "second", "third"))
            val events = LinkedBlockingQueue<LinkEvent>()
            val link = Link(peer.address, Hello(1, "t", "d"), events::add, { tokens.removeFirst() })
            link.stay(Double.POSITIVE_INFINITY)
            val downs = List(2) { assertIs<LinkDown>(events.next()) }
            assertEquals(listOf("the token holds a line break", "no entry"), downs.map { it.reason })
            assertTrue(downs.all { it.refused })
            assertIs<LinkUp>(events.next())
            link.networkChanged()
            assertIs<LinkDown>(events.next())
            assertIs<LinkUp>(events.next())
            assertEquals(listOf("first", "second", "second").map { "Bearer $it" }, peer.dials.toList())
            link.close(Close(1))
        }
    }

    @Test
    fun aTokenThatWasNotJudgedIsKept() {
        Peer(setOf("first"), "503 Busy", "403 Forbidden", "500 Broken").use { peer ->
            val tokens = ArrayDeque(listOf("first", "second"))
            val events = LinkedBlockingQueue<LinkEvent>()
            val link = Link(peer.address, Hello(1, "t", "d"), events::add, { tokens.removeFirst() })
            link.stay(Double.POSITIVE_INFINITY)
            repeat(3) { assertIs<LinkDown>(events.next()) }
            assertIs<LinkUp>(events.next())
            assertEquals(List(4) { "Bearer first" }, peer.dials.toList())
            link.close(Close(1))
        }
    }

    @Test
    fun aFailingTokenProviderIsALinkThatIsDown() {
        val events = LinkedBlockingQueue<LinkEvent>()
        val link = Link("127.0.0.1:1", Hello(1, "t", "d"), events::add, { error("signed out") })
        link.stay(Double.POSITIVE_INFINITY)
        assertEquals("no token: signed out", assertIs<LinkDown>(events.next()).reason)
        link.close(Close(1))
    }

    @Test
    fun aTimeOutAndALongRoundTripMakeTheNextConnectionWaitLonger() {
        assertEquals(10.0, nextPatience(CONNECT_TIMEOUT, null))
        assertEquals(20.0, nextPatience(20.0, null))
        assertEquals(CONNECT_TIMEOUT, nextPatience(20.0, 0.05))
        assertEquals(9.6, nextPatience(CONNECT_TIMEOUT, 1.2), 1e-9)
    }

    @Test
    fun frameSizesFollowTheStandard() {
        val sizes = mapOf(0 to 2L, 125 to 127L, 126 to 130L, 65535 to 65539L, 65536 to 65546L)
        for ((payload, size) in sizes) {
            assertEquals(size, frameBytes(payload, masked = false))
            assertEquals(size + 4, frameBytes(payload, masked = true))
        }
    }
}
