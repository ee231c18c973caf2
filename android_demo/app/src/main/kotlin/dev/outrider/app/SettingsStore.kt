package dev.outrider.app

import android.content.Context
import android.security.keystore.KeyGenParameterSpec
import android.security.keystore.KeyProperties
import android.util.Base64
import dev.outrider.app.chat.Settings
import dev.outrider.core.session.OnReturn
import dev.outrider.core.session.UnderstudyUse
import dev.outrider.core.session.WhoWrites
import java.security.GeneralSecurityException
import java.security.KeyStore
import java.security.ProviderException
import javax.crypto.Cipher
import javax.crypto.KeyGenerator
import javax.crypto.SecretKey
import javax.crypto.spec.GCMParameterSpec

private const val KEYSTORE = "AndroidKeyStore"
private const val ALIAS = "outrider-token"
private const val CIPHER = "AES/GCM/NoPadding"
private const val TAG_BITS = 128

/** The settings in the app's private preferences. Blocks: do not use it on the main thread. */
class SettingsStore(context: Context) {
    private val preferences = context.getSharedPreferences("settings", Context.MODE_PRIVATE)

    fun read() = Settings(
        server = preferences.getString("server", null).orEmpty(),
        writer = WhoWrites.entries.find { it.name == preferences.getString("writer", null) } ?: WhoWrites.PREFER_CLOUD,
        onReturn = OnReturn.entries.find { it.name == preferences.getString("on_return", null) } ?: OnReturn.REPAIR,
        sure = preferences.getBoolean("sure", false),
        bundle = preferences.getString("bundle", null),
        understudy = UnderstudyUse.entries.find { it.name == preferences.getString("understudy", null) }
            ?: UnderstudyUse.COLD,
        executorch = preferences.getBoolean("executorch", false),
    )

    fun write(settings: Settings) {
        preferences.edit()
            .putString("server", settings.server).putString("writer", settings.writer.name)
            .putString("on_return", settings.onReturn.name).putBoolean("sure", settings.sure)
            .putString("bundle", settings.bundle).putString("understudy", settings.understudy.name)
            .putBoolean("executorch", settings.executorch).commit()
    }

    /** Return the stored token; null: there is none, or the key store has lost its key. */
    fun readToken(): String? {
        val stored = preferences.getString("token", null) ?: return null
        return try {
            val bytes = Base64.decode(stored, Base64.NO_WRAP)
            val ivSize = bytes[0].toInt()
            val cipher = Cipher.getInstance(CIPHER)
            cipher.init(Cipher.DECRYPT_MODE, key(), GCMParameterSpec(TAG_BITS, bytes, 1, ivSize))
            String(cipher.doFinal(bytes, 1 + ivSize, bytes.size - 1 - ivSize), Charsets.UTF_8)
        } catch (_: GeneralSecurityException) {
            null
        } catch (_: ProviderException) { // how key stores report their own errors
            null
        } catch (_: IllegalArgumentException) {
            null
        }
    }

    /**
     * Store or, if empty, forget it. Raises [GeneralSecurityException] or [ProviderException] if the key store fails.
     */
    fun writeToken(token: String) {
        if (token.isEmpty()) {
            preferences.edit().remove("token").commit()
            return
        }
        val cipher = Cipher.getInstance(CIPHER)
        cipher.init(Cipher.ENCRYPT_MODE, key())
        val bytes = byteArrayOf(cipher.iv.size.toByte()) + cipher.iv + cipher.doFinal(token.toByteArray())
        preferences.edit().putString("token", Base64.encodeToString(bytes, Base64.NO_WRAP)).commit()
    }

    /** Return the key, which is made on first use and never leaves the key store. */
    private fun key(): SecretKey {
        val store = KeyStore.getInstance(KEYSTORE).apply { load(null) }
        (store.getKey(ALIAS, null) as? SecretKey)?.let { return it }
        val use = KeyProperties.PURPOSE_ENCRYPT or KeyProperties.PURPOSE_DECRYPT
        val spec = KeyGenParameterSpec.Builder(ALIAS, use)
            .setBlockModes(KeyProperties.BLOCK_MODE_GCM).setEncryptionPaddings(KeyProperties.ENCRYPTION_PADDING_NONE)
            .build()
        return KeyGenerator.getInstance(KeyProperties.KEY_ALGORITHM_AES, KEYSTORE).apply { init(spec) }.generateKey()
    }
}
