package dev.outrider.core.link

import dev.outrider.core.Peer
import dev.outrider.core.eventually
import dev.outrider.core.next
import dev.outrider.core.protocol.Close
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.PROTOCOL_VERSION
import java.util.concurrent.LinkedBlockingQueue
import kotlin.test.AfterTest
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertIs
import kotlin.test.assertNotNull
import kotlin.test.assertNull

/** A link that dials when it is needed and hangs up when it is not, on a clock that the test moves. */
class LifecycleTest {
    private val peer = Peer()
    private val timer = VirtualTimer()
    private val events = LinkedBlockingQueue<LinkEvent>()
    private val hello = Hello(PROTOCOL_VERSION, "target", "drafter")
    private val link = Link(peer.address, hello, events::add, timer = timer) { timer.millis }

    @AfterTest
    fun close() {
        link.close(Close(1))
        peer.close()
    }

    private val pings get() = peer.frames.count { it == 0x89 }

    @Test
    fun nothingIsDialledBeforeItIsNeeded() {
        timer.advance(600)
        assertEquals(0, peer.dials.size)
        link.stay(60.0)
        assertIs<LinkUp>(events.next())
        assertEquals(1, peer.dials.size)
    }

    @Test
    fun tenIdleMinutesBringNoFrameAndNoDialAfterHangingUp() {
        link.stay(Double.POSITIVE_INFINITY)
        assertIs<LinkUp>(events.next())
        eventually { timer.advance(10); pings > 0 } // an answer's connection is pinged
        link.stay(60.0)
        val before = pings
        timer.advance(59)
        assertNotNull(link.welcome)
        assertEquals(before, pings)
        timer.advance(1)
        assertNull(link.welcome)
        eventually { peer.frames.last() == 0x88 } // a close, so that the verifier need not find out
        val frames = peer.frames.size
        timer.advance(600)
        link.networkChanged()
        Thread.sleep(300) // longer than the first pause between two attempts
        assertEquals(listOf(frames, 1), listOf(peer.frames.size, peer.dials.size))
        assertEquals("", link.error)
        assertEquals(0, events.size)
    }

    @Test
    fun whatIsNeededAgainIsDialledAtOnce() {
        link.stay(60.0)
        assertIs<LinkUp>(events.next())
        timer.advance(60)
        link.stay(Double.POSITIVE_INFINITY)
        assertIs<LinkUp>(events.next())
        timer.advance(600)
        assertNotNull(link.welcome)
        assertEquals(2, peer.dials.size)
    }

    @Test
    fun anotherNetworkMeansOneDialEachTime() {
        link.stay(600.0)
        assertIs<LinkUp>(events.next())
        repeat(3) {
            link.networkChanged()
            assertEquals("the network has changed", assertIs<LinkDown>(events.next()).reason)
            assertIs<LinkUp>(events.next())
            assertEquals(2 + it, peer.dials.size)
        }
    }

    @Test
    fun aConnectionThatSleptThroughItsEndIsDialledAnew() {
        link.stay(60.0)
        assertIs<LinkUp>(events.next())
        timer.millis += 3_600_000 // the timer stood still meanwhile
        link.stay(Double.POSITIVE_INFINITY)
        assertIs<LinkDown>(events.next())
        assertIs<LinkUp>(events.next())
        assertEquals(2, peer.dials.size)
    }
}
