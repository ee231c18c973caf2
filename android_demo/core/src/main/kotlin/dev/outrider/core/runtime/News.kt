package dev.outrider.core.runtime

import dev.outrider.core.protocol.ROOT
import dev.outrider.core.protocol.TokenTree

/** What an answer waits for. */
internal sealed interface News {
    /** The link tells. */
    class Linked(val event: LinkEvent) : News

    /** A drafter job of [session] is done. seconds: since it was asked for; working: of these, in the drafter. */
    sealed class Drafted(val session: Session, val version: Int, val seconds: Double, val working: Double) : News

    class TreeDrafted(session: Session, val draft: Draft, version: Int, seconds: Double, working: Double) :
        Drafted(session, version, seconds, working)

    class TokenDrafted(session: Session, val written: Written, version: Int, seconds: Double, working: Double) :
        Drafted(session, version, seconds, working)

    /** A tree for comparison alone, below the first [base] tokens; it took [working] seconds. */
    class Shadow(val session: Session, val draft: Draft, val base: Int, val working: Double) : News {
        /** The path of [tree], what of it would be sent, that came true; null while all that came is in it. */
        fun foreseen(tree: TokenTree, committed: List<Int>): List<Int>? {
            val path = mutableListOf<Int>()
            for (token in committed.drop(base)) {
                path += tree.child(path.lastOrNull() ?: ROOT, token) ?: return path
            }
            return null
        }
    }

    /** [nodes] were expanded ahead. */
    class Ahead(val session: Session, val nodes: Int) : News

    /** The engine threw [error]. */
    class Failed(val error: Exception) : News

    /** Somebody asks for something. */
    class Asked(val wish: Wish) : News

    enum class Wish { PAUSE, PROCEED, CANCEL }
}
