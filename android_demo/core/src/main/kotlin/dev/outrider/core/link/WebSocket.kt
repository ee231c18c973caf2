package dev.outrider.core.link

import java.io.BufferedInputStream
import java.io.EOFException
import java.io.IOException
import java.io.InputStream
import java.net.Socket
import java.net.URI
import java.nio.ByteBuffer
import java.nio.charset.CharacterCodingException
import java.security.MessageDigest
import java.security.SecureRandom
import kotlin.experimental.xor
import kotlin.io.encoding.Base64
import kotlin.io.encoding.ExperimentalEncodingApi

private const val TEXT = 1
internal const val BINARY = 2
internal const val CLOSE = 8
internal const val PING = 9
private const val PONG = 10

/** The GUID that RFC 6455 appends to a key. */
private const val GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

/** Bytes of a refusal's body that are read, and characters of it that are shown. */
private const val LONGEST_BODY = 1024
private const val LONGEST_TEXT = 200

/** Bytes of a frame that are written at once. */
private const val PIECE = 1 shl 14

/** The other side broke RFC 6455. */
internal class WebSocketError(message: String) : IOException(message)

/** The other side closed; [code] is 1005 if it gave none. */
internal class WebSocketClosed(val code: Int, val reason: String) : IOException(reason)

/** The handshake was answered with another HTTP [status] than 101. */
internal class HandshakeRefused(val status: Int, val contentType: String, val body: String) : IOException() {
    /** The answer is a web page, so it is not a verifier's. */
    val isPage = status in 300..399 || "html" in contentType || body.startsWith("<")

    override val message: String
        get() = when {
            isPage -> "a web page came in place of the verifier (HTTP $status); sign in to this network?"
            else -> body.lineSequence().first().take(LONGEST_TEXT).ifEmpty { "HTTP $status" }
        }
}

/**
 * A client's end of a WebSocket (RFC 6455) over an open [socket]: binary messages, no extensions.
 *
 * One thread receives, one thread sends. longest: most bytes of an accepted message.
 */
@OptIn(ExperimentalEncodingApi::class) // of Base64 in Kotlin 2.1
internal class WebSocket(private val socket: Socket, private val longest: Int) {
    private val input: InputStream = BufferedInputStream(socket.getInputStream(), 1 shl 16)
    private val output = socket.getOutputStream()
    private val random = SecureRandom()

    /** Do the opening handshake at [url]. Raises [HandshakeRefused], [WebSocketError] or another [IOException]. */
    fun shakeHands(url: URI, subprotocol: String, headers: Map<String, String>) {
        val key = Base64.encode(ByteArray(16).also(random::nextBytes))
        val port = if (url.port < 0) "" else ":${url.port}"
        val lines = mapOf(
            "Host" to url.host + port, "Upgrade" to "websocket", "Connection" to "Upgrade", "Sec-WebSocket-Key" to key,
            "Sec-WebSocket-Version" to "13", "Sec-WebSocket-Protocol" to subprotocol,
        ) + headers
        val query = url.rawQuery?.let { "?$it" }.orEmpty()
        val head = lines.entries.joinToString("", "GET ${url.rawPath}$query HTTP/1.1\r\n", "\r\n") { (name, value) ->
            "$name: $value\r\n"
        }
        output.write(head.toByteArray())
        output.flush()
        val answer = readHead(input)
        val status = Regex("""HTTP/1\.1 (\d{3})( .*)?""").matchEntire(answer.first())?.groupValues?.get(1)?.toInt()
            ?: throw WebSocketError("the other side speaks no HTTP")
        val fields = answer.drop(1).associate { line ->
            line.substringBefore(':').trim().lowercase() to line.substringAfter(':').trim()
        }
        if (status != 101) throw HandshakeRefused(status, fields["content-type"].orEmpty(), readBody(fields))
        val sha1 = MessageDigest.getInstance("SHA-1").digest((key + GUID).toByteArray())
        val fits = fields["upgrade"].equals("websocket", ignoreCase = true) &&
            fields["connection"].orEmpty().split(',').any { it.trim().equals("upgrade", ignoreCase = true) } &&
            fields["sec-websocket-accept"] == Base64.encode(sha1) && "sec-websocket-extensions" !in fields &&
            fields.getOrElse("sec-websocket-protocol") { subprotocol } == subprotocol
        if (!fits) throw WebSocketError("the other side's WebSocket handshake is wrong")
    }

