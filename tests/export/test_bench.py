"""`export bench`: figures of a real tiny bundle, floors worked out again, reports merged, errors in one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edge_runtime.probe import TREES
from export.bundle import bench as module
from export.bundle.bench import HEADING, bench, bench_bundle, bench_markdown, show, write_into_report
from export.bundle.bundle_options import BenchOptions
from export.bundle.report import replace_section
from outrider_core.drafting.bundle import BundleError, open_bundle
from outrider_core.drafting.drafter import TreeShape
from tests.edge_runtime.test_probe import MAX_WIDTH, STEP_BYTES, tiny_bundle
from tests.waiting import HANG

CELL = re.compile(r"\d+\.\d+ / \d+\.\d+ \(x\d+\.\d\)")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny bundle and its figures; nothing is written yet."""
    folder = tiny_bundle(tmp_path_factory.mktemp("bench") / "bundle")
    figures = bench_bundle(folder, threads=[2, 1], widths=[4, 1, MAX_WIDTH + 1], contexts=[200, 8, 9999], repeats=2)
    return folder, figures


@pytest.fixture
def figures(measured: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(measured[1]))  # figures must survive JSON anyway
    assert copied == measured[1]
    return copied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle that a test may change."""
    return tiny_bundle(tmp_path / "bundle")


def one_line(error: pytest.ExceptionInfo[BundleError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# figures


def test_every_engine_thread_count_width_and_context_is_measured(figures: dict[str, Any]) -> None:
    assert list(figures["engines"]) == ["onnx"] and figures["skipped"] == {}
    engine = figures["engines"]["onnx"]
    assert (engine["file"], engine["quant"], engine["embedding_bits"]) == ("drafter.onnx", "int8", 8)
    assert engine["runtime"] in figures["versions"] and "python" in figures["versions"]
    assert [run["threads"] for run in engine["runs"]] == [1, 2]
    for run in engine["runs"]:
        cells = [(step["context"], step["width"]) for step in run["steps"]]
        assert cells == [(8, 1), (8, 4), (200, 1), (200, 4)], "above max_width and max_context are left out"
        assert run["torch_imported"] is False
        for key in ("open_ms", "import_ms", "load_ms", "rss_mb", "peak_rss_mb", "bandwidth_gb_s"):
            assert run[key] > 0
        assert run["draft"]["context"] == 256 - TREES - TreeShape().depth
        assert run["draft"]["ms_per_tree"] > 0 and run["draft"]["peak_rss_mb"] >= run["draft"]["rss_mb"] > 10


def test_floor_is_the_time_to_read_weights_cache_and_rows(
    measured: tuple[Path, dict[str, Any]], figures: dict[str, Any]
) -> None:
    manifest = open_bundle(measured[0]).manifest
    for run in figures["engines"]["onnx"]["runs"]:
        for step in run["steps"]:
            cache = 2 * step["context"] * manifest.sa_kv_heads * manifest.head_dim * 4
            rows = 2 * step["context"] * manifest.ca_kv_heads * manifest.head_dim * 4
            assert step["bytes"] == STEP_BYTES + cache + rows
            floor = (STEP_BYTES + cache + rows) / (run["bandwidth_gb_s"] * 1e9) * 1e3
            assert step["floor_ms"] == pytest.approx(floor, rel=1e-3)
            assert step["ratio"] == pytest.approx(step["p50"] / floor, rel=1e-3)
            assert 0 < step["min"] <= step["p50"] <= step["p95"]


class Probes:
    """Stands in for `run_probe`: made-up figures, and the arguments of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []

    def __call__(self, arguments: list[str], threads: int, label: str, tick: Callable[[str], None]) -> dict[str, Any]:
        self.calls.append((arguments, threads))
        common = {"threads": threads, "open_ms": 1.0, "import_ms": 2.0, "load_ms": 3.0, "rss_mb": 50.0}
        common |= {"others_cores": 0.0}
        given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        if "--draft" in given:
            draft = {"context": int(given["--draft"]), "ms_per_tree": 9.0, "prompt_ms": 5.0}
            draft |= {"steps_per_tree": 7.0, "nodes_per_tree": 32.0}
            return {**common, "peak_rss_mb": 70.0, "draft": draft, "torch_imported": False}
        steps = [
            {"width": int(width), "context": int(context), "p50": 1.0, "p95": 2.0, "min": 0.5}
            for context in given["--contexts"].split(",")
            for width in given["--widths"].split(",")
        ]
        return {**common, "peak_rss_mb": 60.0, "steps": steps, "bandwidth_gb_s": 10.0, "torch_imported": False}


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    probes = Probes()
    monkeypatch.setattr(module, "run_probe", probes)
    return probes


