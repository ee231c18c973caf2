package dev.outrider.core.link

import dev.outrider.core.protocol.EMPTY
import dev.outrider.core.protocol.MAX_SERVER_FRAME
import java.io.IOException
import java.net.ProxySelector
import java.net.URI
import java.nio.ByteBuffer
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.TimeUnit
import java.util.concurrent.atomic.AtomicLong
import javax.net.ssl.SSLSocketFactory
import kotlin.concurrent.thread

/**
 * WebSockets over sockets of this library's own. tls: whom to trust; null: whom the system trusts. pins: see [secured].
 * proxies: see [proxyOf].
 */
internal class SocketTransport(
    private val tls: SSLSocketFactory? = null,
    private val pins: Set<String> = emptySet(),
    private val proxies: ProxySelector? = null,
) : Transport {
    override fun open(
        url: URI, subprotocol: String, headers: Map<String, String>, listener: Transport.Listener,
    ): Transport.Socket = OwnSocket(url, subprotocol, headers, listener).apply { start() }

    /** One thread dials and receives; frames leave through another, so that nothing waits for a full buffer. */
    private inner class OwnSocket(
        private val url: URI,
        private val subprotocol: String,
        private val headers: Map<String, String>,
        private val listener: Transport.Listener,
    ) : Transport.Socket {
        private val writer: ExecutorService = Executors.newSingleThreadExecutor { daemon(it, "outrider-link-writer") }
        private val dialling = Dialling()
        private val queued = AtomicLong()
        private lateinit var socket: WebSocket
        override val unsent get() = queued.get()

        fun start() {
            thread(isDaemon = true, name = "outrider-link-reader") { run() }
        }

        private fun run() = try {
            socket = WebSocket(connected(), MAX_SERVER_FRAME)
            socket.shakeHands(url, subprotocol, headers)
            listener.opened()
            while (true) listener.received(socket.receive(::write, listener::ponged))
        } catch (error: HandshakeRefused) {
            finish()
            listener.refused(error.status, error.contentType, error.body)
        } catch (error: WebSocketClosed) {
            finish()
            listener.closed(error.code, error.reason)
        } catch (error: IOException) {
            finish()
            listener.failed(error)
        } catch (error: RuntimeException) { // from a system that forbids connections, or an app's proxies
            abort()
            listener.failed(IOException(error.toString(), error))
        }

        private fun connected(): java.net.Socket {
            val proxy = proxyOf(url, proxies)
            val (host, port) = proxy?.let { it.hostString to it.port } ?: (bareHost(url) to portOf(url))
            val raw = dialling.connect(addressesOf(host, port))
            if (proxy != null) tunnel(raw, url, proxy)
            return if (url.scheme == "wss") secured(raw, url, tls ?: systemTls(), pins) else raw
        }

        override fun send(message: ByteArray) = write(BINARY, message)

        override fun ping(): Boolean {
            write(PING, EMPTY)
            return true
        }

        override fun close() {
            write(CLOSE, ByteBuffer.allocate(2).putShort(1000).array())
            later(dialling::close)
            writer.shutdown()
        }

        private fun write(opcode: Int, payload: ByteArray) {
            queued.addAndGet(frameBytes(payload.size, masked = true))
            later { socket.write(opcode, payload) { queued.addAndGet(-it.toLong()) } }
        }

        private fun later(work: () -> Unit) {
            try {
                writer.execute {
                    try {
                        work()
                    } catch (_: IOException) {
                        dialling.close() // the reader reports it
                    }
                }
            } catch (_: RejectedExecutionException) {
                // the connection has ended
            }
        }

        /** Hang up after everything sent, such as the answer to a close; waits at most a second. */
        private fun finish() {
            writer.shutdown()
            writer.awaitTermination(1, TimeUnit.SECONDS)
            abort()
        }

        override fun abort() {
            dialling.close()
            writer.shutdownNow()
        }
    }

    private companion object {
        fun systemTls() = SSLSocketFactory.getDefault() as SSLSocketFactory
    }
}
