package dev.outrider.core.runtime

import dev.outrider.core.protocol.Cancel
import dev.outrider.core.protocol.MAX_NODES
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.protocol.Verdict
import dev.outrider.core.protocol.Verify
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.concerns
import kotlinx.coroutines.ExperimentalCoroutinesApi
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.FlowCollector
import kotlinx.coroutines.selects.onTimeout
import kotlinx.coroutines.selects.select
import kotlin.math.ceil

/** Drives one session to its end: link, drafter and clock in, events out. [inbox]: what happens, from any thread. */
internal class Answer(
    private val session: Session,
    private val link: Link?,
    private val worker: DrafterThread,
    private val inbox: Channel<News>,
    private val shape: TreeShape,
    decode: (List<Int>) -> String,
    val stops: List<String>,
    private val ahead: Boolean?,
    private val controller: Controller,
    private val shaping: Boolean,
) {
    private val pace = controller.pace
    private val figures = Figures(session, link)
    private val text = AnswerText(decode, stops)
    private val pending = ArrayDeque<Event>()
    private var welcome: Welcome? = null // of the link that the session knows
    private var stalledAt: Double? = null
    private var scores = emptyList<Double>() // of the tree that is ready or in flight
    private var verdictAt: Double? = null
    private var shadow: News.Shadow? = null
    private var held: WriteToken? = null // until `writeAt`
    private var writeAt = 0.0
    private var treeRound = false
    private var state: LinkState? = null

    /** Whether trees and streams are alternatives here. */
    private val chooses = session.policy.writer == Writer.PREFER_CLOUD || session.policy.writer == Writer.CLOUD_ONLY

    /**
     * Emits events until the answer has ended; [recorded] is called before them. Raises [LinkRefused], or what the
     * engine does.
     */
    suspend fun run(out: FlowCollector<Event>, recorded: () -> Unit) {
        text.commit(session.committed.drop(session.prompt.size))
        text.rebase(session.provisional)
        tell(LinkState.CONNECTING, link?.url ?: "no server given")
        while (true) { // what happened between two answers shows in the link's state
            val news = inbox.tryReceive().getOrNull() ?: break
            if (news is News.Linked && news.event is LinkUp) pace.linked(news.event.welcome, news.event.rtt)
        }
        link?.refused?.let { throw it }
        if (chooses) session.mode = controller.begin()
        act(session.start(now()))
        link?.welcome?.let(::linkUp)
        while (true) {
            recorded()
            while (pending.isNotEmpty()) out.emit(pending.removeFirst())
            if (session.finished != null) return
            nextNews()?.let(::feed)
            act(session.tick(now()))
            release()
        }
    }

    /** Cancel what is not finished. */
    fun close() = act(session.cancel())

    /** Wait for the link, the drafter or the clock, whichever is first; null: the clock. */
    @OptIn(ExperimentalCoroutinesApi::class)
    private suspend fun nextNews(): News? {
        val wake = listOfNotNull(session.wakeAt(), held?.let { writeAt }).minOrNull() ?: return inbox.receive()
        return select {
            inbox.onReceive { it }
            onTimeout(ceil(1000 * (wake - now())).toLong().coerceAtLeast(0)) { null }
        }
    }

    private fun feed(news: News) {
        when (news) {
            is News.Linked -> linked(news.event)
            is News.Failed -> throw news.error
            is News.Asked -> act(
                when (news.wish) {
                    News.Wish.PAUSE -> session.pause(now())
                    News.Wish.PROCEED -> session.proceed(now())
                    News.Wish.CANCEL -> session.cancel()
                },
            )
            // others were asked for by an answer that was cancelled
            is News.Ahead -> if (news.session === session) figures.aheadNodes += news.nodes
            is News.Shadow -> if (news.session === session) shadow = news
            is News.TreeDrafted -> if (news.session === session) {
                act(session.treeReady(shaped(news), news.version, now()))
            }
            is News.TokenDrafted -> if (news.session === session) {
                figures.draftSeconds += news.seconds
                act(session.tokenWritten(news.written.token, news.written.probability, news.version, now()))
            }
        }
    }

    private fun linked(event: LinkEvent) {
        when (event) {
            is LinkUp -> {
                pace.linked(event.welcome, event.rtt)
                if (event.welcome === welcome) return // it came up just as the answer began
                if (chooses) act(session.changeMode(controller.begin(), now()))
                linkUp(event.welcome)
            }
            is LinkDown -> {
                if (session.connectBy != null) tell(LinkState.CONNECTING, event.reason)
                act(session.linkDown(now()))
            }
            is Arrived -> if (event.message.concerns(session.stream)) arrived(event.message)
            is Refused -> throw event.error
        }
    }

    private fun linkUp(welcome: Welcome) {
        this.welcome = welcome
        act(session.linkUp(welcome, now()))
    }

    private fun arrived(message: ServerMessage) {
        val now = now()
        if (message is Verdict) measure(message, now)
        act(session.message(message, now))
        if (message is Verdict && chooses && session.finished == null) act(session.changeMode(controller.choose(), now))
    }

    /** What of a draft is sent. */
    private fun shaped(news: News.TreeDrafted): TokenTree {
        val draft = news.draft
        figures.drafted(news)
        pace.drafted(news.working, draft.steps, session.stats.rounds > 0 && !draft.ahead)
        return worthSending(draft).also { scores = draft.scores.take(it.size) }
    }

    private fun worthSending(draft: Draft): TokenTree {
        val count = if (shaping) pace.worthSending(draft.tree, draft.scores) else draft.tree.size
        return draft.tree.pruned(count, MAX_NODES)
    }

    private fun measure(verdict: Verdict, now: Double) {
        val flight = session.flight ?: return
        if (verdict.seq != flight.seq) return
        val engine = 1e-6 * verdict.engineUs
        val before = verdictAt
        if (flight.tree == null) {
            // not the first, which had to be asked for
            if (before != null && flight.sent == before) pace.streamed(now - before, engine, session.alone)
        } else if (treeRound && !flight.afterOpen) {
            figures.waitSeconds += now - flight.sent
            figures.engineSeconds += engine
            val queue = 1e-6 * verdict.queueUs
            // an outage says nothing of the link
            if (!session.alone) pace.verified(flight.tree, scores, verdict.path, now - flight.sent, engine, queue)
        }
        verdictAt = now
    }

    private fun act(actions: List<Action>) {
        for (action in actions) {
            when (action) {
                is Send -> send(action)
                is DraftTree -> draft(action)
                is WriteToken -> {
                    held = action
                    release()
                }
                is DraftAhead -> draftAhead()
                is AddRows -> {
                    worker.submit { it.addRows(action.positions, action.rows) }
                    draftAhead()
                }
                is Commit -> {
                    figures.committed()
                    compare()
                    val count = text.commit(action.tokens)
                    text.rebase(session.provisional)
                    show(Verified(text.verified, text.provisional, action.tokens.take(count), action.confirmed))
                    tell(LinkState.VERIFIED, "")
                    if (count != null) return act(session.stop(action.tokens.size - count))
                }
                is Provide -> {
                    stalledAt?.let { figures.stallSeconds += now() - it }
                    stalledAt = null
                    if (!text.provide(action.token)) session.enough()
                    show(Provisional(text.verified, text.provisional, action.token))
                }
                is RollBack -> {
                    text.rebase(session.provisional)
                    show(RolledBack(text.verified, text.provisional, action.tokens.size))
                }
                is Adopt -> {
                    val count = text.commit(action.tokens)
                    text.rebase(session.provisional)
                    val surplus = action.tokens.size - (count ?: action.tokens.size)
                    if (surplus > 0) show(RolledBack(text.verified, text.provisional, surplus))
                    show(Adopted(text.verified, text.provisional, action.tokens.take(count)))
                    if (count != null) return act(session.stop(surplus))
                }
                is Stall -> {
                    stalledAt = action.deadline
                    val silent = session.policy.writer == Writer.CLOUD_ONLY || session.paused != null
                    tell(if (silent) LinkState.WAITING else LinkState.ALONE, "the verifier is silent")
                }
                is Pause -> tell(LinkState.WAITING, "paused: ${action.reason.name.lowercase()}")
                is Resume -> {
                    stalledAt = null
                    tell(LinkState.VERIFIED, "")
                }
                is Reconnect -> link?.renew()
                is Done -> {
                    text.end()
                    show(Finished(text.verified, text.provisional, action.reason, session.textIds, figures.end()))
                }
            }
        }
    }

    private fun send(action: Send) {
        treeRound = session.provisional.isEmpty()
        val before = verdictAt
        if (action.message is Verify && treeRound && before != null) pace.waited(now() - before)
        link?.send(action.message)
    }

    private fun List<Int>.take(count: Int?): List<Int> = if (count == null) this else subList(0, count)

    private fun show(event: Event) {
        pending += event
    }

    private fun tell(state: LinkState, detail: String) {
        if (state == this.state) return
        this.state = state
        show(LinkChange(text.verified, text.provisional, state, detail))
    }

    /** Write the next token alone once its time has come, or not at all. */
    private fun release() {
        val action = held ?: return
        val paced = session.alone && session.policy.writer != Writer.DEVICE_ONLY // it may be taken back
        if (action.version != session.version) {
            held = null
            act(session.tokenWritten(0, 0.0, action.version, now()))
        } else if (!paced || now() >= writeAt) {
            held = null
            writeAt = now() + 1 / session.policy.offlineRate
            write(action)
        }
    }

    private fun write(action: WriteToken) {
        val asked = now()
        worker.submit { drafter ->
            val began = now()
            val written = drafter.nextToken(action.prefix, session.sampling)
            val end = now()
            inbox.trySend(News.TokenDrafted(session, written, action.version, end - asked, end - began))
        }
    }

    private fun draft(action: DraftTree) {
        val asked = now()
        val shape = shapeOf(action.nodes, maxOf(1, action.depth))
        worker.submit { drafter ->
            val began = now()
            val draft = if (action.depth < 1) Draft() else {
                drafter.draft(action.prefix, session.sampling, shape) { session.version != action.version }
            }
            val end = now()
            inbox.trySend(News.TreeDrafted(session, draft, action.version, end - asked, end - began))
        }
    }

    /** Of the next tree; nodes, depth: what the session has room for. */
    private fun shapeOf(nodes: Int, depth: Int): TreeShape {
        val room = shape.copy(nodes = minOf(shape.nodes, maxOf(1, nodes)), depth = minOf(shape.depth, depth))
        return if (!shaping) room else room.copy(nodes = minOf(room.nodes, pace.worthDrafting()), gain = pace.gain())
    }

    /** Beside a stream, now and then draft a tree and see how much of it comes true: so that tau stays known. */
    private fun compare() {
        shadow?.let {
            val tree = worthSending(it.draft)
            val path = it.foreseen(tree, session.committed) ?: return@let
            pace.foreseen(tree, it.draft.scores.take(tree.size), path, it.working)
            shadow = null
        }
        val streaming = session.flight.let { it != null && it.tree == null }
        if (!streaming || !chooses || session.stats.streamed.let { it % pace.compareEvery(it) } != 0) return
        val prefix = session.committed.toList()
        val shape = shapeOf(MAX_NODES, shape.depth)
        worker.submit {
            val began = now()
            val draft = it.draft(prefix, session.sampling, shape)
            inbox.trySend(News.Shadow(session, draft, prefix.size, now() - began))
        }
    }

    /** Draft on below the tree in flight, where there is one and nothing else to do. */
    private fun draftAhead() {
        val tree = session.flight?.tree
        if (tree == null || tree.size == 0 || session.provisional.isNotEmpty() || session.busy) return
        if (!(ahead ?: pace.draftsAhead())) return
        val version = session.version
        worker.draftAhead(shape, { session.version == version }) { inbox.trySend(News.Ahead(session, it)) }
    }
}
