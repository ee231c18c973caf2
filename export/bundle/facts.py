"""Metadata of engine files, and the bounds that a bundle promises."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import onnx

from outrider_core.drafting.bundle import Bundle, BundleError, Manifest
from outrider_core.drafting.drafter import MAX_WIDTH

#: texts that engines were compared on, in reports
TARGET_ANSWERS, RANDOM_ROWS = "the target's own answers", "random feature rows (the target does not fit into memory)"


def facts(manifest: Manifest) -> dict[str, Any]:
    """Return a runner's metadata, as constant methods of a .pte and properties of an ONNX model.

    Names follow ExecuTorch's LLM runners where they mean the same.
    """
    return {
        "get_format_version": manifest.format_version,
        "get_vocab_size": manifest.vocab_size,
        "get_draft_vocab_size": manifest.draft_vocab_size,
        "get_eos_ids": manifest.eos_ids,
        "get_max_context_len": manifest.max_context,
        "get_max_seq_len": MAX_WIDTH,
        "get_hidden_size": manifest.hidden_size,
        "get_sa_kv_heads": manifest.sa_kv_heads,
        "get_ca_kv_heads": manifest.ca_kv_heads,
        "get_head_dim": manifest.head_dim,
        "get_target_hash": manifest.target_hash,
        "get_drafter_hash": manifest.drafter_hash,
        "get_tokenizer_hash": manifest.tokenizer_hash,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
    }


def check_metadata(bundle: Bundle, name: str) -> None:
    """Raise BundleError if the engine file's own facts differ from the manifest."""
    path = bundle.path(bundle.manifest.engines[name].file)
    if name == "onnx":
        model = onnx.load(path, load_external_data=False)
        found = {
            prop.key: json.loads(prop.value) for prop in model.metadata_props if prop.key in facts(bundle.manifest)
        }
    else:
        from outrider_core.drafting.engines.executorch import ExecuTorchEngine

        found = ExecuTorchEngine(path).metadata
    for key, wanted in facts(bundle.manifest).items():
        if key not in found:
            raise BundleError(f"{path} lacks {key}, which an app's runner asks for; export the bundle again")
        if found[key] != wanted and [found[key]] != wanted:
            raise BundleError(f"{path} says {key} is {found[key]}, the manifest {wanted}; export the bundle again")


def broken_bounds(report: dict[str, Any], manifest: Manifest) -> list[str]:
    """Return one line for each bound of the manifest that the figures violate.

    Agreement on random rows is not a bound: logits there are closer together than a trained drafter's are.
    """
    if report.get("compared_on") == RANDOM_ROWS:
        report = {**report, "engines": {}}
    lines = []
    for name, entry in manifest.engines.items():
        figures = dict(report["engines"].get(name, {}).get("parity", {}))
        figures["acceptance_ratio"] = report.get("acceptance", {}).get("engines", {}).get(name, {}).get("ratio")
        for bound, least in msgspec.structs.asdict(entry.bounds).items():
            value = figures.get(bound)
            if value is not None and value < least:
                lines.append(f"{entry.file}: {bound.replace('_', ' ')} is {value:.3f}, its bound is {least}")
    return lines
