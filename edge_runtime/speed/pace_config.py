"""The constants behind every choice of tree, stream and size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaceConfig:
    """The constants behind every choice of `Pace` and `Controller`, tuned with `benchmarks.network`.

    Those of what is usual were tuned on recorded answers of a single device (lab/notebook.md).
    """

    #: weight of the newest round in a smoothed measurement
    smoothing: float = 0.2
    #: weight of the newest token of a stream: one token says less than a round
    token_smoothing: float = 0.1
    #: weight of a tree drafted beside a stream: it stands for all the rounds since the last one
    comparison_smoothing: float = 0.4
    #: weight in what trees usually bring, of a round and of a tree drafted beside a stream, once there were many: how
    #: well text can be foreseen differs more between answers than within one
    usual_smoothing: float = 0.02
    usual_comparison_smoothing: float = 0.2
    #: weight of a streamed token in what streams usually take, once there were many
    usual_token_smoothing: float = 0.01
    #: a stream's rate is taken to be an answer's own from this share of tokens on that share a step with the one before
    uneven: float = 0.05
    #: share of the trees' usual rate from which on an answer begins as such a stream: beside a stream the device learns
    #: what trees would bring; beside trees it learns nothing of a stream
    worth_beginning: float = 0.75
    #: weight of an answer in their usual length
    length_smoothing: float = 0.2
    #: what an older measurement of the reading before a first tree still counts after one more answer: without trees
    #: there is no newer one
    reading_fading: float = 0.97
    #: observations that each depth's calibration starts with, all of them "as predicted"
    prior: float = 4.0
    #: what an older observation still counts after one more tree
    fading: float = 0.99
    #: levels of a tree that are calibrated separately; deeper ones count as the last
    depths: int = 12
    #: a node is taken to be accepted at most this many times as often as the drafter predicted
    most_correction: float = 4.0
    #: the other mode must promise this many times the tokens per second ...
    margin: float = 1.05
    #: ... in this many consecutive rounds before trees are left for a stream
    rounds_to_leave_trees: int = 2
    #: ... for this many consecutive tokens before a stream is left: a delayed token is followed by a burst
    tokens_to_leave_stream: int = 8
    #: tokens of a trial stream
    trial_tokens: int = 8
    #: no trial where a stream's predicted rate is below this share of the trees' rate
    worth_a_trial: float = 0.5
    #: share of the time that trials may cost at first; it is halved after each trial ...
    trial_share: float = 0.03
    #: ... at most this many times
    trial_halvings: int = 5
    #: bounds, in accepted tokens, of what another drafting step must promise
    least_gain: float = 0.01
    most_gain: float = 0.6
    #: size of a tree, before the first was drafted
    first_nodes: float = 16.0
    #: nodes drafted per node that was worth sending in earlier trees
    spare: int = 2
    #: nodes that are drafted in any case
    least_nodes: int = 16
    #: tokens of a stream between two trees drafted beside it, where trees promise the stream's rate or more; it grows
    #: with the cube of what the stream is ahead ...
    compare_every: int = 8
    #: ... up to so many tokens, where trees promise half of the stream's rate
    compare_rarely: int = 64
    #: share of a stream's time that drafting these trees may take; it falls with the same cube, as long as there are
    #: fewer tokens than these between them
    comparison_share: float = 0.02
    compare_seldom: int = 1024
    #: an answer's first streamed tokens, of whose time only what the stream loses counts: what is known is about others
    early_tokens: int = 32
    #: drafting ahead costs energy and hides a third of the drafting at most: not below this share of a round
    ahead_share: float = 0.2
    #: no duration is taken to be shorter than this many seconds, so that rates stay finite
    least_seconds: float = 1e-4
