"""The report of a target bundle: its size, and how close it is to the model that it was made from."""

from __future__ import annotations

from typing import Any

from export.target.target_plan import FORMATS


def describe(report: dict[str, Any]) -> list[str]:
    """Return a few lines for a terminal."""
    steps = ", ".join(f"{width}: {time}" for width, time in report["step_milliseconds"].items())
    lines = [
        f"{report['bytes'] / 1e6:.0f} MB on disk, {report['resident_megabytes']} MB in memory with "
        f"{report['resident_tokens']} tokens",
        f"milliseconds of a step by tokens: {steps}",
    ]
    if quality := report["quality"]:
        lines.append(f"top-1 agreement with float32 {quality['top1_agreement']:.3f}, KL {quality['kl_divergence']:.4f}")
    return lines


def markdown(report: dict[str, Any]) -> str:
    """Return report.md from report.json's content."""
    lines = ["# Target bundle report", "", f"{report['target']}: {FORMATS[report['bits']]}."]
    lines += [f"Measured on {report['machine']}.", "", "| file | MB |", "|---|---|"]
    lines += [f"| {name} | {size / 1e6:.2f} |" for name, size in report["files"].items()]
    lines += ["", "## Cost", "", "| tokens of a step | ms, median |", "|---|---|"]
    lines += [f"| {width} | {time} |" for width, time in report["step_milliseconds"].items()]
    lines += [
        "",
        f"Steps of one session after {report['step_past_tokens']} tokens, a tree below the last one. Loaded in "
        f"{report['load_seconds']} s; {report['resident_megabytes']} MB resident with {report['resident_tokens']} "
        "tokens.",
    ]
    lines += ["", "## Quality", "", *_quality(report)]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, "", f"Written with {versions}."]) + "\n"


def _quality(report: dict[str, Any]) -> list[str]:
    quality = report["quality"]
    if quality is None:
        return ["It was not compared." if report["bits"] < 32 else "Other formats are compared with this one."]
    return [
        f"Against the model in float32, on {quality['answer_tokens']} tokens that this copy writes, greedily, to "
        f"{quality['prompts']} prompts:",
        "",
        "| figure | value |",
        "|---|---|",
        f"| top-1 agreement | {quality['top1_agreement']} |",
        f"| KL divergence, nats a token | {quality['kl_divergence']} |",
    ]
