package dev.outrider.core.answer

import dev.outrider.core.targets.Understudy
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.RejectedExecutionException
import java.util.concurrent.ThreadPoolExecutor
import java.util.concurrent.TimeUnit

/** A thread that owns the [understudy]; it starts with the first job. */
internal class UnderstudyThread(private val understudy: Understudy) {
    private val waiting = LinkedBlockingQueue<Runnable>()
    private val thread = ThreadPoolExecutor(1, 1, 0, TimeUnit.SECONDS, waiting) { job ->
        Thread(job, "outrider-understudy").apply { isDaemon = true }
    }

    /** Run [job], which handles its own errors, after those that were submitted before. */
    fun submit(job: (Understudy) -> Unit) {
        try {
            thread.execute { job(understudy) }
        } catch (_: RejectedExecutionException) {
            // closed: its answer is being cancelled
        }
    }

    /** Whether a job waits for the running one. */
    val waits: Boolean get() = waiting.isNotEmpty()

    /** Free the understudy's memory once it has no more jobs. */
    fun unload() = submit(Understudy::unload)

    /** Wait for the running job, at most [seconds], free the understudy's memory, and end. */
    fun close(seconds: Long) {
        waiting.clear()
        if (understudy.loaded) unload()
        thread.shutdown()
        thread.awaitTermination(seconds, TimeUnit.SECONDS)
    }
}
