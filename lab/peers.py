"""Greedy decoding of one session, plain and speculative: this project beside llama.cpp and transformers.

    python -m lab.peers --prompts specbench.jsonl --threads 1
    python -m lab.peers --prompts specbench.jsonl --bundle build/bundle --llama-python /tmp/llama/bin/python

All get the same token ids and the same number of threads; the prompt is not timed. They take turns within every
question, so that a disturbance affects all of them. All write the same number of tokens, whether or not the text has
ended before. "as plain": for speculating ones, how many texts equal their own without speculation.

--bundle adds this project on a single device (`LocalVerifier`, the 8-bit engine): one token a step, the target's stream
with lookup's guesses in it, trees only, and what the device chooses itself. These rows alone end where the text
ends, and their first token counts as prompt.

llama.cpp computes on the GGUF file that the default target is made from: 4-bit weights and 8-bit activations, so its
text may differ from ours, which uses the same weights dequantised. Its own speculation is prompt lookup; a draft model
would have to be a smaller one of the same vocabulary, which the default target lacks. It is not a dependency of this
project: give --llama-python an interpreter that has it. To get one:

    python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.command import common_arguments, conclude
from benchmarks.engine import describe_device
from benchmarks.questions import read_questions
from cloud.loading import load_verifier
from cloud.settings import Settings
from edge_runtime.blocking import BlockingRuntime
from edge_runtime.events import Finished, Verified
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.speed.arms import Arm
from lab import llama_peer
from lab.lab import Lab
from outrider.local import LocalVerifier
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.models.target import load_target
from outrider_core.protocol.prefix import common_prefix
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource

#: the row that the others are compared with
REFERENCE = "engine float32"
#: this project on a single device, one step a token
PLAIN = "engine 8 bits"
#: tokens that llama.cpp drafts by prompt lookup; llama-cpp-python recommends two on a CPU
LOOKUP_TOKENS = 2
Figures = dict[str, Any]


class PeerError(RuntimeError):
    """A peer cannot run. The message is one line that says what to do."""


class Peer(Protocol):
    """name: its row. megabytes: weights, read once a step. plain: its row without speculation, or None."""

    name: str
    megabytes: float
    plain: str | None

    def answer(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        """Return exactly `new` greedy tokens after `prompt` (token ids), and the seconds without the prompt's."""


