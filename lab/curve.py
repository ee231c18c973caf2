"""Draw a drafter's learning curve from its config.json.

    python -m lab.curve drafters/smollm2-135m-instruct-moa --output docs/training.svg

An SVG: over the steps of all stages the share of learnt positions where the drafter's first choice was the target's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 52, 16, 34, 40
#: of one point: step, loss, agreement
Point = Sequence[float]


def as_svg(title: str, stages: Sequence[Sequence[Point]]) -> str:
    """Draw consecutive stages, each [(step, loss, agreement), ...], as SVG. Raises ValueError."""
    if not stages or not all(stages):
        raise ValueError("there is no curve; it was trained before `export train` kept one")
    ends = [stage[-1][0] for stage in stages]
    total, wide, high = sum(ends), WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(step: float, agreement: float) -> str:
        return f"{LEFT + wide * step / total:.1f},{TOP + high * (1 - agreement):.1f}"

    parts = [f'<text x="{LEFT}" y="20" font-weight="600">{escape(title)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + high * (1 - share)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#8884" fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    begun = 0.0
    for number, (stage, end) in enumerate(zip(stages, ends, strict=True)):
        points = " ".join(at(begun + step, agreement) for step, _, agreement in stage)
        parts.append(f'<polyline points="{points}" fill="none" stroke="#2a78d0" stroke-width="2"/>')
        if number:
            x = LEFT + wide * begun / total
            parts.append(f'<path d="M{x:.1f} {TOP}V{TOP + high}" stroke="#888" stroke-dasharray="3 3" fill="none"/>')
        begun += end
    label = f"steps; dashed: a round on what it wrote alone begins; at the end {stages[-1][-1][2]:.1%}"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 10}">{label}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 24}" text-anchor="end">{total:,.0f}</text>')
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="system-ui, sans-serif" font-size="12" fill="#888"'
    return f"<svg {frame}><g {font}>\n" + "\n".join(parts) + "\n</g></svg>\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.curve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", type=Path, help="drafter folder of `python -m export train`")
    parser.add_argument("--output", type=Path, required=True, help="SVG file to write")
    options = parser.parse_args(argv)
    try:
        notes = json.loads((options.drafter / "config.json").read_text(encoding="utf-8"))["notes"]
        title = "The drafter's first choice is the target's, in training"
        options.output.write_text(as_svg(title, notes.get("curves", [])), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
