package dev.outrider.core.answer

import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.Written
import dev.outrider.core.link.LinkEvent
import dev.outrider.core.session.Compare
import dev.outrider.core.session.DraftChain
import dev.outrider.core.session.DraftTree
import dev.outrider.core.session.ReadText
import dev.outrider.core.session.Session
import dev.outrider.core.session.WriteToken

/** Messages that an answer waits for. Jobs carry the session that made them: it may have been cancelled since. */
internal sealed interface InboxEvent {
    /** The link reports. */
    class Linked(val event: LinkEvent) : InboxEvent

    /**
     * The tree of a [DraftTree], or the chain of a [DraftChain]. asked, working: seconds since the request; seconds of
     * these in the drafter, for [Session.treeReady].
     */
    class Drafted(val session: Session, val draft: Draft, val version: Int, val asked: Double, val working: Double) :
        InboxEvent

    /** The token of a [WriteToken]. asked: seconds since the request. */
    class TokenWritten(val session: Session, val written: Written, val version: Int, val asked: Double) : InboxEvent

    /** The tree of a [Compare], below the first [base] tokens. working: see [Drafted]. */
    class Compared(val session: Session, val draft: Draft, val base: Int, val working: Double) : InboxEvent

    /** The understudy has read the text of a [ReadText], or cancelled that; see there for [agreed]. */
    class TextRead(val session: Session, val agreed: Int?) : InboxEvent

    /** The understudy cannot be used: [why], in words for people. */
    class UnderstudyFailed(val session: Session, val why: String) : InboxEvent

    /** [nodes] were expanded ahead. */
    class Ahead(val session: Session, val nodes: Int) : InboxEvent

    /** The drafter's engine threw [error]. */
    class Failed(val session: Session, val error: Exception) : InboxEvent

    /** A call by the app. */
    class Asked(val wish: Wish) : InboxEvent

    enum class Wish { PAUSE, PROCEED, CANCEL }
}
