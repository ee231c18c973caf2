"""The command line of training: `python -m export train`, and the baselines' `python -m lab.train`."""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from export.train.train_options import DEFAULTS, OPTIONS, PRESET_NUMBER, PRESETS, OptionsError, TrainOptions, flag
from outrider_core.models.target import DEFAULT_TARGET

GROUPS = {
    "common": "",
    "text": "what the target is asked, and how long it answers",
    "training": "how the drafter is shaped and taught",
    "advanced": "where and how the work is done",
}


def describe_presets() -> str:
    """A paragraph on each preset, for the end of a help text."""
    paragraphs = [f"  --preset {name}: {preset.takes}." for name, preset in PRESETS.items()]
    return "presets:\n" + "\n".join(textwrap.fill(text, 100, subsequent_indent="      ") for text in paragraphs)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of a training run. What is not given stays out of the namespace, so that a preset may decide."""
    for group, text in GROUPS.items():
        section = parser.add_argument_group(f"{group} options", text or None)
        if group == "common":
            section.add_argument(
                "--output-dir", type=Path, default=argparse.SUPPRESS, metavar="DIR", help="drafter folder to write"
            )
            section.add_argument(
                "--config", type=Path, metavar="FILE", help="TOML file with any of these options; flags win"
            )
        for name, info in OPTIONS.items():
            if info.group == group:
                section.add_argument(flag(name), default=argparse.SUPPRESS, help=_help(name), **_argument(name))


def _argument(name: str) -> dict[str, Any]:
    """Type, number of values and choices of one option, as argparse wants them."""
    default, info = DEFAULTS[name], OPTIONS[name]
    how: dict[str, Any] = {"type": _type(name)}
    if info.choices:
        return how | {"choices": info.choices}
    how |= {"metavar": info.metavar} if info.metavar else {}
    if isinstance(default, tuple):
        how |= {"nargs": "+"}
    if name == "self_prompts":
        how |= {"nargs": "?", "const": PRESET_NUMBER}
    return how


def _type(name: str) -> type:
    default = DEFAULTS[name]
    return Path if default is None or isinstance(default, tuple) else type(default)


def _help(name: str) -> str:
    default, text = DEFAULTS[name], OPTIONS[name].text
    shown = [] if default in (None, ()) or "0: " in text else [f"default: {default}"]
    shown += [f"{preset}: {values[name]}" for preset, (_, _, values) in PRESETS.items() if name in values]
    return f"{text} ({', '.join(shown)})" if shown else text


def read_train_options(arguments: argparse.Namespace) -> TrainOptions:
    """The options of a parsed command line: flags, then the --config file, then the preset, then the defaults.

    Raises OptionsError.
    """
    given = {name: value for name, value in vars(arguments).items() if name in OPTIONS or name == "output_dir"}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return TrainOptions.from_given({**(read_config(arguments.config) if arguments.config else {}), **given})


def read_config(path: Path) -> dict[str, Any]:
    """Options from a TOML file, `max-tokens = 512` or `max_tokens = 512`. Raises OptionsError where it is unusable."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} is not a TOML file: {error}") from None
    return {key.replace("-", "_"): _converted(path, key, value) for key, value in values.items()}


def _converted(path: Path, key: str, value: Any) -> Any:
    name = key.replace("-", "_")
    if name != "output_dir" and name not in OPTIONS:
        raise OptionsError(f"{path}: there is no option {key!r}; `--help` lists them")
    wanted: type = Path if name == "output_dir" else _type(name)
    several = isinstance(DEFAULTS.get(name), tuple)
    parts = value if several and isinstance(value, list) else [value]
    read_as = {Path: (str,), float: (int, float)}.get(wanted, (wanted,))
    if name == "self_prompts" and value is True:
        return PRESET_NUMBER
    if any(not isinstance(part, read_as) or isinstance(part, bool) for part in parts):
        types = " or ".join(kind.__name__ for kind in read_as)
        raise OptionsError(f"{path}: {key} = {value!r} has the wrong type; give {types}")
    converted = tuple(wanted(part) for part in parts)
    return converted if several else converted[0]


def next_command(options: TrainOptions) -> str:
    """What to run on a drafter that has been trained."""
    target = "" if options.target == DEFAULT_TARGET else f" --target {options.target}"
    return f"python -m export bundle --drafter {options.output_dir} --output-dir build/bundle{target}"
