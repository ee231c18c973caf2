package dev.outrider.core.answer

import dev.outrider.core.drafting.Draft
import dev.outrider.core.drafting.Written
import dev.outrider.core.protocol.TokenTree
import dev.outrider.core.session.DraftChain
import dev.outrider.core.session.ReadText
import dev.outrider.core.session.Session
import dev.outrider.core.session.WriteToken
import dev.outrider.core.session.Writer
import dev.outrider.core.speed.MOST_TOKENS
import dev.outrider.core.targets.Decoding
import dev.outrider.core.targets.Understudy

/** A session's jobs for the understudy, run in its thread; results go to [report]. */
internal class UnderstudyJobs(
    private val session: Session,
    private val worker: UnderstudyThread,
    private val report: (InboxEvent) -> Unit,
) {
    private val decoding = Decoding(session.prompt.size, session.sampling, session.constraint)

    fun read(action: ReadText) = submit { understudy ->
        val agreed = understudy.agreed(action.prefix, action.base, decoding) { !session.stillReads(action) }
        InboxEvent.TextRead(session, agreed)
    }

    fun write(action: WriteToken) {
        val asked = now()
        submit { understudy ->
            val read = understudy.read(action.prefix) { session.cancelled(action.version) }
            // the session ignores it once it is cancelled
            val written = if (read) understudy.nextToken(action.prefix, decoding) else Written(0, 0.0)
            InboxEvent.TokenWritten(session, written, action.version, now() - asked)
        }
    }

    fun draft(action: DraftChain) {
        val asked = now()
        submit { understudy ->
            val (draft, seconds) =
                chain(understudy, action.prefix, action.tokens) { session.cancelled(action.version) }
            InboxEvent.Drafted(session, draft, action.version, now() - asked, seconds)
        }
    }

    /** Draft a chain for comparison, unless the target falls silent: then the understudy has to write. */
    fun compare(prefix: List<Int>, tokens: Int) = submit { understudy ->
        val (draft, seconds) = chain(understudy, prefix, tokens) { session.offline.active || session.finished != null }
        InboxEvent.Compared(session, draft, prefix.size, seconds)
    }

    /** Draft after the present chain, if the session wants it, until its version changes. */
    fun draftAhead() {
        if (session.draftsAhead != Writer.UNDERSTUDY) return
        val version = session.job.version
        val cancelled = { session.cancelled(version) || worker.waits }
        worker.submit { runCatching { it.draftAhead(MOST_TOKENS, cancelled) } } // the next chain reports it
    }

    /**
     * Return a chain of at most [count] tokens after [prefix], and the seconds of its steps. Reading ends with the
     * first token; known tokens take no time.
     */
    private fun chain(
        understudy: Understudy, prefix: List<Int>, count: Int, cancelled: () -> Boolean,
    ): Pair<Draft, Double> {
        understudy.draft(prefix, minOf(1, count), decoding, cancelled)
        val began = now()
        val before = understudy.drafted
        val (tokens, scores) = understudy.draft(prefix, count, decoding, cancelled)
        val seconds = now() - began
        return Draft(TokenTree.chain(tokens), scores, understudy.drafted - before) to seconds
    }

    private fun submit(job: (Understudy) -> InboxEvent) = worker.submit { understudy ->
        // the model may need too much memory, and its library may not load: the answer continues without it
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
