package dev.outrider.core.session

/** One answer, one arithmetic: what its verified text was computed in, and who may go on with it. */
internal class AnswerArithmetic {
    /** What the answer's verified text was computed in; "" where there is none yet, or its verifier did not say. */
    var pinned = ""

    /** What the link's verifier computes in; "" where it does not say. */
    var offered = ""

    /** What the link is to look for. */
    val wanted: List<Action> get() = if (pinned.isEmpty()) emptyList() else listOf(Pin(pinned))

    /** The link's verifier has written some of the answer: the rest is to be computed like that. */
    fun pin(): List<Action> {
        if (pinned.isNotEmpty() || offered.isEmpty()) return emptyList()
        pinned = offered
        return wanted
    }
}
