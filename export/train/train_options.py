"""The options of `train`, with its presets, of `ngrams` and of `import`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from export.options import OptionsError, argument, build, check_bounds, option, target_option
from export.train.recipe import TrainSettings
from outrider_core.targets.source import TargetSource

#: tokens per step, and the learning rate that suits them; the large ones keep a GPU busy
SMALL, LARGE = (TrainSettings.batch_tokens, TrainSettings.learning_rate), (24576, 4e-3)
#: least number of large steps; with fewer a drafter learns too little from each token
LEAST_LARGE_STEPS = 1000


class Preset(NamedTuple):
    """takes: its cost and result. self_prompts: number of prompts for `--self-prompts` without a number."""

    takes: str
    self_prompts: int
    values: Mapping[str, Any]


#: starting points; given options win
PRESETS = {
    "quick": Preset(
        "1,000 short conversations, 2 epochs: minutes on two cores, 1 GB of disk. A test that everything "
        "works for a target; the drafter is poor",
        1000,
        {"max_prompts": 1000, "max_new_tokens": 96, "max_tokens": 384, "epochs": 2},
    ),
    "default": Preset(
        "every prompt of the files, 3 epochs, then two rounds on text that the drafter wrote itself: the shipped "
        "drafter was trained like this in 7 minutes on a GPU. With 6,000 conversations: hours on two cores, 13 GB "
        "of disk",
        6000,
        {"own_text": 5000, "on_policy": 2},
    ),
    "long": Preset(
        "longer answers, 8 epochs, and a last stage on text that the drafter wrote itself. With 40,000 conversations "
        "and the default target: days on two cores, 60 GB of disk unless --features online; meant for a GPU",
        40000,
        {"max_new_tokens": 320, "max_tokens": 1024, "epochs": 8, "own_text": 4000},
    ),
}
#: stands for the preset's number in the `self_prompts` of `TrainOptions.from_given`
PRESET_NUMBER = None


@dataclass(frozen=True)
class TrainOptions:
    """Everything that a training run depends on. Raises OptionsError if it cannot be carried out.

    Lengths are in tokens of the target, shares are 0..1.
    """

    output_dir: Path = argument(
        "drafter folder to write", positional=False, needed=False, metavar="DIR", group="common"
    )
    preset: str = option("default", "starting point for all other options", choices=tuple(PRESETS), group="common")
    prompts: tuple[Path, ...] = option(
        (), "JSONL with `prompt` or `turns`, or plain text with one prompt a line", "FILE", group="common"
    )
    self_prompts: int = option(
        0, "let the target write N prompts of its own (without N: the preset's number)", "N", 0, group="common"
    )
    target: TargetSource = target_option("alias, Hugging Face id or folder", group="common")

    answers: Path | None = option(
        None,
        "train on an answers file of an earlier run, or on a corpus of answers; no prompts are needed",
        "FILE",
        group="text",
    )
    max_prompts: int = option(
        0, "use at most this many prompts of the files, chosen by --seed; 0: all", "N", 0, group="text"
    )
    follow_ups: float = option(
        0.2,
        "share of one-turn conversations that get a second turn, written by the target",
        "SHARE",
        0,
        1,
        group="text",
    )
    sampled: float = option(
        0.25, "share of conversations answered at a temperature drawn evenly from 0 to 1", "SHARE", 0, 1, group="text"
    )
    max_prompt_tokens: int = option(512, "conversations with longer user turns are left out", "N", 1, group="text")
    max_new_tokens: int = option(192, "most tokens of an answer", "N", 1, group="text")
    max_tokens: int = option(768, "most tokens of a conversation", "N", 1, group="text")

    start_from: tuple[Path, ...] = option(
        (),
        "start from this drafter, with its shapes and draft vocabulary; given several, from the mean of their weights",
        "DIR",
        group="training",
    )
    epochs: int = option(
        TrainSettings.epochs,
        "passes over the text; 0: only --own-text, if given, and the final measurements",
        "N",
        0,
        group="training",
    )
    batch_tokens: int = option(
        0,
        f"tokens per step, padding included; 0: {LARGE[0]:,} on a GPU if these are {LEAST_LARGE_STEPS:,} or more, "
        f"else {SMALL[0]:,}",
        "N",
        0,
        group="training",
    )
    learning_rate: float = option(
        0.0,
        f"highest learning rate; 0: {LARGE[1]:g} if --batch-tokens 0 selects the large steps, else {SMALL[1]:g}",
        "RATE",
        0,
        group="training",
    )
    own_text: int = option(
        0, "a last stage that learns from N texts that the drafter continued itself", "N", 0, group="training"
    )
    on_policy: int = option(
        1,
        "rounds of that stage, each with N new texts, written by the drafter of the round before",
        "N",
        1,
        group="training",
    )
    layers: int = option(6, "target layers that the drafter's server half reads", "N", 1, group="training")
    draft_vocab: int = option(12288, "most frequent tokens, which the device can propose", "N", 1, group="training")
    max_context: int = option(2048, "longest conversation a device may hold", "N", 1, group="training")

    work_dir: Path = option(
        Path("build/train"), "answers, features and checkpoints of all runs", "DIR", group="advanced"
    )
    features: str = option(
        "auto",
        "the target's features of its text: kept in a file, or computed for every batch; auto: online on a GPU",
        choices=("auto", "cache", "online"),
        group="advanced",
    )
    writer: str = option(
        "auto",
        "engine that writes the answers: torch, or the target's 8-bit copy, which is several times as fast on a CPU; "
        "auto: the copy on a CPU if it exists already or 500 conversations are left",
        choices=("auto", "onnx", "torch"),
        group="advanced",
    )
    slots: int = option(128, "conversations answered at a time", "N", 1, group="advanced")
    device: str = option("auto", "cpu, cuda or auto", group="advanced")
    threads: int = option(0, "CPU threads; 0: torch's choice", "N", 0, group="advanced")
    seed: int = option(0, "of all random choices", "N", 0, group="advanced")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.answers and not self.answers.is_file():
            raise OptionsError(f"--answers: {self.answers} is not a file")
        for folder in self.start_from:
            if not (folder / "config.json").is_file():
                raise OptionsError(f"--start-from: {folder} is not a drafter folder; it has no config.json")
        if not (self.prompts or self.self_prompts or self.answers):
            raise OptionsError("there is nothing to train on; give --prompts, --self-prompts or --answers")
        if self.on_policy > 1 and not self.own_text:
            raise OptionsError("--on-policy is the rounds of --own-text; give both")
        if not self.epochs and not self.start_from:
            raise OptionsError("--epochs 0 needs a drafter to begin with; give --start-from")

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> TrainOptions:
        """Return options by name: those given, then the preset's, then the defaults."""
        if "output_dir" not in given:
            raise OptionsError("give --output-dir, the drafter folder to write")
        name = given.get("preset", "default")
        if name not in PRESETS:
            raise OptionsError(f"--preset {name!r} is unknown; give one of {', '.join(PRESETS)}")
        preset = PRESETS[name].values
        if given.get("epochs") == 0 or "own_text" in given:  # the last stage is as requested, or left out
            preset = {each: value for each, value in preset.items() if each not in ("own_text", "on_policy")}
        values = {**preset, **given}
        if values.get("self_prompts", 0) is PRESET_NUMBER:
            values["self_prompts"] = PRESETS[name].self_prompts
        return build(cls, values)

    def settings(self, tokens: int) -> TrainSettings:
        """Return budget and recipe of the main stage on text of `tokens` tokens."""
        large = self.torch_device() != "cpu" and tokens * self.epochs >= LEAST_LARGE_STEPS * LARGE[0]
        size, rate = LARGE if large else SMALL
        return TrainSettings(
            epochs=self.epochs,
            batch_tokens=self.batch_tokens or size,
            learning_rate=self.learning_rate or rate,
            seed=self.seed,
        )

    def torch_device(self) -> str:
        """Return the device's name, with `auto` resolved."""
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class NgramsOptions:
    """See `export ngrams --help`."""

    answers: tuple[Path, ...] = argument(
        "answers files of `train`, or a corpus (`python -m export.train.corpus`)", many=True
    )
    drafter: Path = argument("drafter folder of the same target", positional=False)


@dataclass(frozen=True)
class ImportOptions:
    """See `export import --help`."""

    source: str = argument("folder or Hugging Face id of the checkpoint", positional=False, parse=str)
    target: TargetSource = argument(
        "alias, Hugging Face id or folder it was trained on", positional=False, parse=str, open=TargetSource.resolve
    )
    output_dir: Path = argument("drafter folder to write", positional=False)
    max_context: int | None = option(None, "tokens; default: 2048 or the target's, if less", parse=int)
    draft_vocab_from: Path | None = option(
        None,
        "take the draft vocabulary of this drafter folder; default: the whole vocabulary, whose LM head is most of a "
        "step's work",
        "DRAFTER",
    )
