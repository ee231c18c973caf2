package dev.outrider.core.answer

import dev.outrider.core.events.Event
import dev.outrider.core.events.LinkState
import dev.outrider.core.link.Arrived
import dev.outrider.core.link.Link
import dev.outrider.core.link.LinkDown
import dev.outrider.core.link.LinkEvent
import dev.outrider.core.link.LinkUp
import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.protocol.Welcome
import dev.outrider.core.protocol.concerns
import dev.outrider.core.session.Action
import dev.outrider.core.session.AddRows
import dev.outrider.core.session.Adopt
import dev.outrider.core.session.Commit
import dev.outrider.core.session.Compare
import dev.outrider.core.session.DraftAhead
import dev.outrider.core.session.DraftChain
import dev.outrider.core.session.DraftTree
import dev.outrider.core.session.Pin
import dev.outrider.core.session.ReadText
import dev.outrider.core.session.Reconnect
import dev.outrider.core.session.Send
import dev.outrider.core.session.Session
import dev.outrider.core.session.WriteToken
import dev.outrider.core.session.Writer
import dev.outrider.core.speed.Arm
import kotlinx.coroutines.ExperimentalCoroutinesApi
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.FlowCollector
import kotlinx.coroutines.selects.onTimeout
import kotlinx.coroutines.selects.select
import kotlin.math.ceil

