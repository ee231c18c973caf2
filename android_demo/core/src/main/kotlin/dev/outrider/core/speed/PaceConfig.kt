package dev.outrider.core.speed

/** The constants behind every choice of [Pace] and [Controller]; the Python runtime has the same. */
internal class PaceConfig(
    /** Weight of the newest round in a smoothed measurement. */
    val smoothing: Double = 0.2,
    /** Weight of the newest token of a stream: one token says less than a round. */
    val tokenSmoothing: Double = 0.1,
    /** Weight of a tree drafted beside a stream: it stands for all the rounds since the last one. */
    val comparisonSmoothing: Double = 0.4,
    /** Weight in what trees usually bring, of a round and of a tree drafted beside a stream, once there were many. */
    val usualSmoothing: Double = 0.02,
    val usualComparisonSmoothing: Double = 0.2,
    /** Weight of a streamed token in what streams usually take, once there were many. */
    val usualTokenSmoothing: Double = 0.01,
    /** A stream's rate is an answer's own from this share of tokens on that share a step with the one before. */
    val uneven: Double = 0.05,
    /**
     * Share of the trees' usual rate from which on an answer begins as such a stream: beside a stream the device learns
     * what trees would bring; beside trees it learns nothing of a stream.
     */
    val worthBeginning: Double = 0.75,
    /** Weight of an answer in their usual length. */
    val lengthSmoothing: Double = 0.2,
    /** What an older measurement of the reading before a first tree still counts after one more answer. */
    val readingFading: Double = 0.97,
    /** Observations that each depth's calibration starts with, all of them "as predicted". */
    val prior: Double = 4.0,
    /** What an older observation still counts after one more tree. */
    val fading: Double = 0.99,
    /** Levels of a tree that are calibrated separately; deeper ones count as the last. */
    val depths: Int = 12,
    /** A node is taken to be accepted at most this many times as often as the drafter predicted. */
    val mostCorrection: Double = 4.0,
    /** The other mode must promise this many times the tokens per second. */
    val margin: Double = 1.05,
    /** Consecutive rounds in which it must, before trees are left for a stream. */
    val roundsToLeaveTrees: Int = 2,
    /** Consecutive tokens for which it must, before a stream is left: a delayed token is followed by a burst. */
    val tokensToLeaveStream: Int = 8,
    /** Tokens of a trial stream. */
    val trialTokens: Int = 8,
    /** No trial where a stream's predicted rate is below this share of the trees' rate. */
    val worthATrial: Double = 0.5,
    /** Share of the time that trials may cost at first; it is halved after each trial, this many times at most. */
    val trialShare: Double = 0.03,
    val trialHalvings: Int = 5,
    /** Bounds, in accepted tokens, of what another drafting step must promise. */
    val leastGain: Double = 0.01,
    val mostGain: Double = 0.6,
    /** Size of a tree, before the first was drafted. */
    val firstNodes: Double = 16.0,
    /** Nodes drafted per node that was worth sending in earlier trees, and nodes that are drafted in any case. */
    val spare: Int = 2,
    val leastNodes: Int = 16,
    /** Tokens of a stream between trees drafted beside it: where they promise its rate, and where they promise half. */
    val compareEvery: Int = 8,
    val compareRarely: Int = 64,
    /**
     * Share of a stream's time that drafting these trees may take; of its first tokens, what the stream loses. It falls
     * with the same cube, as long as there are not so many tokens between them.
     */
    val comparisonShare: Double = 0.02,
    val compareSeldom: Int = 1024,
    val earlyTokens: Int = 32,
    /** Drafting ahead costs energy and hides a third of the drafting at most: not below this share of a round. */
    val aheadShare: Double = 0.2,
    /** No duration is taken to be shorter than this many seconds, so that rates stay finite. */
    val leastSeconds: Double = 1e-4,
)
