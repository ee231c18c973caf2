"""The plan of an export, with its sizes and needs, made before anything heavy starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from export.bundle.blocks import BITS, Profile, packed_bytes, rare_bits
from export.bundle.bundle_options import BundleOptions
from export.bundle.export_target import ExportTarget
from export.places import lacking
from export.target.target_plan import bundle_bytes
from outrider_core.drafting.bundle import MANIFEST, BundleError
from outrider_core.models.drafter_arrays import Arrays, check_target, read_drafter
from outrider_core.models.moa_config import MoAConfig
from outrider_core.targets.bundle import MANIFEST_FILE
from outrider_core.targets.config import TargetConfig, UnsupportedTarget
from outrider_core.targets.source import TargetError, TargetSource

FORMATS = {"onnx": "drafter.onnx", "executorch": "drafter.pte"}
#: bits of embedding and LM head without --embedding-bits: the head decides the argmax, so not 4
EMBEDDING_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 8}
#: ExecuTorch's and others' names for the same
QUANT_NAMES = {"8da8w": "int8", "8da4w": "int4", "none": "fp32", **{name: name for name in BITS}}
#: memory of the process itself, and copies of an engine's weights in memory while it is lowered (measured)
BASE_BYTES = 1_200_000_000
COPIES = {"onnx": 4, "executorch": 6}
#: share of the free memory that the target may take in float32 for the comparison; beyond it, rows are random
TARGET_SHARE = 0.6


@dataclass(frozen=True)
class BundlePlan:
    """The steps of a bundle's export. Sizes in bytes.

    compared: engines are compared with the eager model, for which torch is needed. load_target: on answers that the
    target writes now, otherwise on random rows.
    """

    options: BundleOptions
    profile: Profile
    target: ExportTarget
    drafter: Path
    config: MoAConfig
    tensors: Arrays
    drafter_hash: str
    engine_bytes: dict[str, int]
    step_bytes: int
    disk_bytes: int
    memory_bytes: int
    compared: bool
    load_target: bool
    understudy_bytes: int = 0


def make_plan(options: BundleOptions, target: ExportTarget, drafter: Path) -> BundlePlan:
    """Open the drafter in its folder, refuse impossible options, and estimate.

    Raises BundleError, DrafterError or TargetError with one clear line.
    """
    profile = _check_options(options)
    config, tensors, drafter_hash = read_drafter(drafter)
    check_ends(target)
    check_target(config.target_hash, target.name, target.model_hash, drafter)
    if options.max_context is not None:
        if not 1 <= options.max_context <= config.max_context:
            raise BundleError(
                f"--max-context {options.max_context}: the drafter was made for 1..{config.max_context} tokens"
            )
        config = replace(config, max_context=options.max_context)
    wide = config.hidden_size
    on_server = ("cross_attention.self_attn.k_proj.", "cross_attention.self_attn.v_proj.")
    own = (name for name in tensors if name.startswith(("self_attention.", "cross_attention.")))
    body = sum(tensors[name].size for name in own if not name.startswith(on_server))
    head, embedding = config.draft_vocab_size * wide, config.vocab_size * wide
    tied = target.config.tie_word_embeddings
    step_bytes = packed_bytes(body, profile.bits) + packed_bytes(head, profile.embedding_bits)
    drafted = packed_bytes(head, profile.embedding_bits)
    total = step_bytes + drafted + packed_bytes(embedding - head, rare_bits(profile.embedding_bits))
    shared = drafted if tied else 0
    engine_bytes = {name: total - (shared if name == "onnx" else 0) for name in options.format}
    tables = 4 * (embedding + (0 if tied and head == embedding else head) + (0 if tied else embedding))
    compared = options.compare and find_spec("torch") is not None
    if options.check and not compared:
        raise BundleError("--check compares with the eager model in torch; run: pip install 'outrider[export]'")
    load_target = compared and target_fits(target.config)
    understudy = understudy_bytes(options.understudy, options.understudy_bits) if options.understudy else 0
    lowering = tables + max(COPIES[name] * size for name, size in engine_bytes.items())
    return BundlePlan(
        options, profile, target, drafter, config, tensors, drafter_hash, engine_bytes, step_bytes,
        disk_bytes=sum(engine_bytes.values()) + 50_000_000 + (0 if _links(options) else understudy),
        memory_bytes=BASE_BYTES + max(lowering, tables + _float32_bytes(target.config) if load_target else 0),
        compared=compared,
        load_target=load_target,
        understudy_bytes=understudy,
    )  # fmt: skip


def _links(options: BundleOptions) -> bool:
    """Return whether the understudy will be hard links to a copy in the cache."""
    source = options.understudy
    if source is None or source.prepared:
        return False
    copy, output = source.bundle_folder(options.understudy_bits), options.output_dir.absolute()
    there = next(path for path in (output, *output.parents) if path.exists())
    return (copy / MANIFEST_FILE).is_file() and copy.stat().st_dev == there.stat().st_dev


def understudy_bytes(source: TargetSource, bits: int) -> int:
    """Return the size of an understudy's folder. Raises BundleError if there can be none."""
    if source.prepared:
        return sum(path.stat().st_size for path in source.path.iterdir())
    try:
        return bundle_bytes(source.shape(), bits)
    except UnsupportedTarget as error:
        raise BundleError(f"--understudy {source.name}: {error}") from None
    except TargetError as error:
        raise BundleError(f"--understudy {error}") from None