    /**
     * Return the next message; control frames before it are answered or reported.
     *
     * answer: sends a pong, or a closing frame in reply to the other side's. pong: called when one came. Raises
     * [WebSocketClosed], [WebSocketError] if the other side breaks the rules, or another [IOException].
     */
    fun receive(answer: (opcode: Int, payload: ByteArray) -> Unit, pong: () -> Unit): ByteArray {
        var message: ByteArray? = null
        while (true) {
            val first = read()
            val opcode = first and 0x0F
            val last = first and 0x80 != 0
            if (first and 0x70 != 0) throw broken(1002, "reserved bits are set", answer)
            val size = size(opcode, answer)
            if (opcode < CLOSE && size + (message?.size ?: 0) > longest) {
                throw broken(1009, "a message of more than $longest bytes", answer)
            }
            if (opcode >= CLOSE && (!last || size > 125)) throw broken(1002, "a control frame is too long", answer)
            val payload = read(size.toInt())
            when (opcode) {
                0 -> message = (message ?: throw broken(1002, "a message without a beginning", answer)) + payload
                BINARY -> message = if (message == null) payload else throw broken(1002, "two messages at once", answer)
                TEXT -> throw broken(1003, "a text message", answer)
                CLOSE -> throw closed(payload, answer)
                PING -> answer(PONG, payload)
                PONG -> pong()
                else -> throw broken(1002, "a frame of type $opcode", answer)
            }
            if (last && opcode < CLOSE) message?.let { return it }
        }
    }

    /** Sends a frame, masked as a client must. progress: called with bytes as they leave. Raises [IOException]. */
    fun write(opcode: Int, payload: ByteArray, progress: (Int) -> Unit) {
        val frame = ByteBuffer.allocate(frameBytes(payload.size, masked = true).toInt())
        frame.put((0x80 or opcode).toByte())
        when {
            payload.size < 126 -> frame.put((0x80 or payload.size).toByte())
            payload.size < 65536 -> frame.put((0x80 or 126).toByte()).putShort(payload.size.toShort())
            else -> frame.put((0x80 or 127).toByte()).putLong(payload.size.toLong())
        }
        val mask = ByteArray(4).also(random::nextBytes)
        frame.put(mask)
        for ((index, byte) in payload.withIndex()) frame.put(byte xor mask[index and 3])
        for (begin in 0 until frame.capacity() step PIECE) {
            val size = minOf(PIECE, frame.capacity() - begin)
            output.write(frame.array(), begin, size)
            progress(size)
        }
        output.flush()
    }

    private fun size(opcode: Int, answer: (Int, ByteArray) -> Unit): Long {
        val second = read()
        if (second and 0x80 != 0) throw broken(1002, "a masked frame", answer)
        return when (val size = second and 0x7F) {
            126 -> ByteBuffer.wrap(read(2)).short.toLong() and 0xFFFF
            127 -> ByteBuffer.wrap(read(8)).long.also { if (it < 0) throw broken(1002, "a length below 0", answer) }
            else -> size.toLong()
        }.also { if (opcode >= CLOSE && it > 125) throw broken(1002, "a control frame is too long", answer) }
    }

    /** Tell the other side its fault. */
    private fun broken(code: Int, what: String, answer: (Int, ByteArray) -> Unit): WebSocketError {
        answer(CLOSE, ByteBuffer.allocate(2).putShort(code.toShort()).array())
        return WebSocketError("the other side sent $what")
    }

    private fun closed(payload: ByteArray, answer: (Int, ByteArray) -> Unit): IOException {
        if (payload.size == 1) return broken(1002, "a broken close", answer)
        answer(CLOSE, payload.copyOf(minOf(2, payload.size)))
        if (payload.isEmpty()) return WebSocketClosed(1005, "")
        val code = ByteBuffer.wrap(payload).short.toInt() and 0xFFFF
        val text = try {
            Charsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(payload, 2, payload.size - 2)).toString()
        } catch (_: CharacterCodingException) {
            ""
        }
        return WebSocketClosed(code, text)
    }

    private fun readBody(fields: Map<String, String>): String {
        val size = fields["content-length"]?.toIntOrNull()?.coerceIn(0, LONGEST_BODY) ?: return ""
        return String(read(size), Charsets.UTF_8).trim()
    }

    private fun read(): Int = readByte(input)

    private fun read(size: Int): ByteArray {
        val bytes = ByteArray(size)
        var at = 0
        while (at < size) {
            val read = input.read(bytes, at, size - at)
            if (read < 0) throw EOFException("the connection ended")
            at += read
        }
        return bytes
    }
}

internal fun readByte(input: InputStream): Int =
    input.read().also { if (it < 0) throw EOFException("the connection ended") }

/** Size of one WebSocket frame around [payload] bytes (RFC 6455, section 5.2). */
internal fun frameBytes(payload: Int, masked: Boolean): Long {
    val header = if (payload < 126) 2 else if (payload < 65536) 4 else 10
    return header + (if (masked) 4L else 0L) + payload
}
