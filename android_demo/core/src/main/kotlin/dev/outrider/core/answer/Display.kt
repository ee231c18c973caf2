package dev.outrider.core.answer

import dev.outrider.core.events.Adopted
import dev.outrider.core.events.Event
import dev.outrider.core.events.Finished
import dev.outrider.core.events.HandedOver
import dev.outrider.core.events.LinkChange
import dev.outrider.core.events.LinkState
import dev.outrider.core.events.Provisional
import dev.outrider.core.events.RolledBack
import dev.outrider.core.events.Verified
import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.protocol.GRAMMAR_TOOLS
import dev.outrider.core.protocol.endsWithCall
import dev.outrider.core.session.Action
import dev.outrider.core.session.Adopt
import dev.outrider.core.session.Commit
import dev.outrider.core.session.Done
import dev.outrider.core.session.HandOver
import dev.outrider.core.session.Pause
import dev.outrider.core.session.PauseReason
import dev.outrider.core.session.Provide
import dev.outrider.core.session.Resume
import dev.outrider.core.session.RollBack
import dev.outrider.core.session.Session
import dev.outrider.core.session.Stall
import dev.outrider.core.session.State

/** Why the device writes or waits. */
private const val SILENT = "the verifier is silent"

/**
 * Turns the session's actions into the events that a user sees.
 *
 * stops: strings that end the text. why: why the verifier does not answer; "" while it does or nothing is known.
 */
internal class Display(
    private val session: Session,
    private val stats: StatsRecorder,
    decode: (List<Int>) -> String,
    stops: List<String>,
    private var why: String = "",
) {
    private val text = AnswerText(decode, stops)
    private val events = ArrayDeque<Event>()
    private var status: LinkState? = null

    init {
        text.commit(session.committed.drop(session.prompt.size))
        text.rebase(session.provisional)
    }

    /** Return the next event that was not taken yet. */
    fun take(): Event? = events.removeFirstOrNull()

    /** Show committed tokens. Returns how many of them follow a stop string; null without one. */
    fun keep(action: Commit): Int? {
        stats.committed()
        val count = extend(action.tokens)
        show { added, dropped, appended ->
            Verified(added, dropped, appended, action.tokens.upTo(count), action.confirmed)
        }
        tell(LinkState.VERIFIED, "")
        return count?.let { action.tokens.size - it }
    }

    /** See [keep] of a [Commit]. */
    fun keep(action: Adopt): Int? {
        val count = extend(action.tokens)
        val surplus = count?.let { action.tokens.size - it }
        if (surplus != null && surplus > 0) {
            show { added, dropped, appended -> RolledBack(added, dropped, appended, surplus) }
        }
        show { added, dropped, appended -> Adopted(added, dropped, appended, action.tokens.upTo(count)) }
        return surplus
    }

    /** Add an event with the text's changes. */
    private fun show(event: (String, Int, String) -> Event) {
        val change = text.change()
        events += event(change.added, change.dropped, change.appended)
    }

    private fun extend(tokens: List<Int>): Int? = text.commit(tokens).also { text.rebase(session.provisional) }

    /** Show any other action; many show nothing. */
    fun show(action: Action) {
        when (action) {
            is Provide -> {
                stats.wrote()
                if (!text.provide(action.token)) session.text.enough = true // unless it is rolled back
                show { added, dropped, appended ->
                    Provisional(added, dropped, appended, action.token, action.writer)
                }
            }
            is HandOver -> show { added, dropped, appended ->
                HandedOver(added, dropped, appended, action.writer, action.why)
            }
            is RollBack -> {
                text.rebase(session.provisional)
                show { added, dropped, appended -> RolledBack(added, dropped, appended, action.tokens.size) }
            }
            is Stall -> {
                stats.stalled(action.deadline)
                tell(if (session.state == State.WAITING) LinkState.WAITING else LinkState.ALONE, SILENT)
            }
            is Pause -> if (session.offline.active) tell(LinkState.WAITING, words(action.reason))
            is Resume -> {
                stats.resumed()
                tell(LinkState.VERIFIED, "")
            }
            is Done -> end(action.reason)
            else -> Unit
        }
    }

    private fun end(reason: FinishReason) {
        text.end()
        val complaint = session.verifier.complaint
        val detail = if (reason.complete && text.settled) complaint else why.ifEmpty { complaint }
        val mayCall = reason == FinishReason.STOP && session.constraint?.grammar == GRAMMAR_TOOLS
        val calls = mayCall && endsWithCall(text.toString())
        val of = session.text
        val counted = stats.end(session.stats, session.committed.size - session.prompt.size)
        val shown = if (calls) FinishReason.TOOL_CALLS else reason
        show { added, dropped, appended ->
            Finished(added, dropped, appended, shown, of.answer, counted, detail, of.spans)
        }
    }

    private fun words(reason: PauseReason) = when (reason) {
        PauseReason.UNSURE -> "paused: the device is not sure how to continue"
        PauseReason.LIMIT -> "waiting for the link: more text by the drafter alone would not be worth reading"
        PauseReason.ASKED -> "paused on request"
    }

    /** Keep the reason for the end of an answer that cannot continue. */
    fun failed(reason: String) {
        why = reason
    }

    /** Show that a pause was lifted and the device writes again. */
    fun proceeded() {
        if (session.state == State.ALONE) tell(LinkState.ALONE, SILENT)
    }

    /** Set why the verifier does not answer, or "". It is shown at once if the link's state depends on it. */
    fun because(reason: String) {
        if (reason == why) return
        why = reason
        val shown = status
        if (why.isNotEmpty() && shown != null && shown != LinkState.VERIFIED) {
            show { added, dropped, appended -> LinkChange(added, dropped, appended, shown, why) }
        }
    }

    /** Show the link's state, unless it is shown already. */
    fun tell(state: LinkState, detail: String) {
        if (state == status) return
        status = state
        val explained = if (why.isEmpty() || state == LinkState.VERIFIED) detail else "$detail: $why"
        show { added, dropped, appended -> LinkChange(added, dropped, appended, state, explained) }
    }

    private fun List<Int>.upTo(count: Int?): List<Int> = if (count == null) this else subList(0, count)
}
