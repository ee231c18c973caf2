package dev.outrider.core.link

import dev.outrider.core.next
import dev.outrider.core.protocol.Hello
import dev.outrider.core.protocol.PROTOCOL_VERSION
import java.util.concurrent.LinkedBlockingQueue
import kotlin.system.exitProcess

/** Prints the seconds until a connection to the address in the argument, at best. */
fun main(arguments: Array<String>) {
    println(List(3) { secondsTo(arguments[0]) }.min())
    exitProcess(0)
}

private fun secondsTo(address: String): Double {
    val events = LinkedBlockingQueue<LinkEvent>()
    val hello = Hello(PROTOCOL_VERSION, "target", "drafter")
    val link = Link(address, hello, events::add, clearText = setOf("verifier.test"))
    val begun = System.nanoTime()
    link.stay(Double.POSITIVE_INFINITY)
    val event = events.next()
    check(event is LinkUp) { (event as LinkDown).reason }
    return 1e-9 * (System.nanoTime() - begun)
}
