/**
 * The WebSocket to the verifier: connect, shake hands, receive, and dial again for ever.
 *
 * It reports what happens as events and never raises for a network reason; `send` drops what cannot be sent, because
 * every message is repeated by the session after the next link-up.
 */
package dev.outrider.core.runtime

import dev.outrider.core.protocol.ClientMessage
import dev.outrider.core.protocol.ERR_MISMATCH
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.MAX_SERVER_FRAME
import dev.outrider.core.protocol.PROTOCOL_VERSION
import dev.outrider.core.protocol.SUBPROTOCOL
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.WireError
import dev.outrider.core.protocol.decodeServer
import dev.outrider.core.protocol.encode
import java.io.IOException
import java.net.Socket
import java.net.URI
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.TimeUnit
import javax.net.ssl.SSLSocketFactory
import kotlin.concurrent.thread
import kotlin.random.Random

private const val PATH = "/v1/verify"

/** Seconds for the TCP connection, TLS and the handshake. */
private const val CONNECT_TIMEOUT = 5.0

/** Seconds between attempts: the first retry comes fast, because an answer is waiting. */
private const val FIRST_RETRY = 0.1
private const val LAST_RETRY = 3.0

/** Seconds between pings, and after which an unanswered one ends the connection. */
private const val PING_INTERVAL = 10L
private const val PING_TIMEOUT = 20.0

/** The verifier will never accept this device (other target, drafter or protocol; no valid token). */
class LinkRefused(message: String) : Exception(message)

/** What a link reports, in order, from its own thread. */
sealed interface LinkEvent

/** rtt: seconds between HELLO and WELCOME. */
class LinkUp(val welcome: Welcome, val rtt: Double) : LinkEvent

class LinkDown(val reason: String) : LinkEvent

class Arrived(val message: ServerMessage) : LinkEvent

/** There will never be a connection. */
class Refused(val error: LinkRefused) : LinkEvent

/** Bytes of WebSocket frames, headers and masks included; TCP and TLS not. */
class Traffic {
    @Volatile
    var up = 0L
        internal set

    @Volatile
    var down = 0L
        internal set
}

/** `host:port`, `ws://host:port` or `wss://...` -> the WebSocket URL of the verifier's endpoint. */
fun verifierUrl(server: String): String {
    val url = (if ("://" in server) server else "ws://$server")
        .replaceFirst("http://", "ws://").replaceFirst("https://", "wss://").trimEnd('/')
    return if (url.endsWith(PATH)) url else url + PATH
}

/**
 * Keeps one connection to [server] alive and hands events to [report].
 *
 * token: sent as `Authorization: Bearer`. tls: whom to trust. clearText: hosts that may be spoken to without TLS; an
 * app for the emulator may add 10.0.2.2. Raises [LinkRefused] for an address that is none, or that would carry prompts
 * in clear text to another machine.
 */
