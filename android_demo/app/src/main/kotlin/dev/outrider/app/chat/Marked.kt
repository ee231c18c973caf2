package dev.outrider.app.chat

/** The style of a piece beside its colour, for people who cannot distinguish colours. */
enum class Shape { PLAIN, UNDERLINED, BRACKETED, STRUCK }

val Kind.shape: Shape
    get() = when (this) {
        Kind.VERIFIED -> Shape.PLAIN
        Kind.PROVISIONAL -> Shape.UNDERLINED
        Kind.KEPT -> Shape.BRACKETED
        Kind.WITHDRAWN -> Shape.STRUCK
    }

/** [kind] covers start until end, as offsets into the marked text. */
data class Mark(val kind: Kind, val start: Int, val end: Int)

/** Text as it is drawn, brackets included, and the marks that cover it from left to right without gaps. */
data class Marked(val text: String, val marks: List<Mark>)

fun marked(pieces: List<Piece>): Marked {
    val text = StringBuilder()
    val marks = pieces.map { piece ->
        val start = text.length
        text.append(if (piece.kind.shape == Shape.BRACKETED) "[${piece.text}]" else piece.text)
        Mark(piece.kind, start, text.length)
    }
    return Marked(text.toString(), marks)
}

/** Return the text for a screen reader, which sees neither colour nor shape: [say] adds a piece's status before it. */
fun spoken(pieces: List<Piece>, say: (Kind, String) -> String): String =
    pieces.joinToString(" ") { if (it.kind == Kind.VERIFIED) it.text else say(it.kind, it.text) }
