/**
 * The link to the verifier: connect when needed, receive, and reconnect.
 *
 * It reports what happens as events and never raises for a network reason; `send` drops what cannot be sent, because
 * the session repeats every message after the next link-up.
 */
package dev.outrider.core.link

import dev.outrider.core.protocol.ClientMessage
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.WireError
import dev.outrider.core.protocol.decodeServer
import dev.outrider.core.protocol.otherArithmetic
import java.io.IOException
import java.net.SocketTimeoutException
import java.util.concurrent.Executors
import java.util.concurrent.Future
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.ScheduledExecutorService
import java.util.concurrent.Semaphore
import java.util.concurrent.TimeUnit
import kotlin.concurrent.thread
import kotlin.random.Random

/** Delays between attempts: the first retry comes fast, because an answer is waiting. */
private const val FIRST_RETRY = 0.1
private const val LAST_RETRY = 3.0

/** The longest delay after a refusal: another version may answer at this address, perhaps after an upgrade. */
private const val REFUSED_RETRY = 30.0

/** Seconds between pings of a connection that an answer needs. */
private const val PING_INTERVAL = 10L

/** Seconds, and round trips, that a silent connection has to answer a ping before another one is dialled. */
private const val HEAD_START = 0.25
private const val HEAD_START_TRIPS = 2

/** Calls of [Link.renew] after which a silent connection is given up, even if it answers pings. */
private const val RENEWALS = 10

/**
 * Keeps one connection to [server] alive, while [stay] asks for it, and hands events to [report].
 *
 * token: returns the token for `Authorization: Bearer`, see [Authorization]. clearText: hosts that may be dialled
 * without TLS; an app for the emulator may add 10.0.2.2. wall: milliseconds on a clock that runs while the device
 * sleeps. Raises [LinkRefused] for an invalid address, or one that would carry prompts in clear text to another
 * machine.
 */
