package dev.outrider.core.answer

import dev.outrider.core.drafting.Drafter
import dev.outrider.core.drafting.TreeShape
import java.util.concurrent.Executors
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.TimeUnit
import java.util.concurrent.atomic.AtomicInteger

/**
 * A thread that owns the drafter and runs jobs in the order of their requests. Any new job ends drafting ahead within
 * one engine step.
 */
internal class DrafterThread(private val drafter: Drafter) {
    private val thread = Executors.newSingleThreadExecutor { Thread(it, "outrider-drafter").apply { isDaemon = true } }
    private val asked = AtomicInteger()

    /** Gets the exceptions of jobs that are submitted from now on. */
    var failed: (Exception) -> Unit = {}

    /** Run [job] after those that were submitted before. */
    fun submit(job: (Drafter) -> Unit) {
        asked.incrementAndGet()
        enqueue { job(drafter) }
    }

    /** Grow the last tree until [cancelled] or a job waits; [done] gets the number of nodes expanded. */
    fun draftAhead(shape: TreeShape, cancelled: () -> Boolean, done: (Int) -> Unit) {
        val before = asked.get()
        enqueue { done(drafter.draftAhead(shape) { asked.get() != before || cancelled() }) }
    }

    /** Wait for the running job, at most [seconds], and end. */
    fun close(seconds: Long) {
        asked.incrementAndGet()
        thread.shutdown()
        thread.awaitTermination(seconds, TimeUnit.SECONDS)
    }

    private fun enqueue(job: () -> Unit) {
        val failed = failed // that of this job
        try {
            thread.execute {
                try {
                    job()
                } catch (error: Exception) {
                    failed(error)
                }
            }
        } catch (_: RejectedExecutionException) {
            // closed: its answer is being cancelled
        }
    }
}
