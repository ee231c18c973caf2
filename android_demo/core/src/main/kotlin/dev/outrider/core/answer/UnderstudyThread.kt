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

    /** Run [job], which handles its own errors, behind those that were submitted before. */
    fun submit(job: (Understudy) -> Unit) {
        try {
            thread.execute { job(understudy) }
        } catch (_: RejectedExecutionException) {
            // closed: the answer that asked for it is being cancelled
        }
    }

    /** A job waits for the one that runs. */
    val waits: Boolean get() = waiting.isNotEmpty()

    /** Give the understudy's memory back once it has nothing more to do. */
    fun unload() = submit(Understudy::unload)

    /** Wait for running work, at most [seconds], and end; the understudy's memory is given back. */
    fun close(seconds: Long) {
        waiting.clear()
        if (understudy.loaded) unload()
        thread.shutdown()
        thread.awaitTermination(seconds, TimeUnit.SECONDS)
    }
}
