package dev.outrider.core.session

import dev.outrider.core.drafting.Draft

/** The one job under way, to draft or to write, and which results of jobs are still wanted. */
internal class JobSlot {
    /** The writer that has a job of this answer. */
    var busy: Writer? = null
        private set

    /** The tree to send next. */
    var ready: Draft? = null

    /** Of what is asked for; the result of a job of another version is stale. Nobody else changes it. */
    @Volatile
    var version = 0
        private set

    /** [writer] gets a job. Returns the version that it carries. */
    fun take(writer: Writer): Int {
        busy = writer
        return version
    }

    /** The job has ended. Returns whose it was. */
    fun done(): Writer? = busy.also { busy = null }

    /** The job under way, if there is one, is no longer wanted. */
    fun cancel() {
        version++
    }

    /** Neither is the tree that was to be sent next: the text has changed, or the way it is written. */
    fun discard() {
        version++
        ready = null
    }
}
