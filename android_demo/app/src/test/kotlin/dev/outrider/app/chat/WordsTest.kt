package dev.outrider.app.chat

import dev.outrider.core.bundle.ChatMessage
import java.util.Locale
import kotlin.test.Test
import kotlin.test.assertEquals
import kotlin.test.assertTrue

/** Text that the screen draws and speaks, and the figures on it. */
class WordsTest {
    @Test
    fun everyKindHasAShapeOfItsOwn() {
        assertEquals(Kind.entries.size, Kind.entries.map { it.shape }.toSet().size)
    }

    @Test
    fun marksCoverTheTextWithoutGaps() {
        val marked = marked(Kind.entries.map { Piece(it, it.name) })
        assertEquals("VERIFIEDPROVISIONAL[KEPT]WITHDRAWN", marked.text)
        assertEquals(0, marked.marks.first().start)
        assertEquals(marked.text.length, marked.marks.last().end)
        assertTrue(marked.marks.zipWithNext().all { (one, next) -> one.end == next.start })
        val kept = marked.marks.single { it.kind == Kind.KEPT }
        assertEquals("[KEPT]", marked.text.substring(kept.start, kept.end))
    }

    @Test
    fun aScreenReaderHearsWhatIsNotVerified() {
        val pieces = listOf(Piece(Kind.VERIFIED, "The sky"), Piece(Kind.PROVISIONAL, "is green"))
        assertEquals("The sky PROVISIONAL: is green", spoken(pieces) { kind, text -> "$kind: $text" })
    }

    @Test
    fun numbersAreWrittenAsPeopleDo() {
        val english = Numbers(Locale.US)
        assertEquals(listOf("9.9", "12", "1,235"), listOf(9.94, 12.3, 1234.6).map(english::rate))
        assertEquals("42", english.millis(0.0421))
        assertEquals(
            listOf(
                "0" to 0, "999" to 0, "1.0" to 1, "9.9" to 1, "10" to 1, "999" to 1, "1.0" to 2, "57" to 2, "2.1" to 3,
            ),
            listOf(0L, 999, 1000, 9_940, 9_960, 999_400, 999_600, 56_900_000, 2_100_000_000).map(english::bytes),
        )
        assertEquals("9,9", Numbers(Locale.GERMANY).rate(9.9))
        assertEquals(8.0, Figures(40, 5.0, 1, 2, null, 0).tokensPerSecond)
        assertEquals(0.0, Figures(0, 0.0, 0, 0, null, 0).tokensPerSecond)
    }

    @Test
    fun aLongConversationLosesItsBeginning() {
        val turns = (1..5).flatMap { listOf(ChatMessage(USER, "q$it"), ChatMessage(ASSISTANT, "a$it")) }
        val said = turns + ChatMessage(USER, "q6")
        val size = { messages: List<ChatMessage> -> 10 * messages.size }
        assertEquals(said, fitting(said, 110, size))
        assertEquals(listOf("q4", "a4", "q5", "a5", "q6"), fitting(said, 60, size).map { it.content })
        assertEquals(listOf("q6"), fitting(said, 1, size).map { it.content })
        val system = ChatMessage("system", "be brief")
        assertEquals(listOf("be brief", "q6"), fitting(listOf(system) + said, 20, size).map { it.content })
    }

    @Test
    fun roomIsAskedForBeforeAnythingIsLoaded() {
        val needs = Needs(files = 30_000_000, weights = 28_000_000)
        val plenty = Space(disk = 1L shl 34, memory = 1L shl 32, lowMemory = false)
        assertEquals(Room.Enough, roomFor(needs, plenty))
        assertEquals(Room.NoDisk(1), roomFor(needs, plenty.copy(disk = 30_000_000 + (64L shl 20) - 1)))
        assertEquals(Room.NoMemory(1), roomFor(needs, plenty.copy(memory = needs.memory - 1)))
        assertEquals(Room.NoMemory(0), roomFor(needs, plenty.copy(lowMemory = true)))
        assertTrue(needs.memory > 2 * needs.weights)
    }
}
