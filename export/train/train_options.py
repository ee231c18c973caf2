"""The options of a training run: typed, checked once, with presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from export.train.recipe import TrainSettings
from outrider_core.models.target import DEFAULT_TARGET

T = TypeVar("T")

#: tokens per step, and the learning rate that suits them; the large ones keep a GPU busy
SMALL, LARGE = (TrainSettings.batch_tokens, TrainSettings.learning_rate), (24576, 4e-3)
#: steps that large ones must come to; with fewer a drafter learns too little from each token
LEAST_LARGE_STEPS = 1000


class OptionsError(ValueError):
    """Options that cannot be used together, or a value out of range. The message is one line that says what to do."""


class Preset(NamedTuple):
    """takes: what it costs and brings. self_prompts: prompts that `--self-prompts` without a number stands for."""

    takes: str
    self_prompts: int
    values: Mapping[str, Any]


#: a starting point; options that are given win
PRESETS = {
    "quick": Preset(
        "1,000 short conversations, 2 epochs: minutes on two cores, 1 GB of disk. Shows that everything works for a "
        "target and writes a drafter that drafts badly",
        1000,
        {"max_prompts": 1000, "max_new_tokens": 96, "max_tokens": 384, "epochs": 2},
    ),
    "default": Preset(
        "every prompt of the files, 3 epochs, then two rounds on what the drafter wrote alone: so was the shipped one "
        "trained, in 7 minutes on a GPU. With 6,000 conversations: hours on two cores, 13 GB of disk",
        6000,
        {"own_text": 5000, "on_policy": 2},
    ),
    "long": Preset(
        "longer answers, 8 epochs, and a last stage on what the drafter wrote alone. With 40,000 conversations and the "
        "default target: days on two cores, 60 GB of disk unless --features online; meant for a GPU",
        40000,
        {"max_new_tokens": 320, "max_tokens": 1024, "epochs": 8, "own_text": 4000},
    ),
}
#: stands for the preset's number in what `TrainOptions.from_given` takes as `self_prompts`
PRESET_NUMBER = None


class OptionInfo(NamedTuple):
    """How an option is shown and checked. group: heading in the help; least, most: bounds of a number."""

    group: str
    text: str
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


def _option(default: T, *info: Any, **more: Any) -> T:
    value: Any = field(default=default, metadata={"info": OptionInfo(*info, **more)})
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TrainOptions:
    """Everything that a training run depends on. Raises OptionsError where it cannot be carried out.

    Lengths are in tokens of the target, shares are 0..1.
    """

    output_dir: Path
    preset: str = _option("default", "common", "starting point for all other options", choices=tuple(PRESETS))
    prompts: tuple[Path, ...] = _option(
        (), "common", "JSONL with `prompt` or `turns`, or plain text with one prompt a line", "FILE"
    )
    self_prompts: int = _option(
        0, "common", "let the target write N prompts of its own (without N: the preset's number)", "N", 0
    )
    target: str = _option(DEFAULT_TARGET, "common", "alias, Hugging Face id or folder")

    answers: Path | None = _option(  # noqa: RUF009 - a Path is immutable
        None,
        "text",
        "train on an answers file of an earlier run, or on a corpus of answers; no prompts are needed",
        "FILE",
    )
    max_prompts: int = _option(
        0, "text", "use at most this many prompts of the files, chosen by --seed; 0: all", "N", 0
    )
    composed: int = _option(0, "text", "add N tasks on longer texts, put together from --prompts", "N", 0)
    openings: Path | None = _option(  # noqa: RUF009 - a Path is immutable
        None, "text", "half of the target's own prompts begin with a line of this file; default: a list of ours", "FILE"
    )
    follow_ups: float = _option(
        0.2, "text", "share of one-turn conversations that get a second turn, written by the target", "SHARE", 0, 1
    )
    sampled: float = _option(
        0.25, "text", "share of conversations answered at a temperature drawn evenly from 0 to 1", "SHARE", 0, 1
    )
    max_prompt_tokens: int = _option(512, "text", "conversations with longer user turns are left out", "N", 1)
    max_new_tokens: int = _option(192, "text", "most tokens of an answer", "N", 1)
    max_tokens: int = _option(768, "text", "most tokens of a conversation", "N", 1)

    start_from: tuple[Path, ...] = _option(
        (),
        "training",
        "go on from this drafter, with its shapes and draft vocabulary; of several, from the mean of their weights",
        "DIR",
    )
    epochs: int = _option(
        TrainSettings.epochs,
        "training",
        "passes over the text; 0: only --own-text, if given, and what is measured at the end",
        "N",
        0,
    )
    batch_tokens: int = _option(
        0,
        "training",
        f"tokens per step, padding included; 0: {LARGE[0]:,} on a GPU if these are {LEAST_LARGE_STEPS:,} or more, "
        f"else {SMALL[0]:,}",
        "N",
        0,
    )
    learning_rate: float = _option(
        0.0,
        "training",
        f"at its highest; 0: {LARGE[1]:g} where --batch-tokens 0 takes the large steps, else {SMALL[1]:g}",
        "RATE",
        0,
    )
    own_text: int = _option(
        0, "training", "a last stage that learns from N texts which the drafter itself wrote on alone", "N", 0
    )
    on_policy: int = _option(
        1, "training", "rounds of that stage, each with N other texts, written by what the round before left", "N", 1
    )
    layers: int = _option(6, "training", "target layers that the drafter's server half reads", "N", 1)
    draft_vocab: int = _option(12288, "training", "most frequent tokens, which the device can propose", "N", 1)
    max_context: int = _option(2048, "training", "longest conversation a device may hold", "N", 1)

    work_dir: Path = _option(  # noqa: RUF009 - a Path is immutable
        Path("build/train"), "advanced", "answers, features and checkpoints of all runs", "DIR"
    )
    features: str = _option(
        "auto",
        "advanced",
        "what the target knows of its text: kept in a file, or computed for every batch; auto: online on a GPU",
        choices=("auto", "cache", "online"),
    )
    writer: str = _option(
        "auto",
        "advanced",
        "what writes the answers: torch, or the target's 8-bit copy, which a verifier on a CPU serves and which is "
        "several times as fast there; auto: the copy on a CPU where it is made already or 500 conversations are left",
        choices=("auto", "onnx", "torch"),
    )
    slots: int = _option(128, "advanced", "conversations answered at a time", "N", 1)
    device: str = _option("auto", "advanced", "cpu, cuda or auto")
    threads: int = _option(0, "advanced", "CPU threads; 0: torch's choice", "N", 0)
    seed: int = _option(0, "advanced", "of everything that is drawn", "N", 0)

    def __post_init__(self) -> None:
        for name, info in OPTIONS.items():
            value = getattr(self, name)
            if info.least is not None and value < info.least:
                raise OptionsError(f"{flag(name)} {value} is too small; give {info.least:g} or more")
            if info.most is not None and value > info.most:
                raise OptionsError(f"{flag(name)} {value} is too large; give {info.most:g} or less")
            if info.choices and value not in info.choices:
                raise OptionsError(f"{flag(name)} {value!r} is unknown; give one of {', '.join(info.choices)}")
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
        """Options by name: those given, then the preset's, then the defaults."""
        if "output_dir" not in given:
            raise OptionsError("give --output-dir, the drafter folder to write")
        name = given.get("preset", "default")
        if name not in PRESETS:
            raise OptionsError(f"--preset {name!r} is unknown; give one of {', '.join(PRESETS)}")
        preset = PRESETS[name].values
        if given.get("epochs") == 0 or "own_text" in given:  # the last stage is as it is asked for, or not at all
            preset = {option: value for option, value in preset.items() if option not in ("own_text", "on_policy")}
        values = {**preset, **given}
        if values.get("self_prompts", 0) is PRESET_NUMBER:
            values["self_prompts"] = PRESETS[name].self_prompts
        return cls(**values)

    def settings(self, tokens: int) -> TrainSettings:
        """Budget and recipe of the main stage on text of so many tokens."""
        large = self.torch_device() != "cpu" and tokens * self.epochs >= LEAST_LARGE_STEPS * LARGE[0]
        size, rate = LARGE if large else SMALL
        return TrainSettings(
            epochs=self.epochs,
            batch_tokens=self.batch_tokens or size,
            learning_rate=self.learning_rate or rate,
            seed=self.seed,
        )

    def torch_device(self) -> str:
        """The device's name, `auto` resolved."""
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


#: how every option but the output folder is shown and checked, in the order of the help
OPTIONS: dict[str, OptionInfo] = {f.name: f.metadata["info"] for f in fields(TrainOptions) if "info" in f.metadata}
#: what every option is where neither the command, a file nor the preset says
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(TrainOptions) if f.name in OPTIONS}


def flag(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")
