package dev.outrider.app

import android.app.Application
import android.net.Uri
import dev.outrider.app.chat.BundleStore
import dev.outrider.app.chat.ChatSession
import dev.outrider.app.chat.Journal
import dev.outrider.app.chat.NoRoom
import dev.outrider.app.chat.Opened
import dev.outrider.app.chat.Room
import dev.outrider.app.chat.Settings
import dev.outrider.app.chat.ZipBundle
import dev.outrider.app.chat.roomFor
import java.io.File
import java.io.IOException
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.asStateFlow
import kotlinx.coroutines.launch

/** The state of copying a picked bundle to the app's private files. */
sealed interface Pick {
    object None : Pick

    object Copying : Pick

    /** name: the value for [Settings.bundle]. */
    class Done(val name: String) : Pick

    class Failed(val text: String) : Pick
}

/** Holds everything that outlives an Activity: the conversation, the settings, the bundle. */
class OutriderApp : Application() {
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.Default)
    private val store by lazy { SettingsStore(this) }
    private val bundles by lazy { BundleStore(File(noBackupFilesDir, "bundles")) }
    private val words by lazy { Words(this) }

    lateinit var session: ChatSession
        private set

    private val settingsNow = MutableStateFlow(Settings())
    val settings: StateFlow<Settings> = settingsNow.asStateFlow()

    private val pickNow = MutableStateFlow<Pick>(Pick.None)
    val pick: StateFlow<Pick> = pickNow.asStateFlow()

    override fun onCreate() {
        super.onCreate()
        session = ChatSession(scope, Journal(File(noBackupFilesDir, "conversation.json")), words::problem)
        watchNetwork(this) { session.online(it) }
        open()
    }

    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        if (level == TRIM_MEMORY_UI_HIDDEN) session.visible(false) else session.trimMemory()
    }

    /** Save [settings] and continue with them. token: a new one; empty: forget the stored one; null: keep it. */
    fun save(settings: Settings, token: String?) {
        unpick()
        open {
            store.write(settings)
            if (token != null) store.writeToken(token)
        }
    }

    /** Forget the result of the last pick. */
    fun unpick() {
        pickNow.value = Pick.None
    }

    /** Copy the zipped bundle at [uri] to the app's files, if it is valid and there is room. [pick] has the result. */
    fun install(uri: Uri) {
        pickNow.value = Pick.Copying
        scope.launch(Dispatchers.IO) {
            pickNow.value = try {
                val source = ZipBundle { contentResolver.openInputStream(uri) ?: throw IOException("nothing is there") }
                Pick.Done(bundles.install(source) { roomFor(it, spaceFor(bundles.root)) }.name)
            } catch (error: Exception) {
                Pick.Failed(words.problem(error))
            }
        }
    }

    /** A failure in here is shown as the conversation's problem. */
    private fun open(prepare: () -> Unit = {}) = session.open {
        prepare()
        val settings = store.read()
        settingsNow.value = settings
        val folder = settings.bundle?.let(bundles::find)
            ?: bundles.install(AssetBundle(assets)) { roomFor(it, spaceFor(bundles.root)) }
        val room = roomFor(bundles.needs(folder).copy(files = 0), spaceFor(folder), kept = 0)
        if (room != Room.Enough) throw NoRoom(room)
        bundles.keepOnly(folder)
        Opened.from(folder, settings, store.readToken())
    }
}