def _check_options(options: BundleOptions) -> Profile:
    if unknown := [name for name in options.format if name not in FORMATS]:
        raise BundleError(f"--format {unknown[0]} is unknown (known: {', '.join(FORMATS)})")
    if not options.format or len(set(options.format)) < len(options.format):
        raise BundleError("--format must name each engine once, such as onnx,executorch")
    quant = QUANT_NAMES[options.quant]
    profile = Profile(quant, options.embedding_bits or EMBEDDING_BITS[quant])
    if "executorch" in options.format:
        if find_spec("torch") is None or find_spec("executorch") is None:
            raise BundleError("--format executorch needs the ExecuTorch exporter; run: pip install 'outrider[export]'")
        from export.bundle.to_executorch import check_backend  # torch

        check_backend(options.backend, profile)
    return profile


def check_output(output: Path) -> None:
    """Raise BundleError if a bundle must not be written to this folder."""
    taken = not output.is_dir() or any(output.iterdir()) if output.exists() else False
    if taken and not (output / MANIFEST).is_file():
        raise BundleError(f"{output} exists and is not a bundle; choose an empty or new --output-dir")


def check_ends(target: ExportTarget) -> None:
    """Raise BundleError if no answer of the target would end, or no conversation can be written."""
    if not target.eos_ids:
        raise BundleError(f"{target.name} names no eos_token_id, so no answer would ever end; add it to config.json")
    if fault := target.chat.fault():
        raise BundleError(f"{target.name}: {fault}; put a chat_template.jinja into its folder")


def target_fits(target: TargetConfig) -> bool:
    """Return whether the target can be run here in float32, to compare on its own answers."""
    return BASE_BYTES + _float32_bytes(target) < TARGET_SHARE * psutil.virtual_memory().available


def _float32_bytes(target: TargetConfig) -> int:
    """Return the memory of the whole target in float32, except for its norms."""
    table = 0 if target.tie_word_embeddings else target.vocab_size * target.hidden_size
    return 4 * (target.linear_weights + table)


def check_resources(plan: BundlePlan) -> None:
    """Raise BundleError if disk or memory is too small."""
    remedy = "close other programs, or export one --format at a time"
    if why := lacking(plan.options.output_dir, plan.disk_bytes, plan.memory_bytes, remedy):
        raise BundleError(why)


def show_plan(plan: BundlePlan, console: Console) -> None:
    options, config, profile = plan.options, plan.config, plan.profile
    table = Table(title=f"export of {plan.drafter} for {plan.target.name}", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how")
    for name, size in plan.engine_bytes.items():
        backend = f", {options.backend}" if name == "executorch" else ""
        how = f"{profile.quant} linears, {profile.embedding_bits}-bit embedding and LM head{backend}"
        table.add_row(FORMATS[name], f"about {size / 1e6:.0f} MB: {how}")
    if options.understudy:
        how = f"{options.understudy.name}, {options.understudy_bits}-bit linears, in a separate folder"
        table.add_row("understudy", f"about {plan.understudy_bytes / 1e6:.0f} MB: {how}")
    table.add_row("vocabulary", f"{config.vocab_size} tokens, of which the device drafts {config.draft_vocab_size}")
    table.add_row("context", f"up to {config.max_context} tokens")
    table.add_row("memory", f"about {plan.memory_bytes / 1e9:.1f} GB")
    table.add_row("disk", f"about {plan.disk_bytes / 1e9:.2f} GB in {options.output_dir}")
    if plan.load_target:
        compared = "the target's own answers"
    elif plan.compared:
        compared = "random feature rows, as the target does not fit into memory: bounds are not enforced; run "
        compared += "`python -m export check` where it does"
    else:
        compared = "nothing; `python -m export check` compares with the eager model, where torch is installed"
    table.add_row("compared on", compared)
    console.print(table)
