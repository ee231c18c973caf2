package dev.outrider.core.session

import dev.outrider.core.drafting.Draft
import dev.outrider.core.speed.Arm

/** Counts that a session keeps of its answer; seconds are as the driver measured them. */
public class SessionStats internal constructor() {
    /** Tree rounds with a verdict, catch-up rounds not counted; draft tokens accepted and nodes sent in these. */
    public var rounds: Int = 0; internal set
    public var accepted: Int = 0; internal set
    public var nodes: Int = 0; internal set

    /** Of these rounds, those whose tree the understudy drafted, and tokens accepted in them. */
    public var chains: Int = 0; internal set
    public var chained: Int = 0; internal set
    public var catchUpRounds: Int = 0; internal set

    /** VERIFY and GENERATE sent. */
    public var calls: Int = 0; internal set

    /** Tokens that the target wrote by itself (GENERATE). */
    public var streamed: Int = 0; internal set

    /** Between VERIFY and its verdict, rounds of drafted trees only; and of that, the verifier's engine. */
    public var waitSeconds: Double = 0.0; internal set
    public var engineSeconds: Double = 0.0; internal set

    /** Trees whose root could have been expanded ahead, whose root had been, and nodes expanded below such roots. */
    public var aheadRounds: Int = 0; internal set
    public var aheadHits: Int = 0; internal set
    public var aheadUsed: Int = 0; internal set

    /** Tokens written offline; of these, by the understudy, verified later, rolled back, or kept unverified. */
    public var provisional: Int = 0; internal set
    public var understudy: Int = 0; internal set
    public var kept: Int = 0; internal set
    public var rolledBack: Int = 0; internal set
    public var adopted: Int = 0; internal set
    public var stalls: Int = 0; internal set
    public var pauses: Int = 0; internal set
    public var opens: Int = 0; internal set

    /** Count a drafted tree. The first one of an answer could not be drafted ahead. */
    internal fun drafted(arm: Arm, draft: Draft) {
        if (rounds == 0 || arm == Arm.CHAIN) return
        aheadRounds++
        if (draft.ahead) aheadHits++
        aheadUsed += draft.kept
    }

    /** Count a verdict with [fresh] tokens. catchingUp: provisional text followed it. */
    internal fun settled(settled: Settled, fresh: Int, catchingUp: Boolean) {
        if (settled.arm == Arm.STREAM) {
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
            if (settled.arm == Arm.CHAIN) {
                chains++
                chained += fresh - 1
            }
            accepted += fresh - 1
            nodes += settled.tree.size
        }
    }
}
