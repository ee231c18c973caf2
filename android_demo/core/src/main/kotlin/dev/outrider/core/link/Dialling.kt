package dev.outrider.core.link

import java.io.Closeable
import java.io.IOException
import java.net.InetAddress
import java.net.InetSocketAddress
import java.net.Socket
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.TimeUnit
import kotlin.concurrent.thread

/** Milliseconds until the next address is dialled in parallel, as RFC 8305 recommends. */
private const val HEAD_START_MILLIS = 250L

/** Return the addresses of [host]. Raises [java.net.UnknownHostException]. */
internal fun addressesOf(host: String, port: Int): List<InetSocketAddress> =
    alternating(InetAddress.getAllByName(host).toList()).map { InetSocketAddress(it, port) }

/** Alternate IPv4 and IPv6 addresses: if one kind is broken, the second address is of the other. */
internal fun alternating(addresses: List<InetAddress>): List<InetAddress> {
    val (first, other) = addresses.partition { it.javaClass == addresses[0].javaClass }
    return addresses.indices.flatMap { listOfNotNull(first.getOrNull(it), other.getOrNull(it)) }
}

/** One TCP connection to a host, over whichever of its addresses answers first. Closing it ends all attempts. */
internal class Dialling : Closeable {
    private val sockets = CopyOnWriteArrayList<Socket>()

    @Volatile
    private var closed = false

    /** Dial [addresses], each shortly after the one before; once. Raises [IOException]. */
    fun connect(addresses: List<InetSocketAddress>): Socket {
        val ended = LinkedBlockingQueue<Pair<Socket, IOException?>>()
        var failure = IOException("the host has no address")
        var failed = 0
        while (failed < addresses.size) {
            if (sockets.size < addresses.size) {
                val (address, socket) = addresses[sockets.size] to Socket().also { sockets += it }
                if (closed) throw IOException("not wanted any more")
                thread(isDaemon = true, name = "outrider-link-dial") {
                    ended += socket to errorOf { socket.connect(address) }
                }
            }
            val isLast = sockets.size == addresses.size
            val (socket, error) =
                if (isLast) ended.take() else ended.poll(HEAD_START_MILLIS, TimeUnit.MILLISECONDS) ?: continue
            if (error == null) {
                for (other in sockets) if (other !== socket) other.close()
                socket.tcpNoDelay = true
                return socket
            }
            failure = error
            failed++
        }
        throw failure
    }

    private fun errorOf(work: () -> Unit): IOException? = try {
        work()
        null
    } catch (error: IOException) {
        error
    }

    override fun close() {
        closed = true
        sockets.forEach { it.close() }
    }
}
