"""What making a target bundle will write and need, worked out before anything heavy starts. No torch."""

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

#: what the target is asked where no --prompts are given
PROMPTS_FILE = Path(__file__).parents[1] / "prompts.txt"
#: memory of the process itself and of what one layer takes to be rounded
BASE_BYTES = 500_000_000
#: a graph's weights that are in memory at once while it is loaded, over their size on disk (measured)
LOADED = {4: 4.5, 8: 1.5, 32: 2.0}
#: how the weights are stored
FORMATS = {
    4: "4-bit weights in blocks of 32, embedding and LM head 8 bits, calibrated on the target's own answers",
    8: "8-bit weights, calibrated on the target's own answers",
    32: "float32 weights",
}


@dataclass(frozen=True)
class TargetPlan:
    """Sizes in bytes. prompts: what both copies are asked. with_reference: a float32 copy is made on the way."""

    options: TargetOptions
    config: TargetConfig
    prompts: list[str]
    bundle_bytes: int
    disk_bytes: int
    memory_bytes: int
    with_reference: bool


def make_plan(options: TargetOptions) -> TargetPlan:
    """Look at the target's files, refuse what cannot work, and estimate. Raises TargetError with one clear line."""
    _check_output(options.output_dir)
    source = options.target
    if source.prepared:
        raise TargetError(f"{source.name} is a target bundle already; give the model that it was made from")
    try:
        config = source.shape()
    except UnsupportedTarget as error:
        raise TargetError(f"{source.name}: {error}") from None
    with_reference = options.bits < 32 and (options.compare or options.bits == 4)
    size = bundle_bytes(config, options.bits)
    reference = bundle_bytes(config, 32) if with_reference else 0
    loaded = LOADED[options.bits] * size + (LOADED[32] * reference)
    return TargetPlan(
        options,
        config,
        prompts=[turns[0] for turns in read_prompts(options.prompts or [PROMPTS_FILE])],
        bundle_bytes=size,
        disk_bytes=size + reference + (size if options.bits == 8 else 0),
        memory_bytes=int(BASE_BYTES + loaded),
        with_reference=with_reference,
    )


def bundle_bytes(config: TargetConfig, bits: int) -> int:
    """About what a target bundle takes on disk."""
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
    """Raise TargetError if disk or memory will not do."""
    remedy = "close other programs" + (", or add --no-compare" if plan.with_reference else "")
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
    table.add_row("disk", f"about {plan.disk_bytes / 1e9:.2f} GB while it is made, in {options.output_dir.parent}")
    compared = "with the same weights in float32" if plan.with_reference and options.compare else "not compared"
    table.add_row("compared", compared if options.bits < 32 else "it is what others are compared with")
    console.print(table)


def _check_output(output: Path) -> None:
    taken = not output.is_dir() or any(output.iterdir()) if output.exists() else False
    if taken and not ((output / MANIFEST_FILE).is_file() and (output / GRAPH_FILE).is_file()):
        raise TargetError(f"{output} exists and is not a target bundle; choose an empty or new --output-dir")
