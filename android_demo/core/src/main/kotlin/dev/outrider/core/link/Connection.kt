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
import javax.net.ssl.SSLSocketFactory

/** Seconds for the TCP connection, TLS and the handshake. */
private const val CONNECT_TIMEOUT = 5.0

/** Seconds after which an unanswered ping ends the connection. */
private const val PING_TIMEOUT = 20.0

/** Where a verifier is, and how it is spoken to. */
internal class Destination(val address: URI, val headers: Map<String, String>, val tls: SSLSocketFactory?)

/**
 * One connection to a verifier, from dialling on. Frames leave through a thread of their own, so that nobody waits for
 * a full buffer. sent: called with the bytes of every frame; pong: that a ping was answered.
 */
internal class Connection(
    private val destination: Destination,
    private val timer: ScheduledExecutorService,
    private val sent: (Long) -> Unit,
    private val pong: (Connection) -> Unit,
) {
    private val writer: ExecutorService = Executors.newSingleThreadExecutor { daemon(it, "outrider-link-writer") }

    @Volatile
    private var raw: Socket? = null
    private lateinit var socket: WebSocket

    @Volatile
    private var aborted = false

    /** When the ping was sent that is not answered yet, in nanoseconds; 0: none. */
    @Volatile
    private var pinged = 0L

    /** Dial and shake hands; once. Raises [IOException], or [LinkRefused] where it will never be otherwise. */
    fun open(hello: Hello): LinkUp {
        val end = System.nanoTime() + (1e9 * CONNECT_TIMEOUT).toLong()
        fun remaining() = maxOf(1, (end - System.nanoTime()) / 1_000_000).toInt()
        val raw = connect(destination.address, ::remaining).also { raw = it }
        val watchdog = try {
            timer.schedule({ raw.close() }, remaining().toLong(), TimeUnit.MILLISECONDS)
        } catch (error: RejectedExecutionException) {
            abort() // the link was closed meanwhile
            throw error
        }
        try {
            if (aborted) throw IOException("not wanted any more")
            val up = shakeHands(raw, hello)
            if (!watchdog.cancel(false)) throw IOException("timed out")
            return up
        } catch (error: Exception) {
            val late = watchdog.isDone
            abort()
            throw when {
                error is HandshakeRefused && error.status in setOf(401, 403) && !error.page -> LinkRefused(error.text)
                error is IOException && late -> IOException("timed out")
                error is WireError -> IOException(error.message)
                else -> error
            }
        } finally {
            watchdog.cancel(false)
        }
    }

    private fun shakeHands(raw: Socket, hello: Hello): LinkUp {
        val address = destination.address
        val secure = address.scheme == "wss"
        socket = WebSocket(if (secure) secured(raw, address, destination.tls ?: systemTls()) else raw, MAX_SERVER_FRAME)
        socket.shakeHands(address, SUBPROTOCOL, destination.headers)
        val asked = System.nanoTime()
        socket.send(encode(hello))
        val answer = decodeServer(next())
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

    fun send(message: ClientMessage) = later {
        val frame = encode(message)
        socket.send(frame)
        sent(frameBytes(frame.size, masked = true))
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

    /** Hang up behind what was to be sent, such as the answer to a close; waits a second at most. */
    fun finish() {
        writer.shutdown()
        writer.awaitTermination(1, TimeUnit.SECONDS)
        abort()
    }

    /** End at once, from any thread. */
    fun abort() {
        aborted = true
        raw?.close()
        writer.shutdownNow()
    }

    private fun later(write: () -> Unit) {
        try {
            writer.execute {
                try {
                    write()
                } catch (_: IOException) {
                    raw?.close() // the receiver tells
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
