package dev.outrider.core

import dev.outrider.core.protocol.PROTOCOL_VERSION
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.encode
import java.io.Closeable
import java.io.DataInputStream
import java.io.IOException
import java.net.InetAddress
import java.net.ServerSocket
import java.net.Socket
import java.security.MessageDigest
import java.util.Base64
import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.TimeUnit
import kotlin.concurrent.thread
import kotlin.test.assertNotNull

/**
 * A verifier that greets every device and then listens. [tokens]: the accepted tokens; null: any. refusals: HTTP
 * statuses of the first dials. [deaf]: it reads nothing behind HELLO.
 */
internal class Peer(
    private val tokens: Set<String>? = null, vararg refusals: String, private val deaf: Boolean = false,
) : Closeable {
    private val server = ServerSocket(0, 50, InetAddress.getLoopbackAddress())
    private val sockets = CopyOnWriteArrayList<Socket>()
    private val refusals = LinkedBlockingQueue(refusals.toList())
    val port get() = server.localPort
    val address = "127.0.0.1:$port"

    /** Connections that are open. */
    val connected get() = sockets.size

    /** The `Authorization` of every dial. */
    val dials = CopyOnWriteArrayList<String>()

    /** The first byte of every frame after HELLO. */
    val frames = CopyOnWriteArrayList<Int>()

    init {
        thread(isDaemon = true) {
            try {
                while (true) server.accept().also { sockets += it; thread(isDaemon = true) { serve(it) } }
            } catch (_: IOException) {
                // closed
            }
        }
    }

    private fun serve(socket: Socket) = try {
        val input = DataInputStream(socket.getInputStream().buffered())
        val head = generateSequence { line(input).ifEmpty { null } }.toList()
        fun field(name: String) = head.firstOrNull { it.startsWith("$name: ") }?.substringAfter(": ").orEmpty()
        dials += field("Authorization")
        val known = tokens == null || field("Authorization").removePrefix("Bearer ") in tokens
        val refusal = refusals.poll() ?: if (known) null else "401 Unauthorized"
        if (refusal != null) {
            socket.getOutputStream().write("HTTP/1.1 $refusal\r\nContent-Length: 9\r\n\r\nno entry\n".toByteArray())
        } else {
            val key = field("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            val digest = MessageDigest.getInstance("SHA-1").digest(key.toByteArray())
            val accept = Base64.getEncoder().encodeToString(digest)
            val upgrade = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            socket.getOutputStream().write("${upgrade}Sec-WebSocket-Accept: $accept\r\n\r\n".toByteArray())
            frame(input)
            val welcome = encode(Welcome(PROTOCOL_VERSION.toLong(), "target", "drafter", 50, 64, 64, 32))
            socket.getOutputStream().write(byteArrayOf(0x82.toByte(), welcome.size.toByte()) + welcome)
            while (deaf && !server.isClosed) Thread.sleep(2)
            while (true) frames += frame(input)
        }
    } catch (_: IOException) {
        // the device has hung up
    } finally {
        socket.close()
        sockets -= socket
    }

    private fun line(input: DataInputStream): String =
        generateSequence { input.readByte().toInt().toChar() }.takeWhile { it != '\n' }.joinToString("").trim()

    /** Read a frame and return its first byte. */
    private fun frame(input: DataInputStream): Int {
        val first = input.readUnsignedByte()
        val size = input.readUnsignedByte() and 0x7F
        val mask = ByteArray(4)
        val long = if (size == 126) input.readUnsignedShort() else size
        input.readFully(mask)
        input.readFully(ByteArray(long))
        return first
    }

    override fun close() {
        server.close()
        for (socket in sockets) socket.close() // Java's forEach takes an interface that Android's API level 23 lacks
    }
}

/** Return the next reported event; the test fails if none comes. */
internal fun <T : Any> LinkedBlockingQueue<T>.next(): T = assertNotNull(poll(20, TimeUnit.SECONDS), "nothing came")

/** Waits until [condition] holds. */
internal fun eventually(condition: () -> Boolean) {
    val end = System.nanoTime() + 20_000_000_000
    while (!condition()) {
        check(System.nanoTime() < end) { "it never came true" }
        Thread.sleep(2)
    }
}