def test_without_options_one_thread_and_all_cores(
    folder: Path, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: 6)
    figures = bench_bundle(folder)
    assert [run["threads"] for run in figures["engines"]["onnx"]["runs"]] == [1, 6]
    assert [threads for _, threads in probes.calls] == [1, 1, 6, 6]
    arguments = probes.calls[0][0]
    assert arguments[0] == str(folder) and "1,2,4,8,16" in arguments and "128" in arguments
    assert [run["threads"] for run in bench_bundle(folder, threads=[0])["engines"]["onnx"]["runs"]] == [6]


def test_drafting_is_left_out_where_no_context_has_room(tmp_path: Path, probes: Probes) -> None:
    figures = bench_bundle(tiny_bundle(tmp_path / "short", max_context=16), threads=[1], contexts=[8])
    assert [run["draft"] for run in figures["engines"]["onnx"]["runs"]] == [None]
    assert len(probes.calls) == 1
    assert "drafting after" not in bench_markdown(figures)


def test_drafting_is_at_1k_where_the_bundle_allows(tmp_path: Path, probes: Probes) -> None:
    figures = bench_bundle(tiny_bundle(tmp_path / "long", max_context=4096), threads=[1])
    assert figures["engines"]["onnx"]["runs"][0]["draft"]["context"] == 1024
    assert "drafting after 1024 tokens: peak memory | 70.0 MB" in bench_markdown(figures)


