/** The ways an answer can end, shared by the session, the endpoints, the ports and the command line. */
package dev.outrider.core.protocol

/** Why an answer ended. Text that nobody verified is marked as such, however the answer ended. */
public enum class FinishReason {
    /** Its own end, or a stop string. */
    STOP,

    /** The limit of tokens was reached, or the device's drafter only repeated itself. */
    LENGTH,

    /** Its own end, and it calls functions. */
    TOOL_CALLS,

    /** The client gave it up. */
    CANCELLED,

    /** The verifier refused the request for good. */
    REFUSED,

    /** the verifier did not return in time, and the text is incomplete. */
    UNREACHABLE,

    /** An engine failed. */
    FAILED;

    /** The text is complete as far as it may be. */
    public val complete: Boolean get() = this == STOP || this == LENGTH || this == TOOL_CALLS
}

/** Whether an answer that may call functions has called some, all of them completely. */
internal fun endsWithCall(text: String): Boolean = text.endsWith("}\n</tool_call>") // no raw newline stands in JSON
