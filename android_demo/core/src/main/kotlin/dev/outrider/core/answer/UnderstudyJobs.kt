package dev.outrider.core.answer

import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.Written
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.session.Compare
import dev.outrider.core.session.DraftChain
import dev.outrider.core.session.ReadText
import dev.outrider.core.session.Session
import dev.outrider.core.session.WriteToken
import dev.outrider.core.speed.MOST_TOKENS
import dev.outrider.core.targets.Understudy

/** What a session asks of the understudy, done in the understudy's thread; results go to [report]. */
internal class UnderstudyJobs(
    private val session: Session,
    private val worker: UnderstudyThread,
    private val report: (InboxEvent) -> Unit,
) {
    private val begin = session.prompt.size

    fun read(action: ReadText) = submit { understudy ->
        val wanted = { session.reads(action) }
        val agreed = understudy.agreed(
            action.prefix, action.base, begin, session.sampling, session.constraint, wanted,
        )
        InboxEvent.TextRead(session, agreed)
    }

    fun write(action: WriteToken) {
        val asked = now()
        submit { understudy ->
            val wanted = { session.version == action.version && session.finished == null }
            val written = if (understudy.read(action.prefix, wanted)) {
                understudy.nextToken(action.prefix, begin, session.sampling, session.constraint)
            } else {
                Written(0, 0.0) // which the session does not take
            }
            InboxEvent.TokenWritten(session, written, action.version, now() - asked)
        }
    }

    fun draft(action: DraftChain) {
        val asked = now()
        submit { understudy ->
            val (draft, seconds) = chain(understudy, action.prefix, action.tokens) { session.version == action.version }
            InboxEvent.Drafted(session, draft, action.version, now() - asked, seconds)
        }
    }

    /** Draft a chain for comparison, until the target falls silent: then the understudy has to write. */
    fun compare(action: Compare) = submit { understudy ->
        val (draft, seconds) = chain(understudy, action.prefix, action.chain ?: 0) { !session.alone }
        InboxEvent.Compared(session, draft, action.prefix.size, seconds)
    }

    /** Write on behind the chain under way, if the session wants it, until its version changes. */
    fun draftAhead() {
        if (!session.draftsAhead || !session.chainFlies) return
        val version = session.version
        val wanted = { session.version == version && session.finished == null && !worker.waits }
        worker.submit { runCatching { it.draftAhead(MOST_TOKENS, wanted) } } // the next chain tells what fails
    }

    /**
     * A chain of at most [count] tokens behind [prefix], and the seconds of its steps: the first token ends the
     * reading, and what is known takes none.
     */
    private fun chain(
        understudy: Understudy, prefix: List<Int>, count: Int, current: () -> Boolean,
    ): Pair<Draft, Double> {
        fun drafted(most: Int) = understudy.draft(prefix, most, session.sampling, session.constraint) {
            current() && session.finished == null
        }
        drafted(minOf(1, count))
        val began = now()
        val before = understudy.drafted
        val (tokens, scores) = drafted(count)
        val seconds = now() - began
        return Draft(TokenTree.chain(tokens), scores, understudy.drafted - before, chain = true) to seconds
    }

    private fun submit(job: (Understudy) -> InboxEvent) = worker.submit { understudy ->
        // a model may take more memory than there is, and its library may not load: the answer goes on without it
        report(
            try {
                job(understudy)
            } catch (error: Throwable) {
                understudy.unload()
                InboxEvent.UnderstudyFailed(session, oneLine(error))
            },
        )
    }

    private fun oneLine(error: Throwable): String =
        error.message?.trim()?.replace(Regex("\\s+"), " ").orEmpty().ifEmpty { error.javaClass.simpleName }
}
