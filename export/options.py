"""A command's options, declared once: a dataclass whose fields define its flags, their help and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from outrider_core.targets.source import DEFAULT_TARGET, TargetSource

T = TypeVar("T")


class OptionsError(ValueError):
    """Options that cannot be combined, or a value out of range. The message is one line that says what to do."""


@dataclass(frozen=True)
class OptionInfo:
    """Describes an option in the help, and checks it.

    text: of the help. group: heading in the help. least, most: bounds of a number. default: as shown in the help.
    positional: an argument without a flag. needed: must be given. many: one value or more. parse: reads one value.
    open: turns the given value into the field's value, after the whole command line was found valid.
    """

    text: str
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] = ()
    group: str = ""
    default: Any = None
    positional: bool = False
    needed: bool = False
    many: bool = False
    parse: Callable[[str], Any] = Path
    open: Callable[[str], Any] | None = None


def option(default: T, text: str, *bounds: Any, **more: Any) -> T:
    """Declare an option with a default, which also selects its parser; `bounds` and `more` are of `OptionInfo`.

    A tuple holds several paths, None a path unless `parse` says otherwise.
    """
    kind: type = Path if default is None or isinstance(default, tuple) else type(default)
    given = {"default": default, "parse": kind, "many": isinstance(default, tuple), **more}
    value: Any = field(default=default, metadata={"info": OptionInfo(text, *bounds, **given)})
    return value  # type: ignore[no-any-return]


def argument(text: str, **more: Any) -> Any:
    """Declare a positional argument, or with `positional=False` a flag that must be given."""
    return field(metadata={"info": OptionInfo(text, **{"positional": True, "needed": True, **more})})


def target_option(text: str, **more: Any) -> TargetSource:
    """Declare the option that names a target, which is resolved once, when the options are read."""
    info = OptionInfo(text, **{"default": DEFAULT_TARGET, "parse": str, "open": TargetSource.resolve, **more})
    value: Any = field(default_factory=TargetSource.resolve, metadata={"info": info})
    return value  # type: ignore[no-any-return]


def commas(text: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def flag(name: str) -> str:
    """Return the command-line flag of an option."""
    return "--" + name.replace("_", "-")


def infos(options: Any) -> dict[str, OptionInfo]:
    """Return the description and checks of every option of a dataclass, in the order of the help."""
    declared: tuple[Field[Any], ...] = fields(options)
    return {each.name: each.metadata["info"] for each in declared if "info" in each.metadata}


def add_options(parser: argparse.ArgumentParser, options: Any) -> None:
    """Add the options of a dataclass to a parser. Options not given stay out of the namespace."""
    for name, info in infos(options).items():
        add_option(parser, name, info, describe_option(info))


def add_option(parser: Any, name: str, info: OptionInfo, text: str, **more: Any) -> None:
    """Add one option to a parser or a group of it. more: for argparse."""
    if isinstance(info.default, bool):
        action, shown = ("store_false", f"no-{name}") if info.default else ("store_true", name)
        parser.add_argument(flag(shown), dest=name, action=action, default=argparse.SUPPRESS, help=text)
        return
    how: dict[str, Any] = {"type": info.parse, "help": text}
    how |= {"choices": info.choices} if info.choices else {}
    how |= {"metavar": info.metavar} if info.metavar else {}
    how |= {"nargs": "+"} if info.many else {}
    if info.positional:
        parser.add_argument(name, **how, **more)
    else:
        parser.add_argument(flag(name), required=info.needed, default=argparse.SUPPRESS, **how, **more)


def describe_option(info: OptionInfo) -> str:
    """Return an option's text with its default, unless that adds nothing."""
    silent = info.default is None or info.default == () or isinstance(info.default, bool) or "default: " in info.text
    default = ",".join(map(str, info.default)) if isinstance(info.default, tuple | list) else info.default
    return info.text if silent else f"{info.text} (default: {default})"


def read_options(options: type[T], arguments: argparse.Namespace) -> T:
    """Make the dataclass of a parsed command line. Raises OptionsError, and TargetError for a target."""
    return build(options, {name: value for name, value in vars(arguments).items() if name in infos(options)})


def build(options: type[T], given: Mapping[str, Any]) -> T:
    """Make the dataclass from values by name, as flags read them. Raises as `read_options` does."""
    known, values = infos(options), dict[str, Any]()
    for name, value in given.items():
        opened = known[name].open if name in known else None
        value = opened(value) if opened else value
        values[name] = tuple(value) if isinstance(value, list) else value
    return options(**values)


def check_bounds(options: Any) -> None:
    """Raise OptionsError if a value is out of its bounds or not one of its choices."""
    for name, info in infos(options).items():
        value = getattr(options, name)
        if info.least is not None and value < info.least:
            raise OptionsError(f"{flag(name)} {value} is too small; give {info.least:g} or more")
        if info.most is not None and value > info.most:
            raise OptionsError(f"{flag(name)} {value} is too large; give {info.most:g} or less")
        if info.choices and value not in (None, *info.choices):
            raise OptionsError(f"{flag(name)} {value!r} is unknown; give one of {', '.join(map(str, info.choices))}")
