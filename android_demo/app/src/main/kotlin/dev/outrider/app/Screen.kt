package dev.outrider.app

import android.app.Activity
import android.os.Handler
import android.os.Looper
import android.view.View
import java.util.concurrent.Executor
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Job
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.asCoroutineDispatcher
import kotlinx.coroutines.cancelChildren
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.launch

/** Android's main thread, for coroutines. */
private val main = Handler(Looper.getMainLooper()).let { Executor(it::post) }.asCoroutineDispatcher()

/** A screen that follows flows while it is visible. */
abstract class Screen : Activity() {
    private val scope = CoroutineScope(SupervisorJob() + main)

    protected val app get() = application as OutriderApp

    /** Return the view of the layout with this id. The framework's own call has a type parameter only in newer SDKs. */
    @Suppress("UNCHECKED_CAST")
    protected fun <V : View> view(id: Int): V = findViewById(id) as V

    /** Call [show] on the main thread for every value of [flow] until the screen is hidden. To be called in onStart. */
    protected fun <T> follow(flow: Flow<T>, show: (T) -> Unit): Job = scope.launch { flow.collect { show(it) } }

    override fun onStart() {
        super.onStart()
        app.session.visible(true)
    }

    override fun onStop() {
        scope.coroutineContext[Job]?.cancelChildren()
        super.onStop()
    }
}