class Link(
    server: String,
    private val hello: Hello,
    private val report: (LinkEvent) -> Unit,
    token: String? = null,
    private val tls: SSLSocketFactory? = null,
    clearText: Set<String> = LOOPBACK,
) {
    val traffic = Traffic()

    /** While there is a connection. */
    @Volatile
    var welcome: Welcome? = null
        private set

    /** Seconds between HELLO and WELCOME of the last connection; null before the first. */
    @Volatile
    var roundTrip: Double? = null
        private set

    /** Why there will never be one again. */
    @Volatile
    var refused: LinkRefused? = null
        private set

    /** Where the verifier is, for people. */
    val url = verifierUrl(server)
    private val address = parse(url)
    private val headers = if (token == null) emptyMap() else mapOf("Authorization" to "Bearer $token")
    private val timer = Executors.newSingleThreadScheduledExecutor { daemon(it, "outrider-link-timer") }
    private val runner = thread(start = false, isDaemon = true, name = "outrider-link") { run() }

    @Volatile
    private var connection: Connection? = null

    @Volatile
    private var closed = false

    init {
        if (address.scheme == "ws" && bareHost(address) !in clearText) {
            throw LinkRefused("$url would carry the conversation in clear text; use wss://")
        }
        if (token != null && token.any { it < ' ' }) throw LinkRefused("the token holds a line break")
    }

    /** Begin to connect, and again whenever it must, until [close] or a refusal. */
    fun start() = runner.start()

    /** Send, or drop [message] where there is no connection; a failure shows as [LinkDown]. Never waits. */
    fun send(message: ClientMessage) {
        connection?.takeIf { welcome != null }?.send(message)
    }

    /** Cut the connection without ceremony and dial again (half-open links do not answer a close). */
    fun drop() {
        connection?.abort()
    }

    /** Send [last], hang up and never dial again. Waits a second at most. */
    fun close(last: ClientMessage) {
        send(last)
        closed = true
        connection?.finish()
        runner.interrupt()
        timer.shutdownNow()
    }

    private fun run() {
        var delay = FIRST_RETRY
        while (!closed) {
            try {
                val connection = dial()
                delay = FIRST_RETRY
                receive(connection)
            } catch (error: LinkRefused) {
                refused = error
                return report(Refused(error))
            } catch (error: IOException) {
                report(LinkDown(error.message ?: error.javaClass.simpleName))
            } catch (_: InterruptedException) {
                return
            } catch (_: RejectedExecutionException) {
                return // closed meanwhile
            }
            try {
                Thread.sleep((1000 * delay * Random.nextDouble(0.7, 1.3)).toLong())
            } catch (_: InterruptedException) {
                return
            }
            delay = minOf(LAST_RETRY, 2 * delay)
        }
    }

    private fun dial(): Connection {
        val end = System.nanoTime() + (1e9 * CONNECT_TIMEOUT).toLong()
        fun remaining() = maxOf(1, (end - System.nanoTime()) / 1_000_000).toInt()
        val raw = connect(address, ::remaining)
        val watchdog = timer.schedule({ raw.close() }, remaining().toLong(), TimeUnit.MILLISECONDS)
        try {
            val socket = if (address.scheme == "wss") secured(raw, address, tls ?: systemTls()) else raw
            val connection = Connection(raw, WebSocket(socket, MAX_SERVER_FRAME))
            this.connection = connection
            connection.socket.shakeHands(address, SUBPROTOCOL, headers)
            val asked = System.nanoTime()
            connection.socket.send(encode(hello))
            val answer = decodeServer(connection.next())
            val rtt = 1e-9 * (System.nanoTime() - asked)
            if (answer is Error && answer.code == ERR_MISMATCH) throw LinkRefused(answer.text)
            if (answer is Error) throw IOException("the verifier refused: ${answer.text}")
            if (answer !is Welcome || answer.protocol != PROTOCOL_VERSION.toLong()) {
                throw IOException("the other side is no Outrider verifier of this protocol version")
            }
            if (!watchdog.cancel(false)) throw IOException("timed out")
            welcome = answer
            roundTrip = rtt
            report(LinkUp(answer, rtt))
            return connection
        } catch (error: Exception) {
            val late = watchdog.isDone
            raw.close()
            connection?.abort()
            connection = null
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

    private fun receive(connection: Connection) {
        val pings = timer.scheduleWithFixedDelay(connection::keepAlive, PING_INTERVAL, PING_INTERVAL, TimeUnit.SECONDS)
        val reason = try {
            forward(connection)
        } catch (error: IOException) {
            error.message ?: error.javaClass.simpleName
        } catch (error: WireError) {
            error.message
        } finally {
            pings.cancel(false)
            welcome = null
            this.connection = null
            connection.finish()
        }
        report(LinkDown(reason.orEmpty()))
    }

    private fun forward(connection: Connection): Nothing {
        while (true) {
            val frame = connection.next()
            val message = decodeServer(frame)
            traffic.down += frameBytes(frame.size, masked = false)
            report(Arrived(message))
        }
    }

    /** One connection: frames leave through a thread of their own, so that nobody waits for a full buffer. */
    private inner class Connection(private val raw: Socket, val socket: WebSocket) {
        private val writer: ExecutorService = Executors.newSingleThreadExecutor { daemon(it, "outrider-link-writer") }

        /** When the ping was sent that is not answered yet, in nanoseconds; 0: none. */
        @Volatile
        private var pinged = 0L

        /** The next message. */
        fun next(): ByteArray =
            socket.receive({ opcode, payload -> later { socket.write(opcode, payload) } }) { pinged = 0 }

        fun send(message: ClientMessage) = later {
            val frame = encode(message)
            socket.send(frame)
            traffic.up += frameBytes(frame.size, masked = true)
        }

        /** Hang up behind what was to be sent, such as the answer to a close; waits a second at most. */
        fun finish() {
            writer.shutdown()
            writer.awaitTermination(1, TimeUnit.SECONDS)
            abort()
        }

        fun keepAlive() {
            val now = System.nanoTime()
            if (pinged == 0L) {
                pinged = now
                later(socket::ping)
            } else if (now - pinged > 1e9 * PING_TIMEOUT) {
                abort()
            }
        }

        fun abort() {
            raw.close()
            writer.shutdownNow()
        }

        private fun later(write: () -> Unit) {
            try {
                writer.execute {
                    try {
                        write()
                    } catch (_: IOException) {
                        raw.close() // the receiver tells
                    }
                }
            } catch (_: RejectedExecutionException) {
                // the connection has ended
            }
        }
    }

    private companion object {
        fun daemon(work: Runnable, name: String) = Thread(work, name).apply { isDaemon = true }

        fun systemTls() = SSLSocketFactory.getDefault() as SSLSocketFactory

        fun parse(url: String): URI {
            val parsed = runCatching { URI(url) }.getOrNull()
            val known = parsed?.scheme == "ws" || parsed?.scheme == "wss"
            if (parsed == null || !known || parsed.host == null) throw LinkRefused("$url is no WebSocket address")
            return parsed
        }
    }
}
