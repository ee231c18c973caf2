package dev.outrider.app.chat

import dev.outrider.core.events.Adopted
import dev.outrider.core.events.Event
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

    /** Return the reply after an event that leaves these texts. */
    private fun Reply.then(verified: String, provisional: String, event: (String, Int, String) -> Event): Reply =
        after(event(verified.substring(this.verified.length), this.provisional.length, provisional))

    private fun Reply.verified(text: String, tokens: List<Int>, confirmed: Int = 0): Reply =
        then(text, "") { added, dropped, appended -> Verified(added, dropped, appended, tokens, confirmed) }

    private fun Reply.written(verified: String, provisional: String, token: Int, writer: Writer = Writer.DRAFTER) =
        then(verified, provisional) { added, dropped, appended -> Provisional(added, dropped, appended, token, writer) }

    private fun Reply.linked(state: LinkState, provisional: String = "", why: String = ""): Reply =
        then("", provisional) { added, dropped, appended -> LinkChange(added, dropped, appended, state, why) }

    private fun Reply.over(writer: Writer, why: String = ""): Reply =
        then("", "text") { added, dropped, appended -> HandedOver(added, dropped, appended, writer, why) }

    @Test
    fun textIsWhatTheEventsSay() {
        val reply = Reply().verified("The sky", listOf(1, 2)).written("The sky", " is", 3)
        assertEquals(listOf(verified("The sky"), provisional(" is")), reply.pieces())
        assertEquals(2, reply.tokens)
        assertEquals(emptyList(), Reply().pieces())
    }

    @Test
    fun whatIsTakenBackStaysWhereItStood() {
        val alone = Reply().verified("The sky", listOf(1, 2))
            .written("The sky", " is green.", 3)
        // the event of the rollback comes before the one that shows what of it agreed
        val back = alone.then("The sky", "") { added, dropped, appended -> RolledBack(added, dropped, appended, 2) }
        assertEquals(listOf(verified("The sky"), Piece(Kind.WITHDRAWN, " is green.")), back.pieces())
        val corrected = back.verified("The sky is blue", listOf(3, 4), 1)
        assertEquals(
            listOf(verified("The sky is "), Piece(Kind.WITHDRAWN, "green."), verified("blue")), corrected.pieces(),
        )
        assertEquals(2, corrected.rolledBack)
        val later = corrected.verified("The sky is blue today", listOf(5))
        assertEquals(verified("blue today"), later.pieces().last())
        assertTrue(later.pieces().any { it.kind == Kind.WITHDRAWN })
    }

    @Test
    fun whatIsKeptIsNotCalledVerified() {
        val alone = Reply().verified("One", listOf(1)).written("One", " two", 2)
        val kept = alone
            .then("One two", "") { added, dropped, appended -> Adopted(added, dropped, appended, listOf(2)) }
            .verified("One two three", listOf(3))
        assertEquals(listOf(verified("One"), Piece(Kind.KEPT, " two"), verified(" three")), kept.pieces())
        assertEquals(provisional(" four"), kept.written("One two three", " four", 4).pieces().last())
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
        fun linked(state: LinkState, provisional: String = "") = Reply().linked(state, provisional)
        val down = Reply().linked(LinkState.ALONE, why = "the verifier is silent: Connection refused")
        assertEquals("the verifier is silent: Connection refused", down.why)
        assertEquals("", down.linked(LinkState.VERIFIED).why)
        assertEquals(Badge.READY, badge(null))
        assertEquals(Badge.CONNECTING, badge(Reply()))
        assertEquals(Badge.VERIFIED, badge(linked(LinkState.VERIFIED)))
        assertEquals(Badge.CATCHING_UP, badge(linked(LinkState.VERIFIED, "text")))
        assertEquals(Badge.ALONE, badge(linked(LinkState.ALONE, "text")))
        val over = linked(LinkState.ALONE, "text").over(Writer.UNDERSTUDY)
        assertEquals(Badge.UNDERSTUDY, badge(over))
        val back = over.over(Writer.DRAFTER, "it has gone")
        assertEquals(Badge.ALONE to "it has gone", badge(back) to back.why)
        assertEquals(Badge.UNDERSTUDY, badge(linked(LinkState.ALONE).written("", "x", 3, Writer.UNDERSTUDY)))
        assertEquals(Badge.WAITING, badge(linked(LinkState.WAITING)))
        assertEquals(Badge.DEVICE_ONLY, ChatState(ready = true, deviceOnly = true).badge)
        assertEquals(Badge.PROBLEM, ChatState(ready = true, problem = "no").badge)
        assertEquals(Badge.LOADING, ChatState().badge)
    }
}
