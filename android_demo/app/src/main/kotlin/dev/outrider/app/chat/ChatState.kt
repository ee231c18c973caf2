package dev.outrider.app.chat

import dev.outrider.core.bundle.ChatMessage
import dev.outrider.core.events.LinkState
import dev.outrider.core.session.Writer

/** Roles as chat templates call them. */
const val USER = "user"
const val ASSISTANT = "assistant"

/** A turn of the conversation. */
data class Turn(val role: String, val pieces: List<Piece>) {
    /** The text without withdrawn pieces. */
    val text: String get() = pieces.filter { it.kind != Kind.WITHDRAWN }.joinToString("") { it.text }

    fun message() = ChatMessage(role, text)
}

/** The badge's state of the link, and who writes offline: the drafter ([ALONE]) or the [UNDERSTUDY]. */
enum class Badge { LOADING, READY, CONNECTING, VERIFIED, CATCHING_UP, ALONE, UNDERSTUDY, WAITING, DEVICE_ONLY, PROBLEM }

/** Everything the screen shows. ready: the bundle is open; online: the system has a network; problem: one line. */
data class ChatState(
    val ready: Boolean = false,
    val deviceOnly: Boolean = false,
    val online: Boolean = true,
    val turns: List<Turn> = emptyList(),
    val reply: Reply? = null,
    val figures: Figures? = null,
    val problem: String? = null,
) {
    val answering: Boolean get() = reply != null

    val badge: Badge
        get() = when {
            problem != null -> Badge.PROBLEM
            !ready -> Badge.LOADING
            reply == null -> if (deviceOnly) Badge.DEVICE_ONLY else Badge.READY
            deviceOnly -> Badge.DEVICE_ONLY
            else -> when (reply.link) {
                LinkState.VERIFIED -> if (reply.provisional.isEmpty()) Badge.VERIFIED else Badge.CATCHING_UP
                LinkState.ALONE -> if (reply.writer == Writer.UNDERSTUDY) Badge.UNDERSTUDY else Badge.ALONE
                LinkState.WAITING -> Badge.WAITING
                LinkState.CONNECTING, null -> Badge.CONNECTING
            }
        }
}

/**
 * Return the last of [messages] whose prompt takes at most [room] tokens, as counted by [size]. The conversation begins
 * with a user's turn; a system's stays. At least the last message is kept.
 */
fun fitting(messages: List<ChatMessage>, room: Int, size: (List<ChatMessage>) -> Int): List<ChatMessage> {
    val fixed = messages.takeWhile { it.role == "system" }
    var said = messages.drop(fixed.size)
    while (said.size > 1 && size(fixed + said) > room) {
        said = said.drop(1).dropWhile { it.role != USER }.ifEmpty { said.takeLast(1) }
    }
    return fixed + said
}
