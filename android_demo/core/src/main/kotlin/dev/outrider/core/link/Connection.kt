package dev.outrider.core.link

import dev.outrider.core.protocol.Cancel
import dev.outrider.core.protocol.ClientMessage
import dev.outrider.core.protocol.EMPTY
import dev.outrider.core.protocol.ERR_MISMATCH
import dev.outrider.core.protocol.ERR_UNKNOWN
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.PROTOCOL_VERSION
import dev.outrider.core.protocol.STREAMS
import dev.outrider.core.protocol.SUBPROTOCOL
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.WireError
import dev.outrider.core.protocol.decodeServer
import dev.outrider.core.protocol.encode
import java.io.IOException
import java.net.SocketTimeoutException
import java.net.URI
import java.net.UnknownHostException
import java.security.cert.CertPathValidatorException
import java.security.cert.CertificateException
import java.security.cert.CertificateExpiredException
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.ScheduledExecutorService
import java.util.concurrent.TimeUnit

/**
 * Seconds to wait for each phase of a connection: TCP, TLS and WebSocket; HELLO. A time-out doubles them, up to the
 * longest; a connection sets them to this many of its round trips, but at least the first.
 */
internal const val CONNECT_TIMEOUT = 5.0
private const val LONGEST_TIMEOUT = 20.0
private const val ROUND_TRIPS = 8

/** Return the [patience] with the next connection, after a round trip of [rtt] seconds; null: after a time-out. */
internal fun nextPatience(patience: Double, rtt: Double?): Double =
    minOf(if (rtt == null) 2 * patience else maxOf(CONNECT_TIMEOUT, ROUND_TRIPS * rtt), LONGEST_TIMEOUT)

/** Seconds after which an unanswered ping ends the connection. */
private const val PING_TIMEOUT = 20.0

/** A stream that is never opened: cancelling it is refused at once, which serves as a pong. */
private const val PROBE_STREAM = STREAMS - 1

/** Meanings of a connection's end, in words; other ends bring their own. */
private val CLOSED = mapOf(
    1000 to "the verifier closed the connection",
    1005 to "closed without a reason",
    1012 to "the verifier is restarting",
)

/**
 * One connection to a verifier, from dialling on. patience: seconds for each phase of the handshake. sent: called with
 * the bytes of every frame; pong: called when a ping was answered.
 */
internal class Connection(
    private val transport: Transport,
    private val address: URI,
    private val timer: ScheduledExecutorService,
    private val patience: Double,
    private val sent: (Long) -> Unit,
    private val pong: (Connection) -> Unit,
) : Transport.Listener {
    /** Messages that have arrived and were not taken yet; the first success is empty and means that it is open. */
    private val arrived = LinkedBlockingQueue<Result<ByteArray>>()

    @Volatile
    private var socket: Transport.Socket? = null

    @Volatile
    private var aborted = false

    /** Bytes given for sending that are not on their way yet. */
    val unsent get() = socket?.unsent ?: 0

    /** When the unanswered ping was sent, in nanoseconds; 0: none. */
    @Volatile
    private var pinged = 0L

    /** Dial and shake hands; once. Raises [IOException], or [LinkRefused] if the verifier refuses this device. */
    fun open(hello: Hello, headers: Map<String, String>): LinkUp = try {
        val dialled = transport.open(address, SUBPROTOCOL, headers, this).also { socket = it }
        if (aborted) dialled.abort()
        inTime()
        val asked = System.nanoTime()
        dialled.send(encode(hello))
        val answer = decodeServer(inTime())
        val rtt = 1e-9 * (System.nanoTime() - asked)
        if (answer is Error && answer.code == ERR_MISMATCH) throw LinkRefused(answer.text)
        if (answer is Error) throw IOException("the verifier refused: ${answer.text}")
        if (answer !is Welcome || answer.protocol != PROTOCOL_VERSION.toLong()) {
            throw LinkRefused("the other side is not an Outrider verifier of this protocol version; update one of them")
        }
        LinkUp(answer, rtt)
    } catch (error: Exception) {
        abort()
        throw if (error is WireError) IOException(error.message) else error
    }

    /** Return the message that arrives within one phase of the handshake. */
    private fun inTime(): ByteArray {
        val come = arrived.poll((1000 * patience).toLong(), TimeUnit.MILLISECONDS)
        return (come ?: throw SocketTimeoutException("timed out")).getOrThrow()
    }

    /** Return the next message. Raises [IOException] if the connection has ended. */
    fun next(): ByteArray = arrived.take().getOrThrow()

    fun send(message: ClientMessage) {
        val frame = encode(message)
        socket?.send(frame)
        sent(frameBytes(frame.size, masked = true))
    }

    fun ping() {
        if (socket?.ping() == false) send(Cancel(PROBE_STREAM))
    }

    /** Send a ping, or end the connection if the last one was not answered for too long. */
    fun keepAlive() {
        val now = System.nanoTime()
        if (pinged == 0L) {
            pinged = now
            ping()
        } else if (now - pinged > 1e9 * PING_TIMEOUT) {
            abort("no answer to a ping")
        }
    }

    /** Close the WebSocket after everything sent. Never waits. */
    fun hangUp() {
        socket?.close()
        timer.schedule({ abort() }, 1, TimeUnit.SECONDS)
    }

    /** Hang up after everything sent; waits at most a second. */
    fun finish() {
        val end = System.nanoTime() + 1_000_000_000
        try {
            while (unsent > 0 && !aborted && System.nanoTime() < end) Thread.sleep(2)
        } catch (_: InterruptedException) {
            // the link is being closed: an exception would end its thread, and on Android the app
        }
        abort()
    }

    /** End at once, from any thread. */
    fun abort(reason: String = "closed") {
        aborted = true
        failed(IOException(reason))
        socket?.abort()
    }

    override fun opened() {
        arrived += Result.success(EMPTY)
    }

    override fun received(message: ByteArray) {
        pinged = 0
        arrived += Result.success(message)
    }

    override fun ponged() {
        pinged = 0
        pong(this)
    }

    override fun refused(status: Int, contentType: String, body: String) =
        failed(HandshakeRefused(status, contentType, body))

    override fun closed(code: Int, reason: String) = failed(
        IOException(CLOSED[code] ?: reason.ifEmpty { "the verifier closed the connection with code $code" }),
    )

    override fun failed(error: IOException) {
        arrived += Result.failure(error)
    }
}

/** Whether [message] is the reply to a probe. */
internal fun isProbe(message: ServerMessage): Boolean =
    message is Error && message.code == ERR_UNKNOWN && message.stream == PROBE_STREAM

/** Describe a network error for people. */
internal fun reasonOf(error: Exception): String {
    val causes = generateSequence<Throwable>(error) { it.cause }.toList()
    return when {
        causes.any { it is CertificateExpiredException } -> "the verifier's certificate has expired"
        causes.any { it is CertificateException || it is CertPathValidatorException } ->
            "the verifier's certificate is not trusted: ${causes.last().message}"
        error is UnknownHostException -> "no address is known for ${error.message}"
        else -> error.message ?: error.javaClass.simpleName
    }
}

internal fun daemon(work: Runnable, name: String) = Thread(work, name).apply { isDaemon = true }
