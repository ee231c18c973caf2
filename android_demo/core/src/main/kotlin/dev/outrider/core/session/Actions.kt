/** Actions that a session requests. Pure data, under the names that all ports share. */
package dev.outrider.core.session

import dev.outrider.core.protocol.ClientMessage
import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.speed.Arm

internal sealed interface Action

/** Give [message] to the link. */
internal class Send(val message: ClientMessage) : Action

/** Accept only verifiers with this [arithmetic], or with an unknown one, from now on. */
internal data class Pin(val arithmetic: String) : Action

/**
 * Draft a tree of at most [size] below [prefix]; answer with [Session.treeReady]. Depth 0: only the bonus token is
 * wanted.
 */
internal data class DraftTree(val prefix: List<Int>, val version: Int, val size: TreeSize) : Action

/**
 * Let the understudy draft a chain of [tokens] tokens after [prefix]; answer with [Session.treeReady]. Its seconds are
 * those of the draft's steps, without known tokens and without reading the text.
 */
internal data class DraftChain(val prefix: List<Int>, val version: Int, val tokens: Int) : Action

/**
 * Draft a tree below [prefix], or a chain of the understudy after it, that is not sent, to compare it with the stream.
 * Answer with [Session.treeCompared].
 */
internal data class Compare(val prefix: List<Int>, val arm: Arm, val size: TreeSize) : Action

/**
 * Grow the tree that was just sent, while [Session.draftsAhead], until the session's version changes; after a chain,
 * the understudy drafts on.
 */
internal data class DraftAhead(val version: Int) : Action

/** Let [writer] write one token after [prefix]; answer with [Session.tokenWritten]. */
internal data class WriteToken(val prefix: List<Int>, val version: Int, val writer: Writer = Writer.DRAFTER) : Action

/**
 * Let the understudy read [prefix]; answer with [Session.textRead].
 *
 * The result is how many of the tokens from [base] on it would have written itself, up to the first difference. Reading
 * may be cancelled once [Session.stillReads] is false; the result is null then.
 */
internal data class ReadText(val prefix: List<Int>, val base: Int) : Action

/** Feature rows `[n, 2, heads, headDim]`, flat, of tokens at [positions] `[n]`, which the drafter lacks. */
internal class AddRows(val positions: IntArray, val rows: FloatArray) : Action

/** [tokens] are the target's; the first [confirmed] of them were shown as provisional. */
internal data class Commit(val tokens: List<Int>, val confirmed: Int) : Action

/** [writer] wrote [token] offline. */
internal data class Provide(val token: Int, val writer: Writer = Writer.DRAFTER) : Action

/** From here on [writer] writes offline. why: the understudy's failure, in words for people; else "". */
internal data class HandOver(val writer: Writer, val why: String = "") : Action

/** The last provisional tokens, [tokens], are rolled back: the target, or the understudy, draws otherwise. */
internal data class RollBack(val tokens: List<Int>) : Action

/** [tokens], written offline, stay as they are: the answer continues after them ([OnReturn.KEEP]). */
internal data class Adopt(val tokens: List<Int>) : Action

/** The verdict is overdue or the link is down. [deadline]: when it was due. */
internal data class Stall(val deadline: Double) : Action

/** The target answers again. */
internal data object Resume : Action

/** Offline writing stops until the target answers or `proceed` is called. */
internal data class Pause(val reason: PauseReason) : Action

/** The link has been silent for too long: make another connection, unless it speaks first. */
internal data object Reconnect : Action

/** The answer has ended. */
internal data class Done(val reason: FinishReason) : Action
