package dev.outrider.core.link

import java.io.ByteArrayOutputStream
import java.io.IOException
import java.net.URI
import java.net.http.HttpClient
import java.net.http.WebSocket
import java.net.http.WebSocketHandshakeException
import java.nio.ByteBuffer
import java.util.concurrent.CompletableFuture
import java.util.concurrent.CompletionException
import java.util.concurrent.CompletionStage
import java.util.concurrent.atomic.AtomicLong

/** Carries links with Java's own HTTP client, as an app would with its OkHttpClient. */
internal class HttpClientTransport : Transport {
    private val client = HttpClient.newHttpClient()

    override fun open(
        url: URI, subprotocol: String, headers: Map<String, String>, listener: Transport.Listener,
    ): Transport.Socket {
        val builder = client.newWebSocketBuilder().subprotocols(subprotocol)
        for ((name, value) in headers) builder.header(name, value)
        return Carried(listener).apply { dial(builder.buildAsync(url, this)) }
    }

    private class Carried(private val listener: Transport.Listener) : Transport.Socket, WebSocket.Listener {
        private val queued = AtomicLong()
        private val message = ByteArrayOutputStream()

        @Volatile
        private var aborted = false

        /** Done when all that was sent is on its way. */
        private lateinit var idle: CompletableFuture<WebSocket>
        override val unsent get() = queued.get()

        fun dial(opening: CompletableFuture<WebSocket>) {
            idle = opening
            opening.whenComplete { socket, error ->
                if (aborted) socket?.abort()
                val cause = (error as? CompletionException)?.cause ?: error
                if (cause is WebSocketHandshakeException) {
                    val type = cause.response.headers().firstValue("content-type").orElse("")
                    listener.refused(cause.response.statusCode(), type, "")
                } else if (cause != null) {
                    listener.failed(cause as? IOException ?: IOException(cause))
                }
            }
        }

        @Synchronized
        private fun next(work: (WebSocket) -> CompletableFuture<WebSocket>) {
            idle = idle.thenCompose(work)
        }

        override fun send(message: ByteArray) {
            queued.addAndGet(message.size.toLong())
            next { socket ->
                socket.sendBinary(ByteBuffer.wrap(message), true).whenComplete { _, _ ->
                    queued.addAndGet(-message.size.toLong())
                }
            }
        }

        override fun close() = next { it.sendClose(1000, "") }

        override fun abort() {
            aborted = true
            next { socket -> socket.abort().let { CompletableFuture.completedFuture(socket) } }
        }

        override fun onOpen(socket: WebSocket) {
            listener.opened()
            socket.request(Long.MAX_VALUE) // asking anew behind each message, it now and then missed the end behind one
        }

        override fun onBinary(socket: WebSocket, data: ByteBuffer, last: Boolean): CompletionStage<*>? {
            message.write(ByteArray(data.remaining()).also { data.get(it) })
            if (last) {
                listener.received(message.toByteArray())
                message.reset()
            }
            return null
        }

        override fun onText(socket: WebSocket, data: CharSequence, last: Boolean): CompletionStage<*>? {
            next { it.sendClose(1003, "") }
            listener.failed(IOException("the other side sent a text message"))
            return null
        }

        override fun onClose(socket: WebSocket, code: Int, reason: String): CompletionStage<*>? {
            listener.closed(code, reason)
            return null
        }

        override fun onError(socket: WebSocket, error: Throwable) = listener.failed(IOException(error))
    }
}
