package dev.outrider.testing

import dev.outrider.core.bundle.Bundle
import dev.outrider.core.link.Transport
import dev.outrider.core.protocol.ERR_UNKNOWN
import dev.outrider.core.protocol.Error
import dev.outrider.core.protocol.FINISH_EOS
import dev.outrider.core.protocol.FINISH_NONE
import dev.outrider.core.protocol.Opened
import dev.outrider.core.protocol.PROTOCOL_VERSION
import dev.outrider.core.protocol.PackReader
import dev.outrider.core.protocol.Resync
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.encode
import java.io.IOException
import java.net.URI
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.concurrent.Executors
import java.util.concurrent.TimeUnit

private const val NODES = 32
private const val ROOT = 255

/**
 * A verifier in this process, for an app's own tests: its target writes the result of [answer] for a rendered prompt.
 *
 *     val bundle = fakeBundle()
 *     val verifier = FakeVerifier(bundle) { "Because of Rayleigh scattering." }
 *     EdgeRuntime(bundle, FakeEngine(bundle), "wss://fake.invalid", Options(transport = verifier))
 *
 * delayMillis: until each reply.
 */
public class FakeVerifier(
    private val bundle: Bundle,
    private val delayMillis: Long = 0,
    private val answer: (prompt: String) -> String,
) : Transport {
    private val thread = Executors.newSingleThreadScheduledExecutor { Thread(it, "fake").apply { isDaemon = true } }
    private val sockets = HashSet<FakeSocket>() // used by that thread only, like the fields below

    /** The text of each answer, prompt and end included; by session and stream. */
    private val texts = HashMap<Pair<List<Byte>, Int>, List<Int>>()

    /** False: connections end, and dialling fails, until it is true again. */
    @Volatile
    public var reachable: Boolean = true
        set(value) {
            field = value
            if (!value) thread.execute { for (socket in sockets.toList()) socket.end(IOException("cut by a test")) }
        }

    override fun open(
        url: URI, subprotocol: String, headers: Map<String, String>, listener: Transport.Listener,
    ): Transport.Socket = FakeSocket(listener).apply { dial() }

    /** Token ids of a session on a connection; streaming: the number of the run that may continue. */
    private class Committed(val ids: MutableList<Int>, val wanted: List<Int>, var streaming: Int = 0) {
        fun next(): Int = wanted.getOrElse(ids.size) { EOS }.also(ids::add)
    }

    private inner class FakeSocket(private val listener: Transport.Listener) : Transport.Socket {
        private val streams = HashMap<Int, Committed>()
        override val unsent = 0L

        fun dial() = later {
            if (reachable) {
                sockets += this
                listener.opened()
            } else {
                listener.failed(IOException("out of reach by a test"))
            }
        }

        fun end(error: IOException) {
            if (sockets.remove(this)) listener.failed(error)
        }

        override fun send(message: ByteArray) = later { if (this in sockets) handle(message) }

        override fun ping(): Boolean {
            later { if (this in sockets) listener.ponged() }
            return true
        }

        override fun close() = later { if (sockets.remove(this)) listener.closed(1000, "") }

        override fun abort() = later { sockets.remove(this) }

        private fun handle(frame: ByteArray) {
            val fields = PackReader(frame.copyOf(frame.indexOfLast { it != 0.toByte() }))
            fields.array()
            val type = fields.integer().toInt()
            if (type == 1) return reply(with(bundle.manifest) {
                Welcome(PROTOCOL_VERSION.toLong(), targetHash, drafterHash, vocabSize, maxContext, NODES, NODES)
            })
            val stream = fields.integer().toInt()
            if (type == 3) return begin(stream, fields)
            val text = streams[stream] ?: return reply(Error(ERR_UNKNOWN, "no such stream", stream))
            text.streaming++
            if (type == 11) streams -= stream
            if (type != 6 && type != 9) return
            val seq = fields.integer()
            if (fields.integer().toInt() != text.ids.size) return reply(Resync(stream, text.ids.size))
            if (type == 9) return stream(stream, seq, text, fields.integer(), text.streaming)
            verify(stream, seq, text, idsOf(fields.binary()), fields.binary())
        }

        private fun begin(stream: Int, fields: PackReader) {
            val session = fields.binary().toList()
            fields.integer()
            val ids = idsOf(fields.binary())
            val known = texts[session to stream]?.takeIf { it.take(ids.size) == ids }
            val wanted = known ?: (ids + bundle.tokenizer.encode(answer(bundle.decode(ids))) + EOS)
            texts[session to stream] = wanted
            streams[stream] = Committed(ids.toMutableList(), wanted)
            reply(Opened(stream, ids.size, 0))
        }

        private fun verify(stream: Int, seq: Long, text: Committed, tokens: List<Int>, parents: ByteArray) {
            val base = text.ids.size
            val path = ArrayList<Byte>()
            var at = ROOT
            while (true) {
                val token = text.next()
                at = tokens.indices.find { tokens[it] == token && parents[it].toInt() and 0xFF == at } ?: break
                if (token == EOS) break
                path += at.toByte()
            }
            verdict(stream, seq, base, path, text)
        }

        private fun stream(stream: Int, seq: Long, text: Committed, left: Long, run: Int) {
            if (text.streaming != run || left == 0L || this !in sockets) return
            text.next()
            verdict(stream, seq, text.ids.size - 1, emptyList(), text)
            if (text.ids.last() != EOS) later { stream(stream, seq, text, left - 1, run) }
        }

        private fun verdict(stream: Int, seq: Long, base: Int, path: List<Byte>, text: Committed) {
            val finish = if (text.ids.last() == EOS) FINISH_EOS else FINISH_NONE
            val rows = ByteArray(bundle.manifest.rowShape.bytes * (path.size + 1))
            reply(Verdict(stream, seq, base, path.toByteArray(), text.ids.last(), finish, rows, NODES))
        }

        private fun reply(message: ServerMessage) = listener.received(encode(message))
    }

    private fun later(work: () -> Unit) {
        thread.schedule(work, delayMillis, TimeUnit.MILLISECONDS)
    }
}

private fun idsOf(bytes: ByteArray): List<Int> =
    ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer().let { ids -> List(ids.limit()) { ids[it] } }
