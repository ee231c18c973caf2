package dev.outrider.core.protocol

/** An error that an app can show to its user: the message is one line that says what is wrong and what to do. */
public abstract class OutriderError(message: String, cause: Throwable? = null) : Exception(message, cause)
