/** TLS to a verifier: whom to trust. */
package dev.outrider.core.link

import java.io.InputStream
import java.net.Socket
import java.net.URI
import java.security.KeyStore
import java.security.MessageDigest
import java.security.cert.Certificate
import java.security.cert.CertificateFactory
import javax.net.ssl.SSLContext
import javax.net.ssl.SSLParameters
import javax.net.ssl.SSLPeerUnverifiedException
import javax.net.ssl.SSLSocket
import javax.net.ssl.SSLSocketFactory
import javax.net.ssl.TrustManagerFactory
import javax.net.ssl.X509TrustManager
import kotlin.io.encoding.Base64
import kotlin.io.encoding.ExperimentalEncodingApi

/** This machine itself. */
public val LOOPBACK: Set<String> = setOf("127.0.0.1", "::1", "localhost")

/**
 * Trust the system's certificates, and [certificates] (PEM, one or more). Raises
 * [java.security.cert.CertificateException] if there are none.
 */
public fun trusting(certificates: InputStream): SSLSocketFactory {
    val trusted = KeyStore.getInstance(KeyStore.getDefaultType()).apply { load(null, null) }
    val added = CertificateFactory.getInstance("X.509").generateCertificates(certificates)
    for ((index, certificate) in (added + systemCertificates()).withIndex()) {
        trusted.setCertificateEntry("$index", certificate)
    }
    val managers = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm()).apply { init(trusted) }
    return SSLContext.getInstance("TLS").apply { init(null, managers.trustManagers, null) }.socketFactory
}

private fun systemCertificates(): List<Certificate> {
    val system = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm())
    system.init(null as KeyStore?)
    return system.trustManagers.filterIsInstance<X509TrustManager>().flatMap { it.acceptedIssuers.toList() }
}

/**
 * TLS over [socket], with the host's name checked against its certificate. pins: the public keys that it may have, see
 * [pinOf]; empty: any. Raises [java.io.IOException].
 */
internal fun secured(socket: Socket, url: URI, factory: SSLSocketFactory, pins: Set<String>): SSLSocket {
    val secure = factory.createSocket(socket, bareHost(url), portOf(url), true) as SSLSocket
    val parameters = secure.sslParameters
    checkNames.invoke(parameters, "HTTPS")
    secure.sslParameters = parameters
    secure.startHandshake()
    val pin = pinOf(secure.session.peerCertificates[0])
    if (pins.isNotEmpty() && pin !in pins) {
        secure.close()
        val why = "its public key is not pinned: $pin"
        throw SSLPeerUnverifiedException("the verifier's certificate is not trusted: $why")
    }
    return secure
}

/** The public key of [certificate] as a pin: `sha256/` and the base64 of its SubjectPublicKeyInfo's SHA-256. */
@OptIn(ExperimentalEncodingApi::class) // of Base64 in Kotlin 2.1
private fun pinOf(certificate: Certificate): String =
    "sha256/" + Base64.encode(MessageDigest.getInstance("SHA-256").digest(certificate.publicKey.encoded))

/** The port of [url]. */
internal fun portOf(url: URI): Int = if (url.port >= 0) url.port else if (url.scheme == "wss") 443 else 80

/** The host's name; an IPv6 address without its brackets. */
internal fun bareHost(url: URI): String = url.host.removeSurrounding("[", "]")

/** Android has it from API level 24 on, which is newer than the API compiled against. */
private val checkNames by lazy {
    SSLParameters::class.java.getMethod("setEndpointIdentificationAlgorithm", String::class.java)
}
