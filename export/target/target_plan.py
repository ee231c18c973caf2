"""The plan of a target bundle, with its sizes and needs, made before anything heavy starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from export.places import lacking
from export.target.target_options import TargetOptions
from export.train.prompts import read_prompts
from outrider_core.protocol.wire import MAX_TOKENS
from outrider_core.targets.bundle import GRAPH_FILE, MANIFEST_FILE
from outrider_core.targets.config import TargetConfig, UnsupportedTarget
from outrider_core.targets.source import TargetError

#: prompts for the target without --prompts
PROMPTS_FILE = Path(__file__).parents[1] / "prompts.txt"
#: memory of the process itself
BASE_BYTES = 500_000_000
#: bytes in memory per weight of the embedding while it is written, and float32 copies of the layer in progress
WRITTEN_BYTES, LAYER_COPIES = 3, 4
#: processor seconds per weight: for rounding it, and per token of the comparison (a 2.5 GHz Xeon)
ROUNDING, COMPARING = 1.5e-7, 2e-10
#: memory of a graph's weights while it is loaded, as a multiple of their size on disk (measured)
LOADED = {4: 4.5, 8: 1.5, 32: 2.0}
#: number format of the weights
FORMATS = {
    4: "4-bit weights in blocks of 32, embedding and LM head 8 bits, calibrated on the target's own answers",
    8: "8-bit weights",
    32: "float32 weights",
}


@dataclass(frozen=True)
class TargetPlan:
    """Sizes in bytes, processor time in seconds. prompts: for comparing the copy with the model."""

    options: TargetOptions
    config: TargetConfig
    prompts: list[str]
    bundle_bytes: int
    disk_bytes: int
    memory_bytes: int
    seconds: float
    compared: bool


def make_plan(options: TargetOptions) -> TargetPlan:
    """Read the target's files, refuse what is impossible, and estimate. Raises TargetError with one clear line."""
    _check_output(options.output_dir)
    source = options.target
    if source.prepared:
        raise TargetError(f"{source.name} is a target bundle already; give the model that it was made from")
    try:
        config = source.shape()
    except UnsupportedTarget as error:
        raise TargetError(f"{source.name}: {error}") from None
    size, layer = bundle_bytes(config, options.bits), layer_bytes(config)
    first = {4: 32, 8: 8}[options.bits] if options.calibrated else 0  # bits of the copy that writes the answers
    kept = bundle_bytes(config, first) if first else 0
    compared = options.compare and options.bits < 32
    prompts = [turns[0] for turns in read_prompts(options.prompts or [PROMPTS_FILE])]
    read = options.answer_tokens * len(prompts) if compared else 0
    return TargetPlan(
        options,
        config,
        prompts=prompts,
        bundle_bytes=size,
        disk_bytes=size + kept,
        memory_bytes=BASE_BYTES
        + max(
            int(LOADED[options.bits] * size),  # one copy is loaded at a time
            int(LOADED[first] * kept) if first else 0,
            WRITTEN_BYTES * config.vocab_size * config.hidden_size + LAYER_COPIES * layer,
        ),
        seconds=config.linear_weights * (ROUNDING + COMPARING * read),
        compared=compared,
    )


def layer_bytes(config: TargetConfig) -> int:
    """Return the memory of one layer's weights in float32."""
    table = config.hidden_size * config.vocab_size
    return 4 * (config.linear_weights - table) // config.num_hidden_layers


def bundle_bytes(config: TargetConfig, bits: int) -> int:
    """Estimate the size of a target bundle on disk."""
    table = config.vocab_size * config.hidden_size
    positions = 4 * min(config.max_position_embeddings, MAX_TOKENS) * config.head_dim
    other = positions + 5_000_000  # the tokenizer's files and the graph
    if bits == 8:
        return config.linear_weights + 2 * table + other
    if bits == 32:
        return 4 * (config.linear_weights + (0 if config.tie_word_embeddings else table)) + other
    eight = table * (1 if config.tie_word_embeddings else 2)
    return int((config.linear_weights - table) * (0.5 + 3 / 32) + eight * (1 + 2 / 32)) + other


def check_resources(plan: TargetPlan) -> None:
    """Raise TargetError if disk or memory is too small."""
    remedy = "close other programs" + (", or add --no-compare" if plan.compared else "")
    if why := lacking(plan.options.output_dir, plan.disk_bytes, plan.memory_bytes, remedy):
        raise TargetError(why)


def show_plan(plan: TargetPlan, console: Console) -> None:
    options, config = plan.options, plan.config
    table = Table(title=f"target bundle of {options.target.name}", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how")
    table.add_row("target", f"{config.family}, {config.linear_weights / 1e6:.0f} million weights in linear layers")
    table.add_row("bundle", f"about {plan.bundle_bytes / 1e6:.0f} MB: {FORMATS[options.bits]}")
    table.add_row("memory", f"about {plan.memory_bytes / 1e9:.1f} GB")
    calibrated = "; to calibrate takes many times that" if options.calibrated else ""
    table.add_row("time", f"about {plan.seconds / 60:.1f} processor minutes{calibrated}")
    table.add_row("disk", f"about {plan.disk_bytes / 1e9:.2f} GB while it is made, in {options.output_dir.parent}")
    compared = "with the same weights in float32" if plan.compared else "not compared"
    table.add_row("compared", compared if options.bits < 32 else "nothing: other formats are compared with this one")
    console.print(table)


def _check_output(output: Path) -> None:
    taken = not output.is_dir() or any(output.iterdir()) if output.exists() else False
    if taken and not ((output / MANIFEST_FILE).is_file() and (output / GRAPH_FILE).is_file()):
        raise TargetError(f"{output} exists and is not a target bundle; choose an empty or new --output-dir")
