package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.speed.Arm

/** The present job of drafter or understudy, and whether results are still wanted. */
internal class JobSlot {
    /** The writer that has a job of this answer. */
    var busy: Writer? = null
        private set

    /** The tree or chain to send next. */
    var ready: Pair<Arm, Draft>? = null

    /** Version of the request; the result of a job with another version is stale. Only this class changes it. */
    @Volatile
    var version = 0
        private set

    /** Give [writer] a job. Returns its version. */
    fun take(writer: Writer): Int {
        busy = writer
        return version
    }

    /** Note that the job has ended. Returns whose it was. */
    fun done(): Writer? = busy.also { busy = null }

    /** Mark the present job, if there is one, as no longer wanted. */
    fun cancel() {
        version++
    }

    /** Also drop the tree to be sent next: the text has changed, or the way it is written. */
    fun discard() {
        version++
        ready = null
    }
}
