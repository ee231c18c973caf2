"""The bundle's report: report.json, and the same as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from outrider_core.drafting.bundle import BundleError

REPORTS = ("report.json", "report.md")


def put_section(folder: Path, key: str, figures: dict[str, Any], section: str) -> None:
    """Put `figures` into report.json (`key`) and `section`, which begins with its "## ..." line, into report.md.

    An older section of that heading is replaced, everything else stays. Both files are complete before either gets its
    name. Raises BundleError with one clear line if the report cannot be read or written.
    """
    paths = [folder / name for name in REPORTS]
    report = read_report(folder)
    text = paths[1].read_text(encoding="utf-8") if paths[1].is_file() else "# Bundle report\n"
    contents = [json.dumps({**report, key: figures}, indent=2) + "\n", replace_section(text, section)]
    aside = [path.with_name(f".{path.name}.new") for path in paths]
    try:
        for path, content in zip(aside, contents, strict=True):
            path.write_text(content, encoding="utf-8")
        for path, final in zip(aside, paths, strict=True):
            path.replace(final)
    except OSError as error:
        raise BundleError(f"the report in {folder} cannot be written: {error.strerror}; make it writable") from None
    finally:
        for path in aside:
            path.unlink(missing_ok=True)


def replace_section(text: str, section: str) -> str:
    """Return `text` with the section of the same heading replaced by `section`, or with `section` at its end."""
    lines = text.splitlines()
    heading = section.splitlines()[0]
    start = next((i for i, line in enumerate(lines) if line.strip() == heading), len(lines))
    ends = (i for i in range(start + 1, len(lines)) if lines[i].startswith(("# ", "## ")))
    end = next(ends, len(lines))
    parts = ["\n".join(lines[:start]), section, "\n".join(lines[end:])]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def read_report(folder: Path) -> dict[str, Any]:
    """Read report.json of a bundle; {} if there is none. Raises BundleError with one clear line if it is broken."""
    path = folder / REPORTS[0]
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BundleError(f"{path} is broken: {error}; delete it, or export the bundle again") from None


def markdown(report: dict[str, Any]) -> str:
    """Return report.md from report.json's content, as `export bundle` writes it."""
    lines = ["# Bundle report", "", f"Target {report['target']}. Measured on {report['machine']}.", ""]
    lines += ["| file | MB |", "|---|---|"]
    lines += [f"| {name} | {size / 1e6:.2f} |" for name, size in report["files"].items()]
    for name, engine in report["engines"].items():
        lines += ["", f"## {name}: {engine['quant']} linears, {engine['embedding_bits']}-bit embedding and LM head", ""]
        lines += _parity(report, engine) if "parity" in engine else []
        lines += _lowering(engine["lowering"])
    lines += _acceptance(report.get("acceptance"))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, "", f"Written with {versions}."]) + "\n"


def _parity(report: dict[str, Any], engine: dict[str, Any]) -> list[str]:
    columns = {"engine": engine["parity"]}
    if levels := engine.get("accuracy_levels"):
        columns = {f"accuracy_level {level}": figures for level, figures in levels.items()}
    lines = [f"Against the eager model, drafting along {report['compared_on']}:", ""]
    lines += ["| figure | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for figure in engine["parity"]:
        values = " | ".join(str(column[figure]) for column in columns.values())
        lines.append(f"| {figure.replace('_', ' ')} | {values} |")
    if levels:
        lines += ["", f"Shipped with accuracy_level {engine['accuracy_level']} (4: int8 activations, 1: float32)."]
    return lines


def _lowering(lowering: dict[str, Any]) -> list[str]:
    if "delegated" not in lowering:
        operators = ", ".join(f"{name} {count}" for name, count in lowering["operators"].items())
        return ["", f"Opset {lowering['opset']}; operators: {operators}."]
    lines = ["", f"{lowering['delegated']} operators delegated in {lowering['subgraphs']} subgraphs, "
             f"{lowering['not_delegated']} not.", "", "| operator | delegated | not |", "|---|---|---|"]  # fmt: skip
    return lines + [f"| {name} | {yes} | {no} |" for name, (yes, no) in lowering["operators"].items()]


def _acceptance(figures: dict[str, Any] | None) -> list[str]:
    if figures is None:
        return []
    eager = figures["eager"]
    lines = ["", "## Acceptance length", ""]
    lines.append(
        f"{figures['prompts']} prompts, {figures['max_new_tokens']} tokens each, greedy, no prompt lookup, through a "
        "real verifier."
    )
    lines += ["", "| drafter | tau | over eager | rounds |", "|---|---|---|---|"]
    lines.append(f"| eager fp32 | {eager['tau']} | 1 | {eager['rounds']} |")
    return lines + [
        f"| {name} | {row['tau']} | {row['ratio']} | {row['rounds']} |" for name, row in figures["engines"].items()
    ]


def check_markdown(figures: dict[str, Any]) -> str:
    """Return the section of `export check`."""
    lines = ["## Check", "", f"Against the eager model, on {figures['compared_on']}:", ""]
    names = list(figures["engines"])
    lines += ["| figure | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for figure in next(iter(figures["engines"].values()))["parity"]:
        values = " | ".join(str(figures["engines"][name]["parity"][figure]) for name in names)
        lines.append(f"| {figure.replace('_', ' ')} | {values} |")
    return "\n".join([*lines, *(line.replace("## ", "### ") for line in _acceptance(figures.get("acceptance")))])
