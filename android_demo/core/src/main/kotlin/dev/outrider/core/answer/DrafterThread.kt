package dev.outrider.core.answer

import dev.outrider.core.drafting.Drafter
import dev.outrider.core.drafting.TreeShape
import java.util.concurrent.Executors
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.TimeUnit
import java.util.concurrent.atomic.AtomicInteger

/**
 * One thread owns the drafter: jobs in the order they were asked for. Any new job ends drafting ahead within one engine
 * step.
 */
internal class DrafterThread(private val drafter: Drafter) {
    private val thread = Executors.newSingleThreadExecutor { Thread(it, "outrider-drafter").apply { isDaemon = true } }
    private val asked = AtomicInteger()

    /** Gets what an engine throws in the jobs that are submitted from now on. */
    var failed: (Exception) -> Unit = {}

    /** Run [job] behind those that were submitted before. */
    fun submit(job: (Drafter) -> Unit) {
        asked.incrementAndGet()
        enqueue { job(drafter) }
    }

    /** Grow the last tree on until that is [cancelled] or a job waits; [done] gets the number of nodes expanded. */
    fun draftAhead(shape: TreeShape, cancelled: () -> Boolean, done: (Int) -> Unit) {
        val before = asked.get()
        enqueue { done(drafter.draftAhead(shape) { asked.get() != before || cancelled() }) }
    }

    /** Wait for running work, and end. [seconds]: at most. */
    fun close(seconds: Long) {
        asked.incrementAndGet()
        thread.shutdown()
        thread.awaitTermination(seconds, TimeUnit.SECONDS)
    }

    private fun enqueue(job: () -> Unit) {
        val failed = failed // of those who ask
        try {
            thread.execute {
                try {
                    job()
                } catch (error: Exception) {
                    failed(error)
                }
            }
        } catch (_: RejectedExecutionException) {
            // closed: the answer that asked for it is being cancelled
        }
    }
}
