package dev.outrider.core.protocol

/**
 * Marks declarations that only custom engines need, not apps: bundle files, draft steps, models in memory.
 *
 * It may change with any release. An engine opts in with `@OptIn(EngineApi::class)`.
 */
@RequiresOptIn("This is for engines; an app does not need it.")
@Retention(AnnotationRetention.BINARY)
public annotation class EngineApi
