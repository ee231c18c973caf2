/** Facts that the system reports about itself. */
package dev.outrider.app

import android.app.ActivityManager
import android.content.Context
import android.content.res.AssetManager
import android.net.ConnectivityManager
import android.net.Network
import android.net.NetworkCapabilities
import android.net.NetworkRequest
import dev.outrider.app.chat.BundleSource
import dev.outrider.app.chat.Space
import dev.outrider.app.chat.manifestText
import dev.outrider.core.bundle.BundleError
import java.io.File
import java.io.FileNotFoundException
import java.io.InputStream

private const val FOLDER = "bundle"

/** The bundle that the app ships. */
class AssetBundle(private val assets: AssetManager) : BundleSource {
    /** The app ships no understudy. */
    override fun manifest(folder: String): String? = if (folder.isNotEmpty()) null else try {
        assets.open("$FOLDER/manifest.json").use(::manifestText)
    } catch (_: FileNotFoundException) {
        throw BundleError("this build of the app ships no bundle; pick one in the settings")
    }

    override fun read(take: (path: String, stream: InputStream) -> Unit) {
        for (name in assets.list(FOLDER).orEmpty()) assets.open("$FOLDER/$name").use { take(name, it) }
    }
}

/** Return the free space on the disk of [folder], and in memory. */
fun Context.spaceFor(folder: File): Space {
    val memory = ActivityManager.MemoryInfo()
    (getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).getMemoryInfo(memory)
    folder.mkdirs()
    return Space(folder.usableSpace, memory.availMem, memory.lowMemory)
}

/** Call [tell] with whether there is a network, now and after every change, while the process lives. */
fun watchNetwork(context: Context, tell: (Boolean) -> Unit) {
    val manager = context.getSystemService(Context.CONNECTIVITY_SERVICE) as ConnectivityManager
    tell(manager.activeNetwork != null)
    val request = NetworkRequest.Builder().addCapability(NetworkCapabilities.NET_CAPABILITY_INTERNET).build()
    manager.registerNetworkCallback(
        request,
        object : ConnectivityManager.NetworkCallback() {
            private val networks = HashSet<Network>()

            override fun onAvailable(network: Network) = synchronized(networks) {
                networks += network
                tell(true)
            }

            override fun onLost(network: Network) = synchronized(networks) {
                networks -= network
                tell(networks.isNotEmpty())
            }
        },
    )
}