class EnginePeer:
    """The verifier's engine, one token a step."""

    plain: str | None = None

    def __init__(self, settings: Settings) -> None:
        self.name = f"engine {settings.dtype}"
        self.lab = Lab(load_verifier(settings))
        self.eos, self.lab.eos = self.lab.eos, frozenset()
        config = self.lab.engine.runner.model.config  # type: ignore[attr-defined]
        self.megabytes = weight_megabytes(config, getattr(torch, settings.dtype))

    def answer(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        answer = self.lab.answer(prompt, None, Sampling(), new)
        return answer.tokens, answer.seconds


class TransformersPeer:
    """`generate` of transformers, after a prompt that is in its cache already."""

    plain: str | None = None

    def __init__(self, settings: Settings) -> None:
        self.name = f"transformers {settings.dtype}"
        self.model = load_target(TargetSource.resolve(settings.model), settings.dtype, settings.device).model
        self.model.generation_config.eos_token_id = None  # it writes on after the end
        self.megabytes = weight_megabytes(self.model.config, self.model.dtype)

    @torch.inference_mode()
    def answer(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        cache, ids = DynamicCache(config=self.model.config), torch.tensor([prompt], device=self.model.device)
        if len(prompt) > 1:
            self.model(ids[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        begun = time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens, time.perf_counter() - begun


class DevicePeer:
    """An `EdgeRuntime` and its target in this process. mode: None lets it choose between trees and a stream."""

    def __init__(
        self, name: str, bundle: Bundle, server: LocalVerifier, megabytes: float, threads: int, mode: Arm | None
    ) -> None:
        self.plain = None if name == PLAIN else PLAIN
        self.name = name
        self.megabytes = megabytes
        self.runtime = BlockingRuntime(
            EdgeRuntime(bundle, server, RuntimeOptions(threads=threads), pinned=Pinned(mode=mode))
        )

    def answer(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        first = begun = 0.0
        self.runtime.forget()  # so that repetitions are not drafted from the first time
        for event in self.runtime.generate(prompt, max_new_tokens=new):
            if isinstance(event, Verified) and not first:
                first, begun = len(event.tokens), time.perf_counter()
        seconds = time.perf_counter() - begun
        assert isinstance(event, Finished)
        later = len(event.token_ids) - first
        return event.token_ids, seconds * len(event.token_ids) / later if later else seconds


class LlamaPeer:
    """llama.cpp in a separate process. Raises PeerError if it does not start or ends early.

    lookup: tokens that it drafts from the text itself; 0: it decodes plainly.
    """

    def __init__(self, python: str, gguf: Path, threads: int, context: int, lookup: int = 0) -> None:
        self.plain: str | None
        name = f"llama.cpp {gguf.stem.rpartition('.')[2]}"
        self.name, self.plain = (f"{name}, lookup {lookup}", name) if lookup else (name, None)
        self.megabytes = gguf.stat().st_size / 1e6
        self._python = python
        command = [python, llama_peer.__file__, str(gguf), str(threads), str(context), str(lookup)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        hello = self._read()
        if "error" in hello:
            self.close()
            missing = "No module named 'llama_cpp'" in hello["error"]
            todo = f"; run: {python} -m pip install llama-cpp-python" if missing else ""
            raise PeerError(f"llama.cpp does not run in {python}: {hello['error']}{todo}")
        self.version: str = hello["version"]

    def answer(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"prompt": prompt, "new": new}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading reports it
        reply = self._read()
        return reply["tokens"], reply["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> Figures:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise PeerError(f"llama.cpp in {self._python} ended with exit status {status}; run it alone to see why")
        reply: Figures = json.loads(line)
        return reply


def weight_megabytes(config: Any, dtype: torch.dtype) -> float:
    """Return the weights read per token, in 10^6 bytes: all matrices of the layers and the LM head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(m.weight.numel() for m in model.modules() if type(m) is torch.nn.Linear)
    return float(matrices * dtype.itemsize / 1e6)


def measure(
    peers: Sequence[Peer],
    prompts: list[list[int]],
    new: int,
    repeats: int,
    eos: frozenset[int],
    console: Console,
    groups: Sequence[str] = (),
) -> Figures:
    """Return figures by peer; see `summarise`. groups: of the prompts, for the speed over plain decoding in each."""
    texts: dict[str, list[list[int]]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    for number, prompt in enumerate(track(prompts, "questions", console=console)):
        taken: dict[str, list[float]] = defaultdict(list)
        for repeat in range(repeats):
            turn = (number + repeat) % len(peers)
            for peer in [*peers[turn:], *peers[:turn]]:
                tokens, took = peer.answer(prompt, new)
                taken[peer.name].append(took)
                if not repeat:
                    texts[peer.name].append(tokens)
        for name, times in taken.items():
            seconds[name].append(statistics.median(times))
    truths = [ended(text, eos) for text in texts[REFERENCE]]
    figures = {peer.name: summarise(peer, texts[peer.name], seconds[peer.name], truths) for peer in peers}
    for peer in peers:
        if peer.plain in texts:
            both = zip(texts[peer.name], texts[peer.plain], strict=True)
            figures[peer.name]["same_as_plain"] = sum(ended(mine, eos) == ended(plain, eos) for mine, plain in both)
            figures[peer.name]["over_plain"] = {
                group: round(
                    speed(texts[peer.name], seconds[peer.name], groups, group)
                    / speed(texts[peer.plain], seconds[peer.plain], groups, group),
                    3,
                )
                for group in sorted(set(groups))
            }
    return figures


def speed(texts: list[list[int]], seconds: list[float], groups: Sequence[str], group: str) -> float:
    """Return tokens per second of the group's answers."""
    own = [(len(text), took) for text, took, its in zip(texts, seconds, groups, strict=True) if its == group]
    return sum(tokens for tokens, _ in own) / sum(took for _, took in own)


def summarise(peer: Peer, texts: list[list[int]], seconds: list[float], truths: list[list[int]]) -> Figures:
    """Summarise a peer. seconds: each question's median. truths: the reference's texts up to their ends."""
    tokens = sum(len(text) for text in texts)
    same = [common_prefix(text, truth) for text, truth in zip(texts, truths, strict=True)]
    return {
        "tokens": tokens,
        "tokens_per_second": round(tokens / sum(seconds), 2),
        "ms_per_token": round(1000 * sum(seconds) / tokens, 3),
        "weights_megabytes": round(peer.megabytes, 1),
        "weights_gigabytes_per_second": round(peer.megabytes * tokens / sum(seconds) / 1000, 2),
        "same_until_divergence": round(sum(same) / sum(len(truth) for truth in truths), 4),
        "same_answers": sum(shared == len(truth) for shared, truth in zip(same, truths, strict=True)),
    }


def ended(text: list[int], eos: frozenset[int]) -> list[int]:
    """Return the text up to and including its first end-of-answer token."""
    return text[: next((place + 1 for place, token in enumerate(text) if token in eos), len(text))]


def show(figures: Figures, console: Console) -> None:
    table = Table(title=f"greedy decoding, {figures['machine']}", title_justify="left")
    columns = ("", "tok/s", "ms", "MB read", "GB/s", f"same as {REFERENCE}", "of all", "as plain")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for name, row in figures["peers"].items():
        table.add_row(
            name,
            f"{row['tokens_per_second']:.1f}",
            f"{row['ms_per_token']:.1f}",
            f"{row['weights_megabytes']:.0f}",
            f"{row['weights_gigabytes_per_second']:.1f}",
            f"{100 * row['same_until_divergence']:.1f} %",
            f"{row['same_answers']} of {figures['questions']}",
            f"{row['same_as_plain']} of {figures['questions']}" if "same_as_plain" in row else "",
        )
    console.print(table)
    for name, row in figures["peers"].items():
        if ratios := row.get("over_plain"):
            by_group = ", ".join(f"{group} {ratio:.2f}" for group, ratio in ratios.items())
            console.print(f"{name} over plain: {by_group}", soft_wrap=True)
    if figures["left_out"]:
        console.print(f"no llama.cpp: {figures['left_out']}", style="yellow", soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_arguments(
        parser, "prompts", "target", "drafter", "threads", count=8, max_new_tokens=64, json=Path("build/peers.json")
    )
    parser.set_defaults(drafter=None)  # the target's, if there is one: trees need it
    parser.add_argument(
        "--llama-python", metavar="PYTHON", help="interpreter with llama-cpp-python; without: this one, or no such row"
    )
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="adds this project on a single device")
    parser.add_argument("--gguf", type=Path, help="llama.cpp's file (default: the one the default target is made from)")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", default=[], help="rows whose names contain one of these words, and float32"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of every answer, of which the median counts")
    options = parser.parse_args(argv)
    console = Console()
    return conclude(lambda: run(options, console), lambda figures: show(figures, console), options.json, console)


def run(options: argparse.Namespace, console: Console) -> Figures:
    threads = options.threads or torch.get_num_threads()
    with ExitStack() as stack:
        llamas, left_out = open_llamas(options, threads, stack)
        engines = [EnginePeer(_settings(options, dtype, threads)) for dtype in ("bfloat16", "float32")]
        peers: list[Peer] = [*engines, TransformersPeer(_settings(options, "bfloat16", threads))]
        lab = engines[0].lab
        longest = lab.verifier.max_context - options.max_new_tokens
        questions, too_long = read_questions(options.prompts, options.count, lab.encode, longest)
        prompts, groups = [question.prompt for question in questions], [question.group for question in questions]
        # 8 bits a weight instead of the first engine's 16
        peers = [*llamas, *open_devices(options, engines[0].megabytes / 2, threads, stack), *peers]
        if options.only:
            wanted = [*options.only, REFERENCE]
            peers = [peer for peer in peers if any(word in peer.name for word in wanted)]
        for peer in peers:  # kernels are compiled at the first call
            peer.answer(prompts[0], 2)
        measured = measure(peers, prompts, options.max_new_tokens, options.repeats, engines[0].eos, console, groups)
    return {
        "machine": describe_device(lab.device),
        "options": {key: value for key, value in vars(options).items() if isinstance(value, int | str)},
        "llama_cpp_python": llamas[0].version if llamas else None,
        "left_out": left_out,
        "questions": len(prompts),
        "too_long": too_long,
        "peers": measured,
    }


def open_devices(options: argparse.Namespace, megabytes: float, threads: int, stack: ExitStack) -> list[DevicePeer]:
    """Open this project on a single device, in each mode, with a target of `megabytes`; none without a bundle.

    The target computes every prompt anew, as for a new question: drafters read it meanwhile. The stack closes them.
    """
    if options.bundle is None:
        return []
    bundle = open_bundle(options.bundle)

    def server(lookup: str) -> LocalVerifier:
        settings: dict[str, Any] = {"engine": "onnx", "threads": threads, "prefix_cache": "off", "lookup": lookup}
        return stack.enter_context(LocalVerifier.load(bundle, options.target, options.drafter, **settings))

    usual, plain = server("auto"), server("off")
    devices = [
        DevicePeer(name, bundle, of, megabytes, threads, mode)
        for name, of, mode in (
            (PLAIN, plain, Arm.STREAM),
            (f"{PLAIN}, stream", usual, Arm.STREAM),
            (f"{PLAIN}, trees", usual, Arm.TREE),
            (f"{PLAIN}, own choice", usual, None),
        )
    ]
    for device in devices:
        stack.enter_context(device.runtime)
    return devices


def open_llamas(options: argparse.Namespace, threads: int, stack: ExitStack) -> tuple[list[LlamaPeer], str | None]:
    """Open llama.cpp without and with lookup, or none with the reason: it is left out unless requested.

    The stack closes them.
    """
    gguf = options.gguf or TargetSource.resolve(options.target).path
    if options.gguf is None and not gguf.is_file():
        if options.llama_python:
            raise PeerError(f"{options.target} is not made from a GGUF file; give --gguf FILE for llama.cpp")
        return [], f"{options.target} is not made from a GGUF file; give --gguf FILE"
    try:
        python = options.llama_python or sys.executable
        llamas = [
            stack.enter_context(closing(LlamaPeer(python, gguf, threads, 4096, lookup)))
            for lookup in (0, LOOKUP_TOKENS)
        ]
        return llamas, None
    except PeerError as error:
        if options.llama_python:
            raise
        return [], f"{error}, or give --llama-python"


def _settings(options: argparse.Namespace, dtype: Any, threads: int) -> Settings:
    return Settings(
        model=options.target,
        drafter=options.drafter,
        dtype=dtype,
        device="cpu",
        threads=threads,
        tree_budget=1,
        max_sessions=4,
        max_model_len=4096,
        kv_tokens=8192,
    )


if __name__ == "__main__":
    sys.exit(main())
