/** Actions that a session requests. Pure data, under the names that all ports share. */
package dev.outrider.core.session

import dev.outrider.core.protocol.ClientMessage
import dev.outrider.core.protocol.FinishReason
import dev.outrider.core.speed.DraftSize
import dev.outrider.core.speed.TreeSize

internal sealed interface Action

/** Give [message] to the link. */
internal class Send(val message: ClientMessage) : Action

/** From now on let only verifiers that compute in [arithmetic] answer, or say nothing of how they compute. */
internal data class Pin(val arithmetic: String) : Action

/**
 * Draft a tree of at most [size] below [prefix]; answer with [Session.treeReady]. Where its depth is 0, only the bonus
 * token is wanted.
 */
internal data class DraftTree(val prefix: List<Int>, val version: Int, val size: TreeSize) : Action

/**
 * Let the understudy draft a chain of [tokens] tokens behind [prefix]; answer with [Session.treeReady], where the
 * seconds are those of the draft's steps: those of what was known, and of reading the text, do not count.
 */
internal data class DraftChain(val prefix: List<Int>, val version: Int, val tokens: Int) : Action

/**
 * Draft a tree below [prefix], or a chain of the understudy behind it, that is not sent: what comes of it is seen in
 * the stream. Answer with [Session.treeCompared].
 */
internal data class Compare(val prefix: List<Int>, val size: DraftSize) : Action

/**
 * Grow the tree that was just sent on, where [Session.draftsAhead], until the session's version changes; behind a
 * chain, the understudy writes on.
 */
internal data class DraftAhead(val version: Int) : Action

/** Let [writer] write one token behind [prefix]; answer with [Session.tokenWritten]. */
internal data class WriteToken(val prefix: List<Int>, val version: Int, val writer: Writer = Writer.DRAFTER) : Action

/**
 * Let the understudy read [prefix]; answer with [Session.textRead].
 *
 * It says how many of the tokens from [base] on the understudy would have written itself, up to the first that it would
 * not. The reading may be given up once [Session.stillReads] is false; it says null then.
 */
internal data class ReadText(val prefix: List<Int>, val base: Int) : Action

/** Feature rows `[n, 2, heads, headDim]`, flat, of tokens at [positions] `[n]`, which the drafter has not seen yet. */
internal class AddRows(val positions: IntArray, val rows: FloatArray) : Action

/** [tokens] are the target's; the first [confirmed] of them stood there as provisional already. */
internal data class Commit(val tokens: List<Int>, val confirmed: Int) : Action

/** [writer] wrote [token] on its own. */
internal data class Provide(val token: Int, val writer: Writer = Writer.DRAFTER) : Action

/** From here on [writer] writes alone. why: the understudy failed, in words for people; else "". */
internal data class HandOver(val writer: Writer, val why: String = "") : Action

/** The last provisional tokens, [tokens], are withdrawn: the target, or the understudy, draws otherwise. */
internal data class RollBack(val tokens: List<Int>) : Action

/** [tokens], written on the device alone, stay as they are: the answer continues behind them ([OnReturn.KEEP]). */
internal data class Adopt(val tokens: List<Int>) : Action

/** The verdict is overdue or the link is down. [deadline]: when it was due. */
internal data class Stall(val deadline: Double) : Action

/** The target answers again. */
internal data object Resume : Action

/** Writing alone stops until the target answers or `proceed` is called. */
internal data class Pause(val reason: PauseReason) : Action

/** The link has been silent for too long: make another connection, unless it speaks first. */
internal data object Reconnect : Action

/** The answer has ended. */
internal data class Done(val reason: FinishReason) : Action