def test_engine_without_runtime_is_skipped_with_what_to_install(
    tmp_path: Path, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tiny_bundle(tmp_path / "both", pte=b"never opened")
    monkeypatch.setattr(module, "installed", lambda name: {"onnx": "onnxruntime"}.get(name))
    figures = bench_bundle(both, threads=[1], contexts=[8])
    assert list(figures["engines"]) == ["onnx"]
    line = "nothing here runs drafter.pte; run: pip install 'outrider[executorch]'"
    assert figures["skipped"] == {"executorch": line}
    assert f"Engine executorch was skipped: {line}" in bench_markdown(figures)
    with pytest.raises(BundleError) as error:
        bench_bundle(both, engines=["executorch"])
    assert one_line(error) == line


# errors


def test_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as error:
        bench_bundle(tmp_path / "none")
    assert "python -m export bundle" in one_line(error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engines": ["executorch"]}, "holds no executorch engine (it has: onnx)"),
        ({"contexts": [257, 1024]}, "holds 256 tokens at most; give --contexts of that or less"),
        ({"widths": [17, 64]}, "takes 16 tokens a step at most; give --widths of that or less"),
        ({"engines": []}, "name an engine"),
    ],
)
def test_what_the_bundle_cannot_do_is_one_line(
    folder: Path, probes: Probes, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(BundleError) as error:
        bench_bundle(folder, **options)
    assert said in one_line(error)
    assert probes.calls == []


@pytest.mark.parametrize(
    "options", [{"threads": [-1]}, {"threads": []}, {"widths": [0]}, {"contexts": [0, 8]}, {"repeats": 0}]
)
def test_senseless_numbers_are_refused(folder: Path, probes: Probes, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="or more"):
        bench_bundle(folder, **options)
    assert probes.calls == []


def test_changed_file_is_noticed_before_it_is_measured(folder: Path, probes: Probes) -> None:
    content = bytearray((folder / "drafter.onnx").read_bytes())
    content[100] ^= 1
    (folder / "drafter.onnx").write_bytes(content)
    with pytest.raises(BundleError) as error:
        bench_bundle(folder)
    assert "differs from its sha256" in one_line(error)


def test_failing_probe_is_one_line(folder: Path) -> None:
    with pytest.raises(BundleError) as error:
        module.run_probe([str(folder), "--draft", "9999"], 1, "onnx, 1 thread", lambda note: None)
    line = one_line(error)
    assert line.startswith("measuring onnx, 1 thread failed: --draft 9999 is more than") and "error:" not in line


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -9 $$", "killed by signal 9; if memory ran out"),
        ("echo one >&2; echo two >&2; exit 3", "failed: two"),
        ("exit 3", "ended with status 3"),
        ("echo nonsense", "printed no figures; run: "),
    ],
)
def test_probe_that_breaks_is_one_line(script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(BundleError) as error:
        module.run_probe(["bundle"], 1, "onnx, 1 thread", lambda note: None)
    assert one_line(error).startswith("measuring onnx, 1 thread failed: ") and said in one_line(error)


def test_figures_are_found_behind_what_a_runtime_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"[runtime] hello\"\necho '{\"threads\": '$OMP_NUM_THREADS'}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert module.run_probe(["bundle"], 3, "", lambda note: None) == {"threads": 3}


# Ctrl-C

INTERRUPTED = """
import sys
from pathlib import Path
from rich.console import Console
from export.bundle import bench
from export.bundle.bundle_options import BenchOptions

class Meter(bench.Meter):
    def update(self, done, note):
        print(note, flush=True)

bench.Meter = Meter
options = BenchOptions(bundle=Path(sys.argv[1]), threads=(1,), widths=(1,), contexts=(8,), repeats=10**8)
bench.bench(options, Console())
"""


def test_ctrl_c_leaves_no_process_and_no_report(folder: Path) -> None:
    (folder / "report.json").write_text('{"quant": "int8"}')
    before = sorted(path.name for path in folder.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "onnx, 1 thread: loaded"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # the probe was in its group
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "KeyboardInterrupt" in said and process.returncode != 0
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "report.json").read_text() == '{"quant": "int8"}'


# reports


def test_markdown_has_a_table_per_thread_count(figures: dict[str, Any]) -> None:
    text = bench_markdown(figures)
    assert text.startswith(f"{HEADING}\n") and text.count(HEADING + "\n") == 1
    assert "### onnx (int8, embedding 8 bit), 1 thread\n" in text
    assert "### onnx (int8, embedding 8 bit), 2 threads\n" in text
    assert text.count("| tokens of a step | behind 8 | behind 200 |\n|---|---|---|\n") == 2
    rows = [line for line in text.splitlines() if CELL.search(line)]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 4"] * 2
    assert all(len(CELL.findall(row)) == 2 for row in rows)
    for fact in ("load time", "memory when loaded", "drafting after 226 tokens: peak memory", "read bandwidth"):
        assert text.count(f"| {fact}") == 2
    assert figures["machine"] in text and figures["versions"]["onnxruntime"] in text


def test_markdown_warns_where_torch_is_in_the_figures(figures: dict[str, Any]) -> None:
    assert "no guide to a phone" not in bench_markdown(figures)
    figures["engines"]["onnx"]["runs"][0]["torch_imported"] = True
    assert bench_markdown(figures).count("no guide to a phone") == 1


def test_markdown_warns_where_other_processes_disturbed_a_run(figures: dict[str, Any]) -> None:
    figures["machine_cores"] = 4
    runs = figures["engines"]["onnx"]["runs"]
    for run in runs:
        run["others_cores"] = run["draft"]["others_cores"] = 2.0
    assert "| disturbed |" not in bench_markdown(figures), "with one and two threads there are cores for all"
    runs[1]["draft"]["others_cores"] = 2.5
    text = bench_markdown(figures)
    assert text.count("| disturbed | other processes used 2.5 cores meanwhile") == 1
    runs[1]["others_cores"] = runs[1]["draft"]["others_cores"] = None
    assert "| disturbed |" not in bench_markdown(figures)


def test_markdown_says_when_the_weights_fit_the_cache(figures: dict[str, Any]) -> None:
    figures["cache_mb"] = 32.0
    assert bench_markdown(figures).count("ratios below 1 are possible") == 2
    figures["cache_mb"] = STEP_BYTES / 1e6 / 2
    assert "ratios below 1" not in bench_markdown(figures)
    figures["cache_mb"] = None
    assert "can keep the weights" not in bench_markdown(figures)


def test_terminal_shows_the_same_figures(figures: dict[str, Any]) -> None:
    figures["skipped"] = {"executorch": "run: pip install 'outrider[executorch]'"}
    console = Console(record=True, width=200, file=io.StringIO())
    show(figures, console)
    text = console.export_text()
    for row in (line for line in bench_markdown(figures).splitlines() if CELL.search(line)):
        assert all(cell in text for cell in CELL.findall(row))
    assert "outrider[executorch]" in text, "brackets are not markup"


def test_reports_are_merged_and_hashes_stay_valid(folder: Path, figures: dict[str, Any]) -> None:
    (folder / "report.json").write_text(json.dumps({"quant": "int8", "parity": {"steps": 3}}))
    (folder / "report.md").write_text("# Bundle report\n\nMeasured.\n\n## Parity\n\n| a | b |\n")
    write_into_report(folder, figures)
    assert json.loads((folder / "report.json").read_text()) == {
        "quant": "int8", "parity": {"steps": 3}, "bench": figures,
    }  # fmt: skip
    text = (folder / "report.md").read_text()
    assert text == "# Bundle report\n\nMeasured.\n\n## Parity\n\n| a | b |\n\n" + bench_markdown(figures)
    open_bundle(folder)
    assert not list(folder.glob(".*"))


def test_second_bench_replaces_the_first(folder: Path, figures: dict[str, Any]) -> None:
    write_into_report(folder, figures)
    figures["machine"] = "another machine"
    write_into_report(folder, figures)
    once = (folder / "report.md").read_text()
    assert once.count(HEADING) == 1 and "Machine: another machine" in once
    assert json.loads((folder / "report.json").read_text())["bench"]["machine"] == "another machine"
    write_into_report(folder, figures)
    assert (folder / "report.md").read_text() == once


def test_reports_are_created_where_there_are_none(folder: Path, figures: dict[str, Any]) -> None:
    write_into_report(folder, figures)
    assert json.loads((folder / "report.json").read_text()) == {"bench": figures}
    assert (folder / "report.md").read_text() == "# Bundle report\n\n" + bench_markdown(figures)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "## Bench\n\nnew\n"),
        ("# R\n", "# R\n\n## Bench\n\nnew\n"),
        ("# R\n\n## Bench\n\nold\n\n### onnx\n\nold\n", "# R\n\n## Bench\n\nnew\n"),
        ("# R\n\n## Bench\nold\n## Benchmarks\n\nkept\n", "# R\n\n## Bench\n\nnew\n\n## Benchmarks\n\nkept\n"),
    ],
)
def test_section_is_replaced_and_nothing_else(text: str, expected: str) -> None:
    assert replace_section(text, "## Bench\n\nnew\n") == expected


