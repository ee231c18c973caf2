package dev.outrider.core.link

import java.io.IOException
import java.net.InetAddress
import java.net.InetSocketAddress
import java.net.ServerSocket
import java.net.Socket
import kotlin.concurrent.thread
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertFailsWith
import kotlin.test.assertTrue

class DiallingTest {
    private fun address(text: String) = InetAddress.getByName(text)

    @Test
    fun familiesTakeTurns() {
        val (a, b, c, d) = listOf("::1", "::2", "::3", "10.0.0.1").map(::address)
        assertEquals(listOf(a, d, b, c), alternating(listOf(a, b, c, d)))
        assertEquals(listOf(d), alternating(listOf(d)))
    }

    @Test
    fun whoRefusesIsPassedOver() {
        ServerSocket(0, 5, address("127.0.0.1")).use { server ->
            val closed = ServerSocket(0, 5, address("127.0.0.1")).use { it.localPort }
            val addresses = listOf(closed, server.localPort).map { InetSocketAddress("127.0.0.1", it) }
            Dialling().connect(addresses).use { assertEquals(server.localPort, it.port) }
            assertFailsWith<IOException> { Dialling().connect(addresses.take(1)) }
        }
    }

    @Test
    fun closingEndsAnAttempt() {
        full { address ->
            val dialling = Dialling()
            val begun = System.nanoTime()
            thread { Thread.sleep(50); dialling.close() }
            assertFailsWith<IOException> { dialling.connect(listOf(address)) }
            assertTrue(System.nanoTime() - begun < 10e9)
        }
    }

    @Test
    fun whoIsSilentIsOvertaken() {
        full { silent ->
            ServerSocket(0, 5, address("127.0.0.1")).use { server ->
                val begun = System.nanoTime()
                val addresses = listOf(silent, InetSocketAddress("127.0.0.1", server.localPort))
                Dialling().connect(addresses).use { assertEquals(server.localPort, it.port) }
                assertTrue(System.nanoTime() - begun < 10e9)
            }
        }
    }

    /** Test with the address of a listener that never answers, as its queue is full. */
    private fun full(test: (InetSocketAddress) -> Unit) = ServerSocket(0, 1, address("127.0.0.1")).use { server ->
        val address = InetSocketAddress("127.0.0.1", server.localPort)
        val waiting = List(4) { Socket() }
        try {
            for (socket in waiting) runCatching { socket.connect(address, 100) }
            test(address)
        } finally {
            waiting.forEach { it.close() }
        }
    }
}
