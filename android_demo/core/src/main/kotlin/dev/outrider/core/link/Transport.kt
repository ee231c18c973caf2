package dev.outrider.core.link

import java.io.IOException
import java.net.URI

/**
 * Opens WebSockets to verifiers in place of the library's own sockets, e.g. with the OkHttpClient that an app has.
 * docs/embedding.md has one for OkHttp.
 *
 * No call may block, and calls come from any thread.
 */
public interface Transport {
    /**
     * Begin to open a WebSocket at [url]; [listener] gets its events, in order. Request [subprotocol]. [headers]:
     * further headers of the handshake, with the token; so never follow a redirect.
     */
    public fun open(url: URI, subprotocol: String, headers: Map<String, String>, listener: Listener): Socket

    /** One WebSocket. */
    public interface Socket {
        /** Bytes given to [send] that are not on their way yet. */
        public val unsent: Long

        /** Send a binary message after those before. Without a connection it is dropped. */
        public fun send(message: ByteArray)

        /** Send a ping, whose pong is reported. False: this transport cannot; the link sends a message instead. */
        public fun ping(): Boolean = false

        /** Close with code 1000, after everything sent. */
        public fun close()

        /** End at once, also while it is being opened. */
        public fun abort()
    }

    /** Takes the events of one WebSocket. [refused], [closed] or [failed] is the last one. */
    public interface Listener {
        /** The WebSocket is open. */
        public fun opened()

        /** A binary message has come. A text message is an error: close with code 1003, and report it by [failed]. */
        public fun received(message: ByteArray)

        /** The pong of a [Socket.ping] has come. */
        public fun ponged()

        /** The handshake was answered with another HTTP [status] than 101, and with [body] ("" if it is unknown). */
        public fun refused(status: Int, contentType: String, body: String)

        /** The other side has closed. */
        public fun closed(code: Int, reason: String)

        /** The connection could not be made, has ended, or broke the rules. */
        public fun failed(error: IOException)
    }
}
