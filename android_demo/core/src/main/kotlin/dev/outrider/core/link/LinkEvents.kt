package dev.outrider.core.link

import dev.outrider.core.protocol.OutriderError
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.Welcome

/** The link was refused: invalid address, other target, drafter or protocol, no valid token. */
public class LinkRefused(message: String) : OutriderError(message)

/** The events that a link reports, in order, from any thread. */
internal sealed interface LinkEvent

/** rtt: seconds between HELLO and WELCOME. */
internal class LinkUp(val welcome: Welcome, val rtt: Double) : LinkEvent

/** refused: the verifier that answered does not accept this device; another one at this address may. */
internal class LinkDown(val reason: String, val refused: Boolean = false) : LinkEvent

internal class Arrived(val message: ServerMessage) : LinkEvent

/** Bytes of WebSocket frames, headers and masks included, without TCP and TLS. */
public class Traffic {
    /** Sent. */
    @Volatile
    public var up: Long = 0; internal set

    /** Received. */
    @Volatile
    public var down: Long = 0; internal set
}
