package dev.outrider.core.link

import dev.outrider.core.protocol.OutriderError
import dev.outrider.core.protocol.ServerMessage
import dev.outrider.core.protocol.Welcome

/** No link can be made like this: not an address, other target, drafter or protocol, no valid token. */
public class LinkRefused(message: String) : OutriderError(message)

/** What a link reports, in order, from whichever thread. */
internal sealed interface LinkEvent

/** rtt: seconds between HELLO and WELCOME. */
internal class LinkUp(val welcome: Welcome, val rtt: Double) : LinkEvent

/** refused: the verifier that answered does not accept this device; another one at this address may. */
internal class LinkDown(val reason: String, val refused: Boolean = false) : LinkEvent

internal class Arrived(val message: ServerMessage) : LinkEvent

/** Bytes of WebSocket frames, headers and masks included; TCP and TLS not. */
public class Traffic {
    /** Sent. */
    @Volatile
    public var up: Long = 0; internal set

    /** Received. */
    @Volatile
    public var down: Long = 0; internal set
}
