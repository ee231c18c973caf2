"""Write docs/measurements.md, and the figures in README.md, from benchmarks/results/*.json.

    python -m benchmarks.acceptance --prompts specbench_dev.jsonl --json benchmarks/results/acceptance.json
    python -m benchmarks.measurements                write both files anew
    python -m benchmarks.measurements --check        say what is stale, write nothing; exit status 1 if anything is

No figure is typed by hand: each comes from a results file, which names its command, machine, day and commit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "measurements.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: written by python -m benchmarks.measurements -->", "<!-- end of figures -->"
#: what every results file says of its run
RUN_FIELDS = ("command", "machine", "date", "commit")
INTRODUCTION = """\
# Measurements

Written by `python -m benchmarks.measurements` from `benchmarks/results/*.json`; edit neither by hand. Each section is
one run: its command, its machine, its day and the commit it was measured at ("+" where the checkout had changes).
Figures of different machines or commits cannot be compared; ratios within one section can.
"""


@dataclass(frozen=True)
class Result:
    """One results file: `run` says where the figures come from."""

    name: str
    run: dict[str, str]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Headline:
    """One figure of the README. value: from the figures of the results file `source` to the text shown."""

    label: str
    source: str
    value: Callable[[dict[str, Any]], str]


def _cut(figures: dict[str, Any]) -> str:
    cut = figures["cut"]
    return f"{max(cut['stall_seconds'], default=0.0) * 1e3:.0f} ms"


def _kept(figures: dict[str, Any]) -> str:
    return f"{figures['cut']['kept']} of {figures['cut']['provisional']} tokens"


def _same(figures: dict[str, Any]) -> str:
    same = [*figures["same_text_as_plain_decoding"], figures["cut"]["same_text_as_plain_decoding"]]
    return f"{sum(same)} of {len(same)}"


#: the README's figures, in their order; those whose results file is missing are left out
HEADLINES = (
    Headline("answers equal to plain decoding of the target, token for token, one of them cut off", "demo", _same),
    Headline("first token written alone after the verifier was killed", "demo", _cut),
    Headline("of the text written alone, kept by the verifier when it was back", "demo", _kept),
    Headline(
        "tokens a second, as the device chose between trees and stream, over plain decoding, one step a token",
        "demo",
        lambda f: f"{f['ratio_to_plain']:.2f}",
    ),
    Headline(
        "tau: tokens committed per verification, greedy, 32-node trees", "acceptance", lambda f: f"{f['tau']:.2f}"
    ),
    Headline(
        "bytes per round, up / down",
        "demo",
        lambda f: f"{f['trees']['bytes_up_per_round']} / {f['trees']['bytes_down_per_round']}",
    ),
)


def read_results(folder: Path = RESULTS) -> list[Result]:
    """Every results file, by name. Raises ValueError on one that does not say where it comes from."""
    results = []
    for path in sorted(folder.glob("*.json")):
        figures = json.loads(path.read_text(encoding="utf-8"))
        run = figures.pop("run", {})
        missing = [field for field in RUN_FIELDS if not run.get(field)]
        if missing:
            raise ValueError(f"{path.name} does not say its {', '.join(missing)}; write it with a benchmark's --json")
        results.append(Result(path.stem, run, figures))
    return results


def document(results: list[Result]) -> str:
    """docs/measurements.md."""
    return "\n".join([INTRODUCTION, *(_section(result) for result in results)])


def headlines(results: list[Result]) -> str:
    """The README's table, without its markers."""
    figures = {result.name: result for result in results}
    lines = ["| figure | value | command |", "|---|---|---|"]
    for headline in HEADLINES:
        if result := figures.get(headline.source):
            lines.append(f"| {headline.label} | **{headline.value(result.figures)}** | `{result.run['command']}` |")
    used = [figures[headline.source].run for headline in HEADLINES if headline.source in figures]
    if not used:
        return "Nothing yet: run `make demo`."
    machines = "; ".join(sorted({run["machine"] for run in used}))
    days = sorted({run["date"] for run in used})
    return "\n".join([*lines, "", f"Measured on {machines}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}."])


def with_headlines(readme: str, results: list[Result]) -> str:
    """README.md with its figures replaced. Raises ValueError where the markers are missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md has no place for figures; it needs a line {BEGIN!r} and a line {END!r}")
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{headlines(results)}\n{END}{rest.partition(END)[2]}"


def _section(result: Result) -> str:
    run = result.run
    module = run["command"].split()[2]
    lines = [f"## {result.name}", "", _purpose(module), "", f"    {run['command']}", ""]
    lines += [f"{run['machine']}; {run['date']}; commit {run['commit']}", ""]
    scalars = {key: value for key, value in result.figures.items() if not isinstance(value, dict | list)}
    if scalars:
        lines += [*_table(["figure", "value"], [[_words(key), _cell(value)] for key, value in scalars.items()]), ""]
    for key, value in result.figures.items():
        if key not in scalars:
            lines += list(_nested(_words(key), value))
    return "\n".join(lines)


def _nested(title: str, value: Any) -> Iterator[str]:
    """Tables of a list or a mapping; what is nested deeper becomes text in a cell."""
    rows: list[tuple[str, Any]]
    if isinstance(value, dict):
        rows = list(value.items())
    else:
        rows = [(str(number), row) for number, row in enumerate(value, 1)]
    if not rows:
        return
    yield f"**{title}**"
    yield ""
    if all(isinstance(row, dict) for _, row in rows):
        columns = list(dict.fromkeys(key for _, row in rows for key in row))
        first = [] if isinstance(value, list) else [""]
        cells = [
            [*([] if isinstance(value, list) else [name]), *(_cell(row.get(c)) for c in columns)] for name, row in rows
        ]
        yield from _table([*first, *map(_words, columns)], cells)
    elif isinstance(value, dict):
        yield from _table(["figure", "value"], [[_words(name), _cell(row)] for name, row in rows])
    else:
        yield _cell(value)
    yield ""


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _words(key: str) -> str:
    return key.replace("_", " ")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, dict):
        return "; ".join(f"{_words(str(key))} {_cell(item)}" for key, item in value.items())
    return str(value)


def _purpose(module: str) -> str:
    """The first line of a benchmark's docstring; nothing is imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    source = Path(spec.origin).read_text(encoding="utf-8")
    return source.partition('"""')[2].partition("\n")[0].rstrip('"')


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measurements",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is stale")
    options = parser.parse_args(argv)
    try:
        results = read_results()
        wanted = {
            DOCUMENT: document(results),
            README: with_headlines(README.read_text(encoding="utf-8"), results),
        }
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(ROOT)} is stale; run: python -m benchmarks.measurements", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