def test_broken_report_is_found_before_measuring(folder: Path, probes: Probes) -> None:
    (folder / "report.json").write_text("{")
    with pytest.raises(BundleError) as error:
        bench(BenchOptions(bundle=folder), Console(quiet=True))
    assert "report.json is broken" in one_line(error) and probes.calls == []
    assert (folder / "report.json").read_text() == "{"


def test_failed_write_keeps_the_old_reports(
    folder: Path, figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "report.json").write_text("{}")
    (folder / "report.md").write_text("# R\n")
    before = sorted(path.name for path in folder.iterdir())

    def full(self: Path, text: str, **_: Any) -> int:
        if self.name == ".report.md.new":
            raise OSError(28, "No space left on device")
        return self.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BundleError) as error:
        write_into_report(folder, figures)
    assert "No space left on device" in one_line(error)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "report.json").read_text() == "{}" and (folder / "report.md").read_text() == "# R\n"


def test_bench_measures_shows_and_writes(folder: Path, probes: Probes) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    figures = bench(BenchOptions(bundle=folder, threads=(1,), contexts=(8,), widths=(1, 2)), console)
    assert json.loads((folder / "report.json").read_text())["bench"] == figures
    assert (folder / "report.md").read_text().endswith(bench_markdown(figures))
    assert "wrote the figures into" in console.export_text()
