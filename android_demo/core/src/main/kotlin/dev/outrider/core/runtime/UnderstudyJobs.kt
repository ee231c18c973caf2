package dev.outrider.core.runtime

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
