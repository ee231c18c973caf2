package dev.outrider.core.link

import dev.outrider.core.Peer
import dev.outrider.core.eventually
import dev.outrider.core.next
import dev.outrider.core.protocol.Close
import dev.outrider.core.protocol.Hello
import dev.outrider.core.runtime.Options
import java.util.concurrent.LinkedBlockingQueue
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertIs
import kotlin.test.assertTrue

/** A link that an app's own WebSocket carries; against a real verifier: tests/android/test_client.py. */
class TransportTest {
    private val events = LinkedBlockingQueue<LinkEvent>()

    private fun link(address: String, timer: VirtualTimer = VirtualTimer(), token: (suspend () -> String)? = null) =
        Link(address, Hello(1, "t", "d"), events::add, token, HttpClientTransport(), timer = timer) { timer.millis }

    @Test
    fun itConnectsSendsAndHangsUp() = Peer().use { peer ->
        val link = link(peer.address)
        link.stay(60.0)
        assertIs<LinkUp>(events.next())
        link.send(Close(1))
        eventually { peer.frames.toList() == listOf(0x82) }
        link.stay(0.0)
        eventually { peer.frames.last() == 0x88 }
        link.close(Close(1))
    }

    @Test
    fun withoutPingsAMessageAsksWhetherTheVerifierIsThere() = Peer().use { peer ->
        val timer = VirtualTimer()
        val link = link(peer.address, timer)
        link.stay(Double.POSITIVE_INFINITY)
        assertIs<LinkUp>(events.next())
        eventually { timer.advance(10); peer.frames.isNotEmpty() }
        assertEquals(0x82, peer.frames.first())
        timer.advance(30)
        link.close(Close(1))
    }

    @Test
    fun refusalsEndsAndAbsentVerifiersAreToldApart() = Peer(setOf("second")).use { peer ->
        val tokens = ArrayDeque(listOf("first", "second"))
        val link = link(peer.address) { tokens.removeFirst() }
        link.stay(Double.POSITIVE_INFINITY)
        val refused = assertIs<LinkDown>(events.next())
        assertTrue(refused.refused && refused.reason == "HTTP 401")
        assertIs<LinkUp>(events.next())
        peer.close()
        assertTrue(!assertIs<LinkDown>(events.next()).refused)
        assertTrue(!assertIs<LinkDown>(events.next()).refused) // nobody is there to dial
        link.close(Close(1))
    }

    @Test
    fun whatATransportWouldNotHeedIsRefused() {
        assertFailsWith<IllegalArgumentException> { Options(transport = HttpClientTransport(), pins = setOf(PIN)) }
        assertFailsWith<IllegalArgumentException> { Options(pins = setOf("sha1/AAAA")) }
        Options(pins = setOf(PIN))
    }

    private companion object {
        const val PIN = "sha256/47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
    }
}
