package dev.outrider.core.answer

import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.Drafter
import dev.outrider.core.session.AddRows
import dev.outrider.core.session.DraftTree
import dev.outrider.core.session.Session
import dev.outrider.core.session.TreeSize
import dev.outrider.core.session.WriteToken
import dev.outrider.core.session.Writer

/** A session's requests to the drafter, run in the drafter's thread; results go to [report]. */
internal class DrafterJobs(
    private val session: Session,
    private val worker: DrafterThread,
    private val report: (InboxEvent) -> Unit,
) {
    init {
        worker.failed = { report(InboxEvent.Failed(session, it)) }
    }

    fun draft(action: DraftTree) {
        val asked = now()
        worker.submit { drafter ->
            val began = now()
            val draft = draft(drafter, action.prefix, action.size) { session.cancelled(action.version) }
            val end = now()
            report(InboxEvent.Drafted(session, draft, action.version, end - asked, end - began))
        }
    }

    fun write(action: WriteToken) {
        val asked = now()
        worker.submit { drafter ->
            val written = drafter.nextToken(action.prefix, session.sampling, session.constraint)
            report(InboxEvent.TokenWritten(session, written, action.version, now() - asked))
        }
    }

    /** Draft a tree for comparison, unless the target falls silent: then the drafter may have to write. */
    fun compare(prefix: List<Int>, size: TreeSize) = worker.submit { drafter ->
        val began = now()
        var silent = false // whether the target has fallen silent meanwhile
        val drafted = draft(drafter, prefix, size) {
            silent = silent || session.offline.active
            silent
        }
        val draft = if (silent) Draft() else drafted // an unfinished tree teaches nothing
        report(InboxEvent.Compared(session, draft, prefix.size, now() - began))
    }

    /** Draft below the present tree, if the session wants it; any other job ends that. */
    fun draftAhead() {
        if (session.draftsAhead != Writer.DRAFTER) return
        val version = session.job.version
        worker.draftAhead(session.tuning.largest, { session.cancelled(version) }) {
            report(InboxEvent.Ahead(session, it))
        }
    }

    fun addRows(action: AddRows) = worker.submit { it.addRows(action.positions, action.rows) }

    /** Return the requested tree; an empty one if there is no room. */
    private fun draft(drafter: Drafter, prefix: List<Int>, size: TreeSize, cancelled: () -> Boolean): Draft {
        if (size.depth < 1) return Draft()
        val largest = session.tuning.largest
        val shape = largest.copy(nodes = maxOf(1, size.nodes), depth = size.depth, gain = size.gain ?: largest.gain)
        return drafter.draft(prefix, session.sampling, shape, session.constraint, cancelled)
    }
}
