package dev.outrider.core.link

import java.io.IOException
import kotlinx.coroutines.runBlocking

/** The token that a link sends. [provider] is asked before the first dial, and again after HTTP 401. */
internal class Authorization(private val provider: (suspend () -> String)?) {
    @Volatile
    private var token: String? = null

    /** Headers of the handshake. Raises [LinkRefused] if the token cannot be sent, [IOException] if there is none. */
    fun headers(): Map<String, String> {
        if (provider == null) return emptyMap()
        val known = token ?: try {
            runBlocking { provider.invoke() }
        } catch (error: InterruptedException) {
            throw error
        } catch (error: Exception) {
            throw IOException("no token: ${error.message}", error)
        }
        if (known.any { it < ' ' }) throw LinkRefused("the token holds a line break")
        token = known
        return mapOf("Authorization" to "Bearer $known")
    }

    /** The verifier answered 401: the token may have expired. */
    fun refused() {
        token = null
    }
}
