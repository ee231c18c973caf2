"""The command line of training: `python -m export train`, and the baselines' `python -m lab.train`."""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from export.options import OptionInfo, OptionsError, add_option, infos
from export.train.train_options import PRESET_NUMBER, PRESETS, TrainOptions
from outrider_core.targets.source import DEFAULT_TARGET

OPTIONS = infos(TrainOptions)
GROUPS = {
    "common": "",
    "text": "prompts for the target, and the length of its answers",
    "training": "shape and training of the drafter",
    "advanced": "where and how the work is done",
}


def describe_presets() -> str:
    """Return a paragraph on each preset, for the end of a help text."""
    paragraphs = [f"  --preset {name}: {preset.takes}." for name, preset in PRESETS.items()]
    return "presets:\n" + "\n".join(textwrap.fill(text, 100, subsequent_indent="      ") for text in paragraphs)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of a training run. Options not given stay out of the namespace, so that a preset may decide."""
    for group, text in GROUPS.items():
        section = parser.add_argument_group(f"{group} options", text or None)
        if group == "common":
            section.add_argument(
                "--config", type=Path, metavar="FILE", help="TOML file with any of these options; flags win"
            )
        for name, info in OPTIONS.items():
            if info.group == group:
                alone = {"nargs": "?", "const": PRESET_NUMBER} if name == "self_prompts" else {}
                add_option(section, name, info, _help(name, info), **alone)


def _help(name: str, info: OptionInfo) -> str:
    default, text = info.default, info.text
    shown = [] if default in (None, ()) or "0: " in text else [f"default: {default}"]
    shown += [f"{preset}: {values[name]}" for preset, (_, _, values) in PRESETS.items() if name in values]
    return f"{text} ({', '.join(shown)})" if shown else text


def read_train_options(arguments: argparse.Namespace) -> TrainOptions:
    """Read a parsed command line: flags, then the --config file, then the preset, then the defaults.

    Raises OptionsError, and TargetError for the target.
    """
    given = {name: value for name, value in vars(arguments).items() if name in OPTIONS}
    return TrainOptions.from_given({**(read_config(arguments.config) if arguments.config else {}), **given})


def read_config(path: Path) -> dict[str, Any]:
    """Read options from a TOML file, `max-tokens = 512` or `max_tokens = 512`.

    Raises OptionsError if it is unusable.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} is not a TOML file: {error}") from None
    return {key.replace("-", "_"): _converted(path, key, value) for key, value in values.items()}


def _converted(path: Path, key: str, value: Any) -> Any:
    name = key.replace("-", "_")
    if name not in OPTIONS:
        raise OptionsError(f"{path}: there is no option {key!r}; `--help` lists them")
    info = OPTIONS[name]
    parts = value if info.many and isinstance(value, list) else [value]
    read_as = {Path: (str,), float: (int, float)}.get(info.parse, (info.parse,))  # type: ignore[call-overload]
    if name == "self_prompts" and value is True:
        return PRESET_NUMBER
    if any(not isinstance(part, read_as) or isinstance(part, bool) for part in parts):
        types = " or ".join(kind.__name__ for kind in read_as)
        raise OptionsError(f"{path}: {key} = {value!r} has the wrong type; give {types}")
    converted = tuple(map(info.parse, parts))
    return converted if info.many else converted[0]


def next_command(options: TrainOptions) -> str:
    """Return the next command to run on a trained drafter."""
    name = options.target.name
    target = "" if name == DEFAULT_TARGET else f" --target {name}"
    return f"python -m export bundle --drafter {options.output_dir} --output-dir build/bundle{target}"
