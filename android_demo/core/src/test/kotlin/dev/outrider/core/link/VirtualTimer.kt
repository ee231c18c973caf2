package dev.outrider.core.link

import java.util.concurrent.CopyOnWriteArrayList
import java.util.concurrent.Delayed
import java.util.concurrent.FutureTask
import java.util.concurrent.ScheduledFuture
import java.util.concurrent.ScheduledThreadPoolExecutor
import java.util.concurrent.TimeUnit

/** Runs what is scheduled when [advance] has moved its clock there, in the thread that moves it. */
internal class VirtualTimer : ScheduledThreadPoolExecutor(1) {
    private inner class Task(var due: Long, val every: Long, val work: Runnable) :
        FutureTask<Unit>({}), ScheduledFuture<Unit> {
        override fun compareTo(other: Delayed) = due.compareTo((other as Task).due)

        override fun getDelay(unit: TimeUnit) = unit.convert(due - millis, TimeUnit.MILLISECONDS)
    }

    private val tasks = CopyOnWriteArrayList<Task>()

    /** The time of its clock. */
    @Volatile
    var millis = 0L

    override fun schedule(work: Runnable, delay: Long, unit: TimeUnit): ScheduledFuture<*> =
        Task(millis + unit.toMillis(delay), 0, work).also { tasks += it }

    override fun scheduleWithFixedDelay(
        work: Runnable, first: Long, delay: Long, unit: TimeUnit,
    ): ScheduledFuture<*> = Task(millis + unit.toMillis(first), unit.toMillis(delay), work).also { tasks += it }

    fun advance(seconds: Int) {
        val end = millis + 1000L * seconds
        while (true) {
            tasks.removeAll { it.isDone }
            val next = tasks.filter { it.due <= end }.minByOrNull { it.due } ?: break
            millis = next.due
            if (next.every == 0L) tasks -= next else next.due += next.every
            next.work.run()
        }
        millis = end
    }
}
