package dev.outrider.app.chat

import dev.outrider.core.events.Adopted
import dev.outrider.core.events.HandedOver
import dev.outrider.core.events.LinkChange
import dev.outrider.core.events.LinkState
import dev.outrider.core.events.Provisional
import dev.outrider.core.events.RolledBack
import dev.outrider.core.events.Verified
import dev.outrider.core.session.Writer
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertTrue

class ReplyTest {
    private fun verified(text: String) = Piece(Kind.VERIFIED, text)

    private fun provisional(text: String) = Piece(Kind.PROVISIONAL, text)

    private fun written(verified: String, provisional: String, token: Int) =
        Provisional(verified, provisional, token, Writer.DRAFTER)

    @Test
    fun textIsWhatTheEventsSay() {
        val reply = Reply().after(Verified("The sky", "", listOf(1, 2), 0)).after(written("The sky", " is", 3))
        assertEquals(listOf(verified("The sky"), provisional(" is")), reply.pieces())
        assertEquals(2, reply.tokens)
        assertEquals(emptyList(), Reply().pieces())
    }

    @Test
    fun whatIsTakenBackStaysWhereItStood() {
        val alone = Reply().after(Verified("The sky", "", listOf(1, 2), 0))
            .after(written("The sky", " is green.", 3))
        // the event of the rollback comes before the one that shows what of it agreed
        val back = alone.after(RolledBack("The sky", "", 2))
        assertEquals(listOf(verified("The sky"), Piece(Kind.WITHDRAWN, " is green.")), back.pieces())
        val corrected = back.after(Verified("The sky is blue", "", listOf(3, 4), 1))
        assertEquals(
            listOf(verified("The sky is "), Piece(Kind.WITHDRAWN, "green."), verified("blue")), corrected.pieces(),
        )
        assertEquals(2, corrected.rolledBack)
        val later = corrected.after(Verified("The sky is blue today", "", listOf(5), 0))
        assertEquals(verified("blue today"), later.pieces().last())
        assertTrue(later.pieces().any { it.kind == Kind.WITHDRAWN })
    }

    @Test
    fun whatIsKeptIsNotCalledVerified() {
        val alone = Reply().after(Verified("One", "", listOf(1), 0)).after(written("One", " two", 2))
        val kept = alone.after(Adopted("One two", "", listOf(2))).after(Verified("One two three", "", listOf(3), 0))
        assertEquals(listOf(verified("One"), Piece(Kind.KEPT, " two"), verified(" three")), kept.pieces())
        assertEquals(provisional(" four"), kept.after(written("One two three", " four", 4)).pieces().last())
    }

    @Test
    fun everyCharacterIsShownOnce() {
        val reply = Reply("abcdef", "gh", kept = listOf(1 until 3, 3 until 4), withdrawn = Withdrawn(2, "XY"))
        assertEquals("abXYcdefgh", reply.pieces().joinToString("") { it.text })
        assertEquals("abcdefgh", Turn(ASSISTANT, reply.pieces()).text)
        assertEquals(listOf("b", "c", "d"), reply.pieces().filter { it.kind == Kind.KEPT }.map { it.text })
    }

    @Test
    fun badgesFollowTheLink() {
        fun badge(reply: Reply?) = ChatState(ready = true, reply = reply).badge
        fun linked(state: LinkState, provisional: String = "") = Reply().after(LinkChange("", provisional, state, ""))
        val down = Reply().after(LinkChange("", "", LinkState.ALONE, "the verifier is silent: Connection refused"))
        assertEquals("the verifier is silent: Connection refused", down.why)
        assertEquals("", down.after(LinkChange("", "", LinkState.VERIFIED, "")).why)
        assertEquals(Badge.READY, badge(null))
        assertEquals(Badge.CONNECTING, badge(Reply()))
        assertEquals(Badge.VERIFIED, badge(linked(LinkState.VERIFIED)))
        assertEquals(Badge.CATCHING_UP, badge(linked(LinkState.VERIFIED, "text")))
        assertEquals(Badge.ALONE, badge(linked(LinkState.ALONE, "text")))
        val over = linked(LinkState.ALONE, "text").after(HandedOver("", "text", Writer.UNDERSTUDY, ""))
        assertEquals(Badge.UNDERSTUDY, badge(over))
        val back = over.after(HandedOver("", "text", Writer.DRAFTER, "it has gone"))
        assertEquals(Badge.ALONE to "it has gone", badge(back) to back.why)
        assertEquals(Badge.UNDERSTUDY, badge(linked(LinkState.ALONE).after(Provisional("", "x", 3, Writer.UNDERSTUDY))))
        assertEquals(Badge.WAITING, badge(linked(LinkState.WAITING)))
        assertEquals(Badge.DEVICE_ONLY, ChatState(ready = true, deviceOnly = true).badge)
        assertEquals(Badge.PROBLEM, ChatState(ready = true, problem = "no").badge)
        assertEquals(Badge.LOADING, ChatState().badge)
    }
}
