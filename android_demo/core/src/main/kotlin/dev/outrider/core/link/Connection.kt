package dev.outrider.core.link

import dev.outrider.core.protocol.ClientMessage
import dev.outrider.core.protocol.ERR_MISMATCH
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.MAX_SERVER_FRAME
import dev.outrider.core.protocol.PROTOCOL_VERSION
import dev.outrider.core.protocol.SUBPROTOCOL
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.WireError
import dev.outrider.core.protocol.decodeServer
import dev.outrider.core.protocol.encode
import java.io.IOException
import java.net.Socket
import java.net.SocketTimeoutException
import java.net.URI
import java.net.UnknownHostException
import java.security.cert.CertPathValidatorException
import java.security.cert.CertificateException
import java.security.cert.CertificateExpiredException
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.ScheduledExecutorService
import java.util.concurrent.TimeUnit
import java.util.concurrent.atomic.AtomicLong
import javax.net.ssl.SSLSocketFactory

/**
 * Seconds to wait for each phase of a connection: TCP; TLS; WebSocket; HELLO. A time-out doubles them, up to the
 * longest; a connection sets them to so many of its round trips, but not below the first.
 */
internal const val CONNECT_TIMEOUT = 5.0
private const val LONGEST_TIMEOUT = 20.0
private const val ROUND_TRIPS = 8

/** What to wait for the next connection after one whose round trip took [rtt] seconds; null: after a time-out. */
internal fun nextPatience(patience: Double, rtt: Double?): Double =
    minOf(if (rtt == null) 2 * patience else maxOf(CONNECT_TIMEOUT, ROUND_TRIPS * rtt), LONGEST_TIMEOUT)

/** Seconds after which an unanswered ping ends the connection. */
private const val PING_TIMEOUT = 20.0

/** Where a verifier is, and whom to trust there. */
internal class Destination(val address: URI, val tls: SSLSocketFactory?)

/**
 * One connection to a verifier, from dialling on. Frames leave through a thread of their own, so that nothing waits for
 * a full buffer. patience: seconds for each phase of the handshake. sent: called with the bytes of every frame; pong:
 * that a ping was answered.
 */
internal class Connection(
    private val destination: Destination,
    private val timer: ScheduledExecutorService,
    private val patience: Double,
    private val sent: (Long) -> Unit,
    private val pong: (Connection) -> Unit,
) {
    private val writer: ExecutorService = Executors.newSingleThreadExecutor { daemon(it, "outrider-link-writer") }

    private val dialling = Dialling()
    private lateinit var socket: WebSocket

    /** Bytes that were to be sent and are not on their way yet. */
    val unsent = AtomicLong()

    /** When the ping was sent that is not answered yet, in nanoseconds; 0: none. */
    @Volatile
    private var pinged = 0L

    /** Dial and shake hands; once. Raises [IOException], or [LinkRefused] where it will never be otherwise. */
    fun open(hello: Hello, headers: Map<String, String>): LinkUp {
        val end = System.nanoTime() + (1e9 * patience).toLong()
        fun remaining() = maxOf(1, (end - System.nanoTime()) / 1_000_000).toInt()
        try {
            val raw = dialling.connect(addressesOf(destination.address), ::remaining)
            return shakeHands(raw, hello, headers)
        } catch (error: Exception) {
            abort()
            throw when {
                error is HandshakeRefused && error.status in setOf(401, 403) && !error.page -> LinkRefused(error.text)
                error is WireError -> IOException(error.message)
                else -> error // the link was closed meanwhile, among others
            }
        }
    }

    /** Run one phase of the handshake over [raw], which is closed where it takes too long. */
    private fun <T> phase(raw: Socket, work: () -> T): T {
        val watchdog = timer.schedule({ raw.close() }, (1000 * patience).toLong(), TimeUnit.MILLISECONDS)
        try {
            return work().also { if (!watchdog.cancel(false)) throw SocketTimeoutException("timed out") }
        } catch (error: IOException) {
            throw if (watchdog.isDone) SocketTimeoutException("timed out") else error
        } finally {
            watchdog.cancel(false)
        }
    }

    private fun shakeHands(raw: Socket, hello: Hello, headers: Map<String, String>): LinkUp {
        val address = destination.address
        val secure = address.scheme == "wss"
        val carrier = if (secure) phase(raw) { secured(raw, address, destination.tls ?: systemTls()) } else raw
        socket = WebSocket(carrier, MAX_SERVER_FRAME)
        phase(raw) { socket.shakeHands(address, SUBPROTOCOL, headers) }
        val asked = System.nanoTime()
        val answer = phase(raw) {
            socket.send(encode(hello))
            decodeServer(next())
        }
        val rtt = 1e-9 * (System.nanoTime() - asked)
        if (answer is Error && answer.code == ERR_MISMATCH) throw LinkRefused(answer.text)
        if (answer is Error) throw IOException("the verifier refused: ${answer.text}")
        if (answer !is Welcome || answer.protocol != PROTOCOL_VERSION.toLong()) {
            throw LinkRefused("the other side is not an Outrider verifier of this protocol version; update one of them")
        }
        return LinkUp(answer, rtt)
    }

    /** The next message. */
    fun next(): ByteArray = socket.receive({ opcode, payload -> later { socket.write(opcode, payload) } }) {
        pinged = 0
        pong(this)
    }

    fun send(message: ClientMessage) {
        val frame = encode(message)
        val size = frameBytes(frame.size, masked = true)
        unsent.addAndGet(size)
        later {
            socket.send(frame) { unsent.addAndGet(-it.toLong()) }
            sent(size)
        }
    }

    fun ping() = later(socket::ping)

    /** A ping, or the end where the last one was not answered for too long. */
    fun keepAlive() {
        val now = System.nanoTime()
        if (pinged == 0L) {
            pinged = now
            ping()
        } else if (now - pinged > 1e9 * PING_TIMEOUT) {
            abort()
        }
    }

    /** Close the WebSocket behind what was to be sent. Never waits. */
    fun hangUp() {
        later {
            socket.close()
            dialling.close()
        }
        writer.shutdown()
        timer.schedule(::abort, 1, TimeUnit.SECONDS)
    }

    /** Hang up behind what was to be sent, such as the answer to a close; waits a second at most. */
    fun finish() {
        writer.shutdown()
        try {
            writer.awaitTermination(1, TimeUnit.SECONDS)
        } catch (_: InterruptedException) {
            // the link is being closed: an exception would end its thread, and on Android the app
        }
        abort()
    }

    /** End at once, from any thread. */
    fun abort() {
        dialling.close()
        writer.shutdownNow()
    }

    private fun later(write: () -> Unit) {
        try {
            writer.execute {
                try {
                    write()
                } catch (_: IOException) {
                    dialling.close() // the receiver tells
                }
            }
        } catch (_: RejectedExecutionException) {
            // the connection has ended
        }
    }

    private companion object {
        fun systemTls() = SSLSocketFactory.getDefault() as SSLSocketFactory
    }
}

/** What a network did, for people. */
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
