package dev.outrider.core.link

import dev.outrider.core.Peer
import dev.outrider.core.next
import dev.outrider.core.protocol.Close
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.Open
import dev.outrider.core.protocol.PROTOCOL_VERSION
import dev.outrider.core.protocol.Sampling
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.encode
import java.net.URI
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.LinkedBlockingQueue
import kotlin.concurrent.thread
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFalse
import kotlin.test.assertIs

/** A link that takes long messages slowly, or nothing any more. */
class StalledLinkTest {
    /** A WebSocket whose other side greets and says no more. */
    private class Greeted(private val listener: Transport.Listener) : Transport.Socket {
        private var greeted = false
        var pings = 0

        @Volatile
        override var unsent = 0L

        override fun send(message: ByteArray) {
            if (greeted) return
            greeted = true
            listener.received(encode(Welcome(PROTOCOL_VERSION.toLong(), "t", "d", 50, 64, 64, 32)))
        }

        override fun ping() = true.also { pings++ }

        override fun close() {}

        override fun abort() {}
    }

    private val events = LinkedBlockingQueue<LinkEvent>()

    private fun link(address: String, transport: Transport = SocketTransport()) =
        Link(address, Hello(1, "t", "d"), events::add, transport = transport, timer = VirtualTimer())

    @Test
    fun sendingNeverWaitsAndAnotherConnectionIsDialled() = Peer(deaf = true).use { peer ->
        val link = link(peer.address)
        link.stay(Double.POSITIVE_INFINITY)
        assertIs<LinkUp>(events.next())
        val long = Open(0, ByteArray(16), 0, ByteArray(500_000), 0, Sampling())
        val sending = thread { repeat(40) { link.send(long) } } // more than sockets of this machine hold
        sending.join(20_000)
        assertFalse(sending.isAlive)
        while (events.isEmpty()) {
            link.renew()
            Thread.sleep(100)
        }
        assertIs<LinkDown>(events.next())
        assertIs<LinkUp>(events.next())
        assertEquals(2, peer.dials.size)
        link.close(Close(1))
    }

    @Test
    fun aLongMessageOnItsWayIsNoSilence() {
        val sockets = CopyOnWriteArrayList<Greeted>()
        val transport = object : Transport {
            override fun open(
                url: URI, subprotocol: String, headers: Map<String, String>, listener: Transport.Listener,
            ) = Greeted(listener).also { sockets += it; listener.opened() }
        }
        val link = link("localhost:1", transport)
        link.stay(Double.POSITIVE_INFINITY)
        assertIs<LinkUp>(events.next())
        val socket = sockets.single()
        for (left in listOf(90_000L, 60_000L, 30_000L)) {
            socket.unsent = left
            link.renew()
            assertEquals(0, socket.pings)
        }
        link.renew() // nothing has left since
        assertEquals(1, socket.pings)
        assertIs<LinkDown>(events.next())
        assertIs<LinkUp>(events.next())
        assertEquals(2, sockets.size)
        link.close(Close(1))
    }
}