/** Carries out a session's actions, and reports events to it with their times. [inbox]: the events, from any thread. */
internal class Answer(
    private val session: Session,
    private val link: Link?,
    worker: DrafterThread,
    understudy: UnderstudyThread?,
    private val inbox: Channel<InboxEvent>,
    decode: (List<Int>) -> String,
    stops: List<String>,
) {
    private val stats = StatsRecorder(link)
    private val display = Display(session, stats, decode, stops, link?.error.orEmpty())
    private val jobs = DrafterJobs(session, worker) { inbox.trySend(it) }
    private val understudyJobs = understudy?.let { thread -> UnderstudyJobs(session, thread) { inbox.trySend(it) } }
    private val held = HeldToken(session.policy.offlineRate)
    private var welcome: Welcome? = null // of the link that the session knows
    private var down = link?.error.orEmpty() // why there is no connection
    private var failure: Exception? = null // of the engine

    /**
     * Emit events until the answer has ended, the last one `Finished`; [recorded] is called before each batch of them.
     * Returns the engine's error, if that ended it.
     */
    suspend fun run(out: FlowCollector<Event>, recorded: () -> Unit): Exception? {
        display.tell(LinkState.CONNECTING, link?.url ?: "no server given")
        while (true) { // the link's state has the effects of events between two answers
            val event = inbox.tryReceive().getOrNull() ?: break
            if (event is InboxEvent.Linked && event.event is LinkUp) {
                session.tuning.controller.linked(event.event.welcome, event.event.rtt)
            }
        }
        act(session.start(now()))
        link?.welcome?.let {
            welcome = it
            act(session.linkUp(it, now()))
        }
        while (true) {
            recorded()
            failure?.let {
                display.failed("the drafter's engine failed: ${it.message}")
                act(session.cancel(FinishReason.FAILED))
            }
            while (true) out.emit(display.take() ?: break)
            if (session.finished != null) return failure
            nextEvent()?.let(::feed)
            act(session.tick(now()))
            release()
        }
    }

    /** Cancel unfinished work; any verifier may write the next answer. */
    fun close() {
        link?.pin("") // first, as sending below may fail
        act(session.cancel())
    }

    /** Wait for the link, the drafter or the clock, whichever is first; null: the clock. */
    @OptIn(ExperimentalCoroutinesApi::class)
    private suspend fun nextEvent(): InboxEvent? {
        val wake = listOfNotNull(session.wakeAt(), held.wakeAt()).minOrNull() ?: return inbox.receive()
        return select {
            inbox.onReceive { it }
            onTimeout(ceil(1000 * (wake - now())).toLong().coerceAtLeast(0)) { null }
        }
    }

    private fun feed(event: InboxEvent) {
        when (event) {
            is InboxEvent.Linked -> linked(event.event)
            is InboxEvent.Asked -> when (event.wish) {
                InboxEvent.Wish.PAUSE -> act(session.pause(now()))
                InboxEvent.Wish.PROCEED -> {
                    act(session.proceed(now()))
                    display.proceeded()
                }
                InboxEvent.Wish.CANCEL -> act(session.cancel())
            }
            // another session's jobs belong to an answer that was cancelled
            is InboxEvent.Ahead -> if (event.session === session) stats.aheadNodes += event.nodes
            is InboxEvent.Failed -> if (event.session === session) failure = event.error
            is InboxEvent.Compared -> if (event.session === session) {
                act(session.treeCompared(event.draft, event.base, event.working))
            }
            is InboxEvent.Drafted -> if (event.session === session) {
                stats.draftSeconds += event.asked
                act(session.treeReady(event.draft, event.version, now(), event.working))
            }
            is InboxEvent.TextRead -> if (event.session === session) act(session.textRead(event.agreed, now()))
            is InboxEvent.UnderstudyFailed -> if (event.session === session) {
                act(session.understudyFailed(event.why, now()))
            }
            is InboxEvent.TokenWritten -> if (event.session === session) {
                stats.draftSeconds += event.asked
                act(session.tokenWritten(event.written.token, event.written.probability, event.version, now()))
            }
        }
    }

    private fun linked(event: LinkEvent) {
        when (event) {
            is LinkUp -> if (event.welcome === welcome) {
                session.tuning.controller.linked(event.welcome, event.rtt) // it came up as the answer began
            } else {
                welcome = event.welcome
                down = ""
                explained(session.linkUp(event.welcome, now(), event.rtt))
            }
            is LinkDown -> {
                welcome = null // the present link may still be reported after this
                down = event.reason
                explained(session.linkDown(now(), event.refused))
            }
            is Arrived -> if (event.message.concerns(session.stream)) explained(session.message(event.message, now()))
        }
    }

    /** Carry out actions that follow from the link, and show why the verifier does not answer. */
    private fun explained(actions: List<Action>) {
        display.because(down.ifEmpty { session.verifier.complaint })
        act(actions)
    }

    private fun act(actions: List<Action>) {
        for (action in actions) {
            when (action) {
                is Send -> link?.send(action.message)
                is Pin -> link?.pin(action.arithmetic)
                is DraftTree -> jobs.draft(action)
                is DraftChain -> understudyJobs?.draft(action)
                is WriteToken -> {
                    held.hold(action, session.committed.size, session.offline.mayBeTakenBack)
                    release()
                }
                is ReadText -> understudyJobs?.read(action)
                is Compare -> when (action.arm) {
                    Arm.CHAIN -> understudyJobs?.compare(action.prefix, action.size.nodes)
                    else -> jobs.compare(action.prefix, action.size)
                }
                is DraftAhead -> {
                    jobs.draftAhead()
                    understudyJobs?.draftAhead()
                }
                is AddRows -> {
                    jobs.addRows(action)
                    jobs.draftAhead() // the last job has stopped it
                }
                is Reconnect -> link?.renew()
                is Commit -> display.keep(action)?.let { return act(session.stop(it)) }
                is Adopt -> display.keep(action)?.let { return act(session.stop(it)) }
                else -> display.show(action)
            }
        }
    }

    /** Write the held token if its time has come; if it is no longer wanted, tell the session at once. */
    private fun release() {
        val action = held.release(now(), session.job.version) ?: return
        if (action.version == session.job.version) {
            if (action.writer == Writer.UNDERSTUDY) understudyJobs?.write(action) else jobs.write(action)
        } else {
            act(session.tokenWritten(0, 0.0, action.version, now()))
        }
    }
}

/** Seconds on a monotonic clock. */
internal fun now(): Double = 1e-9 * System.nanoTime()
