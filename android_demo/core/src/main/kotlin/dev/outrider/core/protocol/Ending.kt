/** The ways an answer can end, shared by the session, the endpoints, the ports and the command line. */
package dev.outrider.core.protocol

/** The reason for the end of an answer. Unverified text is marked as such, however the answer ended. */
public enum class FinishReason {
    /** The model ended it, or a stop string. */
    STOP,

    /** The limit of tokens was reached, or the device's drafter only repeated itself. */
    LENGTH,

    /** The model ended it, and it calls functions. */
    TOOL_CALLS,

    /** The client cancelled it. */
    CANCELLED,

    /** The verifier refused the request permanently. */
    REFUSED,

    /** The verifier did not return in time, and the text is incomplete. */
    UNREACHABLE,

    /** An engine failed. */
    FAILED;

    /** Whether the text is complete. */
    public val complete: Boolean get() = this == STOP || this == LENGTH || this == TOOL_CALLS
}

/** Whether an answer that may call functions has called some, all of them completely. */
internal fun endsWithCall(text: String): Boolean = text.endsWith("}\n</tool_call>") // JSON has no raw newlines
