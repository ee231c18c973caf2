"""Figures in README and docs come from results files, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import provenance, report
from benchmarks.report import BEGIN, END, SECTIONS, document, draw, headlines, read_results, with_headlines

RUN = {"command": "python -m benchmarks.demo", "machine": "a machine", "date": "2026-01-01", "commit": "abc1234"}
FIGURES = {
    "same_text_as_plain_decoding": [True, True],
    "cut": {"stall_seconds": [0.008], "provisional": 30, "kept": 21, "same_text_as_plain_decoding": True},
    "ratio_to_plain": 1.02,
    "trees": {"tau": 2.5, "bytes_up_per_round": 75, "bytes_down_per_round": 526},
}
TAU = {
    "tree": {"nodes": 32},
    "overall": {"answers": 6, "tau": 3.94, "bytes_up_per_round": 80},
    "by_category": {"maths": {"answers": 6, "tau": 4.5, "bytes_up_per_round": 90}},
}
#: a number with a unit of speed, time, size or share: what only a benchmark may say
FIGURE = re.compile(r"\d(?:[\d.,]*\d)?\s?(?:tokens/s|tokens a second|ms\b|MB\b|GB\b|x\b|%|\u00d7)")


def write(folder: Path, name: str, content: object) -> Path:
    (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_results_file_becomes_a_section_and_headlines(tmp_path: Path) -> None:
    write(tmp_path, "tau", {"run": RUN, **TAU})
    results = read_results(write(tmp_path, "demo", {"run": RUN, **FIGURES}))
    text = document(results)
    assert "`python -m benchmarks.demo`; a machine; 2026-01-01; commit abc1234" in text
    assert "| maths | 6 | 4.50 | 90 |" in text and 'src="plot-tau-light.svg"' in text
    assert "| answers equal to plain decoding | 3 of 3 |" in text and "| 8 ms |" in text
    table = headlines(results)
    assert "**3.94**" in table and "**75 / 526**" in table and "**1.02x**" in table
    assert "text that the target keeps" not in table, "a figure without its results file is left out"


def test_a_plot_is_drawn_for_each_scheme(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (section,) = (each for each in SECTIONS if each.name == "tau")
    assert section.bars is not None
    for scheme, paper in (("light", "#ffffff"), ("dark", "#0d1117")):
        draw(section.bars(TAU), tmp_path / f"{scheme}.svg", scheme)
        drawn = (tmp_path / f"{scheme}.svg").read_text()
        assert paper in drawn and ">maths</text>" in drawn and ">3.94</text>" in drawn


@pytest.mark.parametrize("field", ["command", "machine", "date", "commit"])
def test_figures_without_their_source_are_refused(tmp_path: Path, field: str) -> None:
    run = {name: value for name, value in RUN.items() if name != field}
    with pytest.raises(ValueError, match=f"demo.json does not say its {field}"):
        read_results(write(tmp_path, "demo", {"run": run, **FIGURES}))


def test_only_the_marked_part_of_the_readme_is_replaced(tmp_path: Path) -> None:
    results = read_results(write(tmp_path, "demo", {"run": RUN, **FIGURES}))
    readme = with_headlines(f"before\n{BEGIN}\nold\n{END}\nafter\n", results)
    assert readme.startswith(f"before\n{BEGIN}\n| figure |") and readme.endswith(f"{END}\nafter\n")
    with pytest.raises(ValueError, match="no place for figures"):
        with_headlines("nothing", results)


def test_the_documents_are_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().err


def test_the_readme_states_no_other_figures() -> None:
    readme = report.README.read_text(encoding="utf-8")
    prose = readme.partition(BEGIN)[0] + readme.partition(END)[2]
    assert FIGURE.findall("1.42x, 8 ms and 97.2 %") == ["1.42x", "8 ms", "97.2 %"]
    assert FIGURE.findall(prose) == []


def test_a_command_names_no_folders_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x"])
    words = ["--prompts", "/somewhere/specbench.jsonl", "--json", "a.json", "--bundle", "build/bundle", "../x/y.txt"]
    assert provenance.command(words).endswith(" --prompts specbench.jsonl --bundle build/bundle y.txt")
