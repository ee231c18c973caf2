package dev.outrider.core.answer

import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.TreeShape
import dev.outrider.core.session.AddRows
import dev.outrider.core.session.Compare
import dev.outrider.core.session.DraftTree
import dev.outrider.core.session.Session
import dev.outrider.core.session.TreeSize
import dev.outrider.core.session.WriteToken

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
        val shape = shapeOf(action.size)
        worker.submit { drafter ->
            val began = now()
            val draft = if (shape == null) Draft() else {
                drafter.draft(action.prefix, session.sampling, shape, session.constraint) {
                    session.version != action.version
                }
            }
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

    /** Draft a tree for comparison, until the target falls silent: then the drafter may have to write. */
    fun compare(action: Compare) {
        val shape = shapeOf(action.size)
        worker.submit { drafter ->
            val began = now()
            var silent = false // or was it, meanwhile
            val drafted = if (shape == null) Draft() else {
                drafter.draft(action.prefix, session.sampling, shape, session.constraint) {
                    silent = silent || session.alone
                    silent
                }
            }
            val draft = if (silent) Draft() else drafted // of a tree that was broken off nothing is learnt
            report(InboxEvent.Compared(session, draft, action.prefix.size, now() - began))
        }
    }

    /** Draft on below the tree under way, if the session wants it; any other job ends that. */
    fun draftAhead() {
        if (!session.draftsAhead || session.chainFlies) return
        val version = session.version
        worker.draftAhead(session.tuning.largest, { session.version == version }) {
            report(InboxEvent.Ahead(session, it))
        }
    }

    fun addRows(action: AddRows) = worker.submit { it.addRows(action.positions, action.rows) }

    /** The tree that is asked for; null where there is room for none. */
    private fun shapeOf(size: TreeSize): TreeShape? {
        if (size.depth < 1) return null
        val largest = session.tuning.largest
        return largest.copy(nodes = maxOf(1, size.nodes), depth = size.depth, gain = size.gain ?: largest.gain)
    }
}
