package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.speed.RequestKind
import dev.outrider.core.speed.Settled

/** What a session counts of its answer; seconds are as the driver measured them. */
class SessionStats internal constructor() {
    /** Tree rounds with a verdict, catch-up rounds not counted; draft tokens accepted and nodes sent in these. */
    var rounds = 0
    var accepted = 0
    var nodes = 0

    /** Of these rounds, those whose tree the understudy drafted, and tokens accepted in them. */
    var chains = 0
    var chained = 0
    var catchUpRounds = 0

    /** VERIFY and GENERATE sent. */
    var calls = 0

    /** Tokens that the target wrote alone. */
    var streamed = 0

    /** Between VERIFY and its verdict, rounds of drafted trees only; and of that, the verifier's engine. */
    var waitSeconds = 0.0
    var engineSeconds = 0.0

    /** Trees whose root could have been expanded ahead, whose root had been, and nodes expanded below such roots. */
    var aheadRounds = 0
    var aheadHits = 0
    var aheadUsed = 0

    /** Tokens written alone; of these by the understudy, verified later, rolled back, or kept unverified. */
    var provisional = 0
    var understudy = 0
    var kept = 0
    var rolledBack = 0
    var adopted = 0
    var stalls = 0
    var pauses = 0
    var opens = 0

    /** The drafter has drafted a tree. The first one of an answer could not be drafted ahead. */
    internal fun drafted(draft: Draft) {
        if (rounds == 0 || draft.chain) return
        aheadRounds++
        if (draft.ahead) aheadHits++
        aheadUsed += draft.kept
    }

    /** A verdict brought [fresh] tokens. catchingUp: behind it stood provisional text. */
    internal fun settled(settled: Settled, fresh: Int, catchingUp: Boolean) {
        if (settled.kind == RequestKind.STREAM) {
            streamed += fresh
            return
        }
        if (settled.drafted) {
            waitSeconds += settled.wait
            engineSeconds += settled.engine
        }
        if (catchingUp) {
            catchUpRounds++
        } else {
            rounds++
            if (settled.kind == RequestKind.CHAIN) {
                chains++
                chained += fresh - 1
            }
            accepted += fresh - 1
            nodes += settled.tree.size
        }
    }
}
