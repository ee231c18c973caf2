/** TLS to a verifier: whom to trust. */
package dev.outrider.core.link

import java.io.InputStream
import java.net.Socket
import java.net.URI
import java.security.KeyStore
import java.security.cert.CertificateFactory
import javax.net.ssl.SSLContext
import javax.net.ssl.SSLParameters
import javax.net.ssl.SSLSocket
import javax.net.ssl.SSLSocketFactory
import javax.net.ssl.TrustManagerFactory
import javax.net.ssl.X509TrustManager

/** This machine itself. */
public val LOOPBACK: Set<String> = setOf("127.0.0.1", "::1", "localhost")

/**
 * Trusts what the system trusts, and [certificates] (PEM, one or more). Raises
 * [java.security.cert.CertificateException] where there are none.
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

private fun systemCertificates(): List<java.security.cert.Certificate> {
    val system = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm())
    system.init(null as KeyStore?)
    return system.trustManagers.filterIsInstance<X509TrustManager>().flatMap { it.acceptedIssuers.toList() }
}

/** TLS over [socket], with the host's name checked against its certificate. Raises [java.io.IOException]. */
internal fun secured(socket: Socket, url: URI, factory: SSLSocketFactory): SSLSocket {
    val secure = factory.createSocket(socket, bareHost(url), socket.port, true) as SSLSocket
    val parameters = secure.sslParameters
    checkNames.invoke(parameters, "HTTPS")
    secure.sslParameters = parameters
    secure.startHandshake()
    return secure
}

/** The host's name; an IPv6 address without its brackets. */
internal fun bareHost(url: URI): String = url.host.removeSurrounding("[", "]")

/** Android has it from API level 24 on, which is newer than what this is compiled against. */
private val checkNames by lazy {
    SSLParameters::class.java.getMethod("setEndpointIdentificationAlgorithm", String::class.java)
}
