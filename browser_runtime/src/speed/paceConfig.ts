/** The constants behind every choice of `Pace` and `Controller`; the Python runtime has the same. */
export const PACE = {
  /** Weight of the newest round in a smoothed measurement. */
  smoothing: 0.2,
  /** Weight of the newest token of a stream: one token says less than a round. */
  tokenSmoothing: 0.1,
  /** Weight of a tree drafted beside a stream: it stands for all the rounds since the last one. */
  comparisonSmoothing: 0.4,
  /** Weight in what trees usually bring, of a round and of a tree drafted beside a stream, once there were many. */
  usualSmoothing: 0.02,
  usualComparisonSmoothing: 0.2,
  /** Weight of a streamed token in what streams usually take, once there were many. */
  usualTokenSmoothing: 0.01,
  /** A stream's rate is an answer's own from this share of tokens on that share a step with the one before. */
  uneven: 0.05,
  /**
   * Share of the trees' usual rate from which on an answer begins as such a stream: beside a stream the device learns what
   * trees would bring; beside trees it learns nothing of a stream.
   */
  worthBeginning: 0.75,
  /** Weight of an answer in their usual length. */
  lengthSmoothing: 0.2,
  /** What an older measurement of the reading before a first tree still counts after one more answer. */
  readingFading: 0.97,
  /** Observations that each depth's calibration starts with, all of them "as predicted". */
  prior: 4,
  /** What an older observation still counts after one more tree. */
  fading: 0.99,
  /** Levels of a tree that are calibrated separately; deeper ones count as the last. */
  depths: 12,
  /** A node is taken to be accepted at most this many times as often as the drafter predicted. */
  mostCorrection: 4,
  /** The other mode must promise this many times the tokens per second. */
  margin: 1.05,
  /** Consecutive rounds in which it must, before trees are left for a stream. */
  roundsToLeaveTrees: 2,
  /** Consecutive tokens for which it must, before a stream is left: a delayed token is followed by a burst. */
  tokensToLeaveStream: 8,
  /** Tokens of a trial stream. */
  trialTokens: 8,
  /** No trial where a stream's predicted rate is below this share of the trees' rate. */
  worthATrial: 0.5,
  /** Share of the time that trials may cost at first; it is halved after each trial, this many times at most. */
  trialShare: 0.03,
  trialHalvings: 5,
  /** Bounds, in accepted tokens, of what another drafting step must promise. */
  leastGain: 0.01,
  mostGain: 0.6,
  /** Size of a tree, before the first was drafted. */
  firstNodes: 16,
  /** Nodes drafted per node that was worth sending in earlier trees, and nodes that are drafted in any case. */
  spare: 2,
  leastNodes: 16,
  /**
   * Tokens of a stream between two trees drafted beside it, where trees promise its rate or more. It grows with the
   * cube of what the stream is ahead, up to the second number, where trees promise half.
   */
  compareEvery: 8,
  compareRarely: 64,
  /**
   * Share of a stream's time that drafting these trees may take; of an answer's first tokens, what it loses. It falls with
   * the same cube, as long as there are not so many tokens between them.
   */
  comparisonShare: 0.02,
  compareSeldom: 1024,
  earlyTokens: 32,
  /** Drafting ahead costs energy and hides a third of the drafting at most: not below this share of a round. */
  aheadShare: 0.2,
  /** No duration is taken to be shorter than this many seconds, so that rates stay finite. */
  leastSeconds: 1e-4,
} as const;
