"""Write a bundle: the device half as an ONNX file, tokenizer, chat template and manifest, all checked.

The folder is written aside and renamed when everything in it has been proved to load and to agree with the
eager model, so a half-written bundle never carries the final name.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from rich.console import Console
from safetensors.torch import save_file
from transformers import DynamicCache

from edge_runtime.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    BundleError,
    EngineEntry,
    FileEntry,
    Manifest,
    open_bundle,
)
from edge_runtime.engines.onnx import OnnxEngine
from models.moa import SERVER_PREFIXES, DeviceHalf, MoAConfig, ServerHalf, device_half, load_drafter, server_half
from models.target import Target, load_target
from protocol.rows import RowShape, pack_rows, unpack_rows

OPSET = 20
#: int8 weights share one scale per this many inputs: one scale per output and step-wide activation scales (dynamic
#: quantisation) stayed below TOP1_BOUND with the default drafter
BLOCK = 64
#: MatMulNBits computes in int8; without it weights are unpacked to float32 first, which is much slower
INT8_ACTIVATIONS = 4
ENGINE_FILE = "drafter.onnx"
DRAFT_IDS_FILE = "draft_ids.u32"
#: the server half, beside the bundle for whoever runs the verifier; the manifest does not list it, so an app may
#: leave it out
ENCODER_FILE = "encoder.safetensors"
#: least share of draft steps on `SAMPLE` whose most likely token must agree with the eager model
TOP1_BOUND = 0.9
#: what the bundle is checked on: a question and an answer, drafted 1 to 6 tokens ahead all along
SAMPLE = [
    {"role": "user", "content": "Why does bread rise, and what can go wrong?"},
    {
        "role": "assistant",
        "content": "Bread rises because yeast eats the sugars in the dough and gives off carbon dioxide. The gas is "
        "caught in a net of gluten, which forms when flour and water are kneaded together. If the water is too hot, "
        "the yeast dies and the dough stays flat. If the dough rests for too long, the net tears and the loaf falls "
        "in the oven. Here is a simple list of things to check:\n\n1. The yeast is fresh.\n2. The water is warm, not "
        "hot.\n3. The dough has doubled in size before it is baked.\n",
    },
]
INPUTS = ["tokens", "positions", "wanted", "sa_mask", "sa_keys", "sa_values", "rows"]
OUTPUTS = ["logits", "new_keys", "new_values"]


def write_bundle(target_name: str, drafter: Path, output: Path, quant: str = "int8") -> dict[str, Any]:
    """Export `drafter` for `target_name` to the folder `output` and return its report.

    quant: "int8" (weights int8 in blocks of 64, activations int8, embedding int8 per token) or "none" (float32).
    Raises BundleError, TargetError or DrafterError with one clear line; `output` is then as it was.
    """
    taken = not output.is_dir() or any(output.iterdir()) if output.exists() else False
    if taken and not (output / MANIFEST).is_file():
        raise BundleError(f"{output} exists and is no bundle; choose an empty or new --output-dir")
    console = Console(stderr=True)
    with console.status("loading target and drafter"):
        target = load_target(target_name, dtype="float32")
        config, tensors, drafter_hash = load_drafter(drafter)
        _check_fit(target, config, drafter)
        half = device_half(config, tensors, target.model)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        with console.status(f"exporting the device half to ONNX ({quant})"):
            _export_onnx(half, config, aside, quant)
        tensors["draft_ids"].numpy().astype("<u4").tofile(aside / DRAFT_IDS_FILE)
        _copy_tokenizer(target, aside)
        _write_manifest(target, config, drafter_hash, quant, aside)
        encoder = {k: v.half() for k, v in tensors.items() if k.startswith(SERVER_PREFIXES)}
        save_file(encoder, aside / ENCODER_FILE, metadata={"drafter_hash": drafter_hash})
        with console.status("checking the bundle against the eager model"):
            report = _report(half, server_half(config, tensors), target, aside, quant)
        (aside / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        (aside / "report.md").write_text(_markdown(report))
        if report["parity"]["top1_agreement"] < TOP1_BOUND:
            raise BundleError(
                f"the exported model agrees with the eager one on only {report['parity']['top1_agreement']:.0%} of "
                f"steps (bound {TOP1_BOUND:.0%}); try --quant none"
            )
        if output.exists():
            shutil.rmtree(output)
        aside.chmod(0o755)
        aside.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    size = report["files"][ENGINE_FILE] / 1e6
    console.print(
        f"wrote {output}: {ENGINE_FILE} {size:.1f} MB, top-1 agreement {report['parity']['top1_agreement']:.3f}, "
        f"8-wide step {report['step_ms']['8']['p50']:.1f} ms; loads with EdgeRuntime.from_bundle({str(output)!r})"
    )
    return report


def _check_fit(target: Target, config: MoAConfig, drafter: Path) -> None:
    if config.target_hash != target.model_hash:
        raise BundleError(
            f"{drafter} was trained on target {config.target_hash}, but {target.name} is {target.model_hash}; "
            "give the target it was trained on, or train a drafter for this one"
        )
    if not target.eos_ids:
        raise BundleError(f"{target.name} names no eos_token_id, so no answer would ever end; add it to config.json")
    if not target.tokenizer.chat_template:
        raise BundleError(f"{target.name} has no chat template; add chat_template.jinja to its folder")


def example_inputs(config: MoAConfig, width: int, past: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random inputs of one draft step, in the order of INPUTS, with the shapes of DeviceHalf.forward."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return (
        torch.randint(0, config.vocab_size, (width,), generator=generator),
        torch.arange(past, past + width),
        torch.arange(width),
        torch.full((width, past + width), 0.0).triu(past + 1) + torch.full((width, past + width), -1e9).triu(past + 1),
        normal(past, config.sa_kv_heads, config.head_dim),
        normal(past, config.sa_kv_heads, config.head_dim),
        normal(rows, 2, config.ca_kv_heads, config.head_dim),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters warn about their own inner workings; what matters here is checked afterwards."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _export_onnx(half: DeviceHalf, config: MoAConfig, folder: Path, quant: str) -> None:
    width, past, rows = (torch.export.Dim(name) for name in ("width", "past", "rows"))
    wanted = torch.export.Dim("wanted")
    shapes = (
        {0: width}, {0: width}, {0: wanted}, {0: width, 1: torch.export.Dim.AUTO}, {0: past}, {0: past}, {0: rows},
    )  # fmt: skip
    if quant == "int8":
        half = copy.deepcopy(half)
        half.embedding = Int8Embedding(half.embedding.weight.detach())  # type: ignore[assignment]
    exact = folder / ("exact.onnx" if quant != "none" else ENGINE_FILE)
    inputs = list(example_inputs(config, 5, 7, 9))
    inputs[2] = torch.tensor([0, 2, 4])
    with _quiet():
        torch.onnx.export(
            half, tuple(inputs), str(exact), input_names=INPUTS, output_names=OUTPUTS, opset_version=OPSET,
            dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False, optimize=True,
        )  # fmt: skip
    onnx.checker.check_model(str(exact))
    if quant == "int8":
        model = onnx.load(exact)
        del model.graph.value_info[:]  # the exporter's shapes predate its own constant folding
        settings = DefaultWeightOnlyQuantConfig(
            block_size=BLOCK, is_symmetric=True, accuracy_level=INT8_ACTIVATIONS, bits=8
        )
        with _quiet():
            quantizer = MatMulNBitsQuantizer(model, algo_config=settings)
            quantizer.process()
        quantizer.model.save_model_to_file(str(folder / ENGINE_FILE))
        exact.unlink()


class Int8Embedding(torch.nn.Module):
    """A token embedding in int8 with one scale per token: tokens [...] int64 -> float32 [..., width]."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens].float() * self.scale[tokens]