internal class Link(
    server: String,
    hello: Hello,
    private val report: (LinkEvent) -> Unit,
    token: (suspend () -> String)? = null,
    private val transport: Transport = SocketTransport(),
    clearText: Set<String> = LOOPBACK,
    private val timer: ScheduledExecutorService =
        Executors.newSingleThreadScheduledExecutor { daemon(it, "outrider-link-timer") },
    private val wall: () -> Long = System::currentTimeMillis,
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

    /** Why there is no connection; "" while there is one or none was tried yet. */
    @Volatile
    var error = ""
        private set

    /** The verifier's address, for people. */
    val url = verifierUrl(server)
    private val address = parseAddress(url)
    private val authorization = Authorization(token)
    private val runner = thread(start = false, isDaemon = true, name = "outrider-link") {
        try {
            run()
        } catch (_: InterruptedException) {
            // closed
        }
    }
    private val wanted = Semaphore(0) // released to dial at once
    private val lock = Any() // guards the fields below and the order of reports

    @Volatile
    private var hello = hello

    @Volatile
    private var connection: Connection? = null
    private var dialling: Connection? = null // while there is none
    private var beside: Connection? = null // dialled while the present one is silent
    private var renewals = 0 // since it last spoke
    private var unsent = Long.MAX_VALUE // bytes, when it last had to speak

    @Volatile
    private var patience = CONNECT_TIMEOUT // for each phase of the next connection

    @Volatile
    private var spoken = false // whether it has spoken since WELCOME

    @Volatile
    private var closed = false

    @Volatile
    private var needed = false // else nothing is dialled

    @Volatile
    private var held = false // by an answer
    private var hangingUp: Future<*>? = null
    private var end = Long.MAX_VALUE // end of the time given to [stay], on the clock of [wall]

    init {
        if (address.scheme == "ws" && bareHost(address) !in clearText) {
            throw LinkRefused("$url would carry the conversation in clear text; use wss://")
        }
    }

    /**
     * Dial, and stay connected for [seconds]. Infinity: until the next call, with pings, for an answer; 0: hang up and
     * stop dialling. A connection that outlived that time while the device slept is dialled anew.
     */
    fun stay(seconds: Double): Unit = synchronized(lock) {
        if (closed) return
        hangingUp?.cancel(false)
        if (seconds <= 0) return rest()
        held = seconds == Double.POSITIVE_INFINITY
        val stale = wall() > end
        end = if (held) Long.MAX_VALUE else wall() + (1000 * seconds).toLong()
        hangingUp = if (held) null else timer.schedule({ stay(0.0) }, (1000 * seconds).toLong(), TimeUnit.MILLISECONDS)
        if (!needed) {
            needed = true
            if (runner.state == Thread.State.NEW) runner.start()
            wanted.release()
        } else if (stale) {
            networkChanged()
        }
    }

    private fun rest() {
        needed = false
        held = false
        end = Long.MAX_VALUE
        error = ""
        dialNoMore()
        dialling?.abort()
        connection?.hangUp()
        connection = null
        welcome = null
    }

    /** Dial at once, over the present network, if a connection is needed. */
    fun networkChanged(): Unit = synchronized(lock) {
        if (!needed) return
        patience = CONNECT_TIMEOUT
        dialNoMore()
        dialling?.abort()
        lose("the network has changed")
        wanted.release()
    }

    /** Send [message], or drop it without a connection; a failure is reported as [LinkDown]. Never waits. */
    fun send(message: ClientMessage) {
        connection?.send(message)
    }

    /**
     * From now on HELLO asks for verifiers with this [arithmetic]; "": any. A connection to another one ends.
     *
     * Without a connection, it is dialled at once: a verifier that refused before may fit now.
     */
    fun pin(arithmetic: String): Unit = synchronized(lock) {
        val changed = arithmetic != hello.arithmetic
        hello = hello.copy(arithmetic = arithmetic)
        val welcome = welcome
        if (welcome == null && changed) {
            error = ""
            wanted.release()
        } else if (welcome != null && !welcome.computesIn(arithmetic)) {
            dialNoMore()
            lose(otherArithmetic(arithmetic, welcome.arithmetic), refused = true)
        }
    }

    /**
     * Dial another connection beside a silent one, and keep the one that speaks first.
     *
     * A half-open connection never does; one that waits for a busy verifier answers a ping at once; and one through an
     * outage may speak again before a new one is there. If dialling fails, the silent one is given up too. One that
     * still accepts data is not silent: a long message on a slow link is on its way.
     */
    fun renew(): Unit = synchronized(lock) {
        val silent = connection ?: return
        val before = unsent
        unsent = silent.unsent
        if (unsent in 1 until before) return
        renewals++
        if (renewals > RENEWALS) {
            dialNoMore()
            lose("silent for too long")
        } else if (beside == null) {
            silent.ping()
            val second = newConnection().also { beside = it }
            thread(isDaemon = true, name = "outrider-link-beside") { dialBeside(second) }
        }
    }

    /** Send [last], hang up and never dial again. Waits at most a second. */
    fun close(last: ClientMessage) {
        send(last)
        val ended = synchronized(lock) {
            closed = true
            dialNoMore()
            listOfNotNull(connection, dialling)
        }
        ended.forEach { it.finish() }
        runner.interrupt()
        timer.shutdownNow()
    }

    private fun newConnection() = Connection(transport, address, timer, patience, { traffic.up += it }, ::spoke)

    /** Dial, and adjust the time limits of the next connection by the result. */
    private fun opened(dialled: Connection): LinkUp = try {
        dialled.open(hello, authorization.headers()).also { patience = nextPatience(patience, it.rtt) }
    } catch (error: SocketTimeoutException) {
        patience = nextPatience(patience, null)
        throw error
    } catch (error: HandshakeRefused) {
        if (error.isPage || error.status !in setOf(401, 403)) throw error
        if (error.status == 401) authorization.refused()
        throw LinkRefused(error.message)
    }

    /** Dial and receive until [closed]. Raises [InterruptedException] then. */
    private fun run() {
        var delay = FIRST_RETRY
        while (!closed) {
            var refused = false
            try {
                while (!needed) wanted.acquire()
                wanted.drainPermits()
                val dialled = newConnection()
                synchronized(lock) { dialling = dialled }
                val up = opened(dialled)
                synchronized(lock) {
                    take(dialled, up)
                    wanted.drainPermits()
                }
            } catch (error: LinkRefused) {
                refused = true
                failed(LinkDown(error.message.orEmpty(), refused = true))
            } catch (error: IOException) {
                failed(LinkDown(reasonOf(error)))
            }
            val begun = System.nanoTime()
            var greeted = false
            while (true) {
                receive(connection ?: break)
                greeted = true
            }
            // else a server that greets and hangs up would be dialled ten times a second
            if (greeted && (spoken || System.nanoTime() - begun > LAST_RETRY * 1e9)) delay = FIRST_RETRY
            val changed =
                wanted.tryAcquire((1000 * delay * Random.nextDouble(0.7, 1.3)).toLong(), TimeUnit.MILLISECONDS)
            delay = if (changed) FIRST_RETRY else minOf(if (refused) REFUSED_RETRY else LAST_RETRY, 2 * delay)
        }
    }

    /** Make it the link. */
    private fun take(dialled: Connection, up: LinkUp) {
        dialling = null
        if (closed || !needed) return dialled.abort()
        connection = dialled
        welcome = up.welcome
        roundTrip = up.rtt
        unsent = Long.MAX_VALUE
        renewals = 0
        spoken = false
        error = ""
        report(up)
    }

    /** Report that dialling failed, if a connection is needed. */
    private fun failed(event: LinkDown): Unit = synchronized(lock) {
        dialling = null
        if (needed) down(event)
    }

    private fun down(event: LinkDown) {
        error = event.reason
        report(event)
    }

    /** End the connection without a handshake: half-open links do not answer a close. */
    private fun lose(reason: String, refused: Boolean = false) {
        val lost = connection ?: return
        connection = null
        welcome = null
        lost.abort()
        down(LinkDown(reason, refused))
    }

    /** Report what arrives, until the connection ends or another has taken its place. */
    private fun receive(connection: Connection) {
        val pings = try {
            timer.scheduleWithFixedDelay(
                { if (held) connection.keepAlive() }, PING_INTERVAL, PING_INTERVAL, TimeUnit.SECONDS,
            )
        } catch (_: RejectedExecutionException) {
            null // closed meanwhile
        }
        val reason = try {
            forward(connection)
        } catch (error: IOException) {
            reasonOf(error)
        } catch (error: WireError) {
            error.message
        }
        pings?.cancel(false)
        connection.finish()
        synchronized(lock) {
            if (this.connection !== connection) return
            dialNoMore()
            lose(reason.orEmpty())
        }
    }

    private fun forward(connection: Connection): Nothing {
        while (true) {
            val frame = connection.next()
            spoke(connection)
            val message = decodeServer(frame)
            synchronized(lock) {
                if (this.connection !== connection) throw IOException("another has taken its place")
                renewals = 0
                spoken = true
                traffic.down += frameBytes(frame.size, masked = false)
                if (!isProbe(message)) report(Arrived(message))
            }
        }
    }

    /** Note that a message or a pong came. */
    private fun spoke(from: Connection) {
        synchronized(lock) { if (from === connection) dialNoMore() }
    }

    /** Stop dialling another connection, as this one has spoken or ended. */
    private fun dialNoMore() {
        beside?.abort()
        beside = null
    }

    private fun dialBeside(second: Connection) {
        val failure = try {
            Thread.sleep((1000 * maxOf(HEAD_START, HEAD_START_TRIPS * (roundTrip ?: 0.0))).toLong())
            val up = opened(second)
            synchronized(lock) {
                if (beside !== second) return second.abort()
                beside = null
                lose("silent; another connection spoke first")
                return take(second, up)
            }
        } catch (error: IOException) {
            error
        } catch (error: LinkRefused) {
            error
        }
        synchronized(lock) {
            if (beside !== second) return
            beside = null
            lose("silent, and dialling again failed: ${reasonOf(failure)}")
        }
    }
}
