"""Measure everything needed about the vLLM engine on a device, in one run of at most twelve minutes.

    python -m benchmarks.vllm_device --json build/vllm_device.json          on a GPU
    python -m benchmarks.vllm_device --answers 6 --sessions 1 --new 4 --dtype float32 --minutes 30     tried on a CPU

Stages, each in its own process, the most important first; stages without time left are skipped, as the file says:

    answers              of the default target through trees, in 16 bits: near-ties, and answers that part there
    batch_invariant      the same with VLLM_BATCH_INVARIANT=1, where none should part; vLLM has it on GPUs alone
    steps, graphs        milliseconds of a step for plain decoding, chains and trees; without and with CUDA graphs
    vllm                 milliseconds of a step of vLLM's own decoding, with as many sequences
    layout               the tests that compare keys, values and feature rows with transformers', on this device

It needs vLLM, the development tools of the tests, and the default target in the cache or its package.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.command import Figures, common_arguments, conclude

TESTS = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "vllm"]
LAYOUT = "compaction or rows or chances or neighbours or several_paths"


def answers(options: argparse.Namespace, until: float, **environment: str) -> Figures:
    """Count near-ties among answers of the default target through random trees, evictions and reconnects."""
    environment |= {"OUTRIDER_ANSWERS": str(options.answers), "OUTRIDER_DTYPE": options.dtype}
    said = _run([*TESTS, "-k", "near_ties", "tests/cloud/test_vllm_answers.py"], until, environment)
    found = re.search(
        r"(?P<answers>\d+) answers in (?P<arithmetic>\S+), (?P<tokens>\d+) tokens, (?P<near_ties>\d+) near-ties; "
        r"(?P<parted>\d+) answers part, by (?P<widest_gap>\S+) at most; (?P<evictions>\d+) evictions",
        said,
    )
    if found is None:
        raise RuntimeError(said[-2000:])
    return {key: value if key == "arithmetic" else json.loads(value) for key, value in found.groupdict().items()}


def steps(options: argparse.Namespace, until: float, graphs: str = "off") -> Figures:
    """See benchmarks.step_costs."""
    path = options.json.with_suffix(f".steps-{graphs}.json")
    asked = ["--engines", "vllm", "--dtype", options.dtype, "--cuda-graphs", graphs, "--repeats", str(options.repeats)]
    sessions = ["--sessions", *map(str, options.sessions), "--json", str(path)]
    _run(["-m", "benchmarks.step_costs", *asked, *sessions], until)
    return dict(json.loads(path.read_text()))


def own_decoding(options: argparse.Namespace, until: float) -> Figures:
    """Return milliseconds of a step of vLLM by itself, by its number of sequences."""
    asked = [str(options.new), options.dtype, *map(str, options.sessions)]
    said = _run(["-m", "benchmarks.vllm_device", "--own", *asked], until)
    (line,) = (line for line in said.splitlines() if line.startswith('{"'))  # vLLM logs there too
    return dict(json.loads(line))


def decode(new: int, dtype: str, counts: Sequence[int]) -> Figures:
    """Measure the same in this process: greedy, with vLLM's defaults, but not compiled on a CPU."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from outrider_core.models.target import model_folder
    from outrider_core.targets.source import TargetSource

    folder = str(model_folder(TargetSource.resolve()))
    llm = LLM(
        folder, dtype=dtype, max_model_len=512, kv_cache_memory_bytes=2 << 30, enable_prefix_caching=False,
        enforce_eager=current_platform.is_cpu(),
    )  # fmt: skip
    took = Figures()
    for count in counts:
        prompts = [{"prompt_token_ids": [1000 + index + at for at in range(200)]} for index in range(count)]
        seconds = dict[int, float]()
        for tokens in (1, 1, 1 + new):
            begun = time.perf_counter()
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)  # type: ignore[arg-type]
            seconds[tokens] = time.perf_counter() - begun
        took[str(count)] = 1000 * (seconds[1 + new] - seconds[1]) / new
    return took


def layout(options: argparse.Namespace, until: float) -> Figures:
    """Run the tests of the layout of keys and values, in float32."""
    files = ["tests/cloud/test_lossless.py", "tests/cloud/test_vllm.py"]
    _run([*TESTS, "-k", LAYOUT, *files], until)
    return {"passed": True}


def _run(arguments: Sequence[str], until: float, environment: dict[str, str] | None = None) -> str:
    left = until - time.monotonic()
    if left < 20:
        raise TimeoutError("no time was left for it")
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **(environment or {})}, capture_output=True, text=True,
        timeout=left,
    )  # fmt: skip
    if done.returncode:
        wrong = [line for line in done.stdout.splitlines() if line.startswith("E  ")]  # pytest's
        raise RuntimeError("\n".join(wrong) or (done.stderr + done.stdout)[-3000:])
    return done.stdout


def measure(options: argparse.Namespace, console: Console) -> Figures:
    """Run every stage; its error replaces the figures if it fails. The file is updated after each."""
    until, figures = time.monotonic() + 60 * options.minutes, Figures()
    stages: dict[str, Callable[[], Figures]] = {
        "answers": lambda: answers(options, until),
        "steps": lambda: steps(options, until),
        "vllm": lambda: own_decoding(options, until),
        "batch_invariant": lambda: answers(options, until, VLLM_BATCH_INVARIANT="1"),
        "graphs": lambda: steps(options, until, "on"),
        "layout": lambda: layout(options, until),
    }
    for name, stage in stages.items():
        console.print(f"{name} ...", style="dim")
        begun = time.monotonic()
        try:
            figures[name] = stage()
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            figures[name] = {"failed": str(error)}
        figures[name]["seconds"] = round(time.monotonic() - begun, 1)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common_arguments(parser, dtype="bfloat16", json=Path("build/vllm_device.json"))
    parser.add_argument("--minutes", type=float, default=12, help="of the whole run")
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--new", type=int, default=64, help="tokens of vLLM's own decoding")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each step, of which the median is taken")
    parser.add_argument("--own", nargs="+", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options, console = make_parser().parse_args(argv), Console()
    if options.own:
        new, dtype, *counts = options.own
        print(json.dumps(decode(int(new), dtype, [int(count) for count in counts])))
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    return conclude(
        lambda: measure(options, console), lambda found: console.print_json(data=found), options.json, console
    )


if __name__ == "__main__":
    sys.exit(main())