def _copy_tokenizer(target: Target, folder: Path) -> None:
    target.tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(target.tokenizer.chat_template, encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise BundleError(f"{target.name}: its tokenizer writes no {name}; a fast tokenizer is needed")


def _write_manifest(target: Target, config: MoAConfig, drafter_hash: str, quant: str, folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files[path.name] = FileEntry(digest, path.stat().st_size)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        target=target.name if not Path(target.name).is_dir() else Path(target.name).name,
        target_hash=target.model_hash,
        drafter_hash=drafter_hash,
        vocab_size=config.vocab_size,
        eos_ids=list(target.eos_ids),
        max_context=config.max_context,
        hidden_size=config.hidden_size,
        sa_kv_heads=config.sa_kv_heads,
        ca_kv_heads=config.ca_kv_heads,
        head_dim=config.head_dim,
        draft_vocab_size=config.draft_vocab_size,
        draft_ids_file=DRAFT_IDS_FILE,
        engines={"onnx": EngineEntry(ENGINE_FILE, quant)},
        files=files,
    )
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


def sample_steps(half: ServerHalf, target: Target) -> list[tuple[torch.Tensor, ...]]:
    """Draft steps on `SAMPLE`, as inputs of DeviceHalf.forward: behind every sixth root, six tokens ahead.

    Rows are the server half's, through int8 as on the wire.
    """
    config = half.config
    ids = list(target.tokenizer.apply_chat_template(SAMPLE, return_dict=False))[: config.max_context]
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    with torch.inference_mode():
        cache = DynamicCache(config=target.config)
        target.model.model(tokens[None], past_key_values=cache, use_cache=True)
        layers = [cache.layers[layer] for layer in config.target_layers]
        kv = torch.stack([torch.stack([x.keys[0], x.values[0]], 1).permute(2, 0, 1, 3).flatten(1) for x in layers], 1)
        exact = half(kv.float(), positions).numpy()
    rows = torch.from_numpy(unpack_rows(pack_rows(exact), RowShape(config.ca_kv_heads, config.head_dim)))
    empty = torch.zeros(0, config.sa_kv_heads, config.head_dim)
    steps: list[tuple[torch.Tensor, ...]] = []
    for root in range(6, len(ids) - 6, 6):
        end = root + 6
        mask = torch.full((end, end), -1e9).triu(1)
        steps.append((tokens[:end], positions[:end], positions[root:end], mask, empty, empty, rows[:root]))
    return steps


def _report(half: DeviceHalf, server: ServerHalf, target: Target, folder: Path, quant: str) -> dict[str, Any]:
    """Open the bundle as an app would, compare with the eager model and time draft steps."""
    bundle = open_bundle(folder)
    began = time.perf_counter()
    engine = OnnxEngine(bundle)
    load_ms = (time.perf_counter() - began) * 1e3
    exact, got = [], []
    for inputs in sample_steps(server, target):
        with torch.inference_mode():
            exact.append(half(*inputs)[0].numpy())
        got.append(engine.step(*(x.numpy() for x in inputs))[0])
    eager, exported = np.concatenate(exact), np.concatenate(got)
    first = eager.argmax(-1)
    width = min(4, eager.shape[1])
    top4 = np.argpartition(-exported, width - 1, axis=-1)[:, :width]
    error = np.abs(exported - eager)
    return {
        "quant": quant,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "load_ms": round(load_ms, 1),
        "parity": {
            "steps": len(eager),
            "top1_agreement": round(float((exported.argmax(-1) == first).mean()), 4),
            "eager_top1_in_exported_top4": round(float((top4 == first[:, None]).any(-1).mean()), 4),
            "mean_abs_logit_error": round(float(error.mean()), 5),
            "max_abs_logit_error": round(float(error.max()), 5),
        },
        "step_ms": {str(width): _time_step(engine, half.config, width) for width in (1, 8, 32)},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__, "torch": torch.__version__},
    }


def _time_step(engine: OnnxEngine, config: MoAConfig, width: int) -> dict[str, float]:
    inputs = [x.numpy() for x in example_inputs(config, width, 256, 255)]
    times = []
    for _ in range(25):
        began = time.perf_counter()
        engine.step(*inputs)
        times.append((time.perf_counter() - began) * 1e3)
    p50, p95 = np.percentile(times[5:], [50, 95])
    return {"p50": round(float(p50), 2), "p95": round(float(p95), 2)}


def _markdown(report: dict[str, Any]) -> str:
    lines = ["# Bundle report", "", f"Measured on {report['machine']}.", "", "| file | MB |", "|---|---|"]
    lines += [f"| {name} | {size / 1e6:.2f} |" for name, size in report["files"].items()]
    lines += ["", "| figure | value |", "|---|---|", f"| weights | {report['quant']} |"]
    lines += [f"| load time | {report['load_ms']} ms |"]
    lines += [f"| {name.replace('_', ' ')} | {value} |" for name, value in report["parity"].items()]
    for width, ms in report["step_ms"].items():
        lines.append(f"| step, {width} tokens behind 256, p50 / p95 | {ms['p50']} / {ms['p95']} ms |")
    return "\n".join(lines) + "\n"
