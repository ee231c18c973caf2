"""Checkpoints as the authors write them, and a place to import one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from export.train.reference_import import import_checkpoint
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.targets.source import TargetError, TargetSource
from tests.tiny import tiny_model

Array = NDArray[np.float64]
Refuse = Callable[..., str]

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB = 3, 64, 8, 2, 61
HEAD_DIM = HIDDEN // HEADS
#: one target layer's K and V of one token
WIDTH = 2 * KV_HEADS * HEAD_DIM
LSA_DIM = WIDTH // HEADS
#: (key heads, MLP width) of each block; no two alike, none the target's
BLOCKS = {"layer_self_attention": (4, 24), "self_attention": (2, 40), "cross_attention": (1, 56)}
LENGTH, ROOT = 9, 6
EPS, THETA = 1e-6, 10000.0


def block(name: str, width: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    kv_heads, mlp = BLOCKS[name]
    return {
        f"{name}.input_layernorm.weight": (width,),
        f"{name}.self_attn.q_proj.weight": (HEADS * head_dim, width),
        f"{name}.self_attn.k_proj.weight": (kv_heads * head_dim, width),
        f"{name}.self_attn.v_proj.weight": (kv_heads * head_dim, width),
        f"{name}.self_attn.o_proj.weight": (width, HEADS * head_dim),
        f"{name}.post_attention_layernorm.weight": (width,),
        f"{name}.mlp.gate_proj.weight": (mlp, width),
        f"{name}.mlp.up_proj.weight": (mlp, width),
        f"{name}.mlp.down_proj.weight": (width, mlp),
    }


SHAPES = {
    **block("self_attention", HIDDEN, HEAD_DIM),
    **block("cross_attention", HIDDEN, HEAD_DIM),
    **block("layer_self_attention", WIDTH, LSA_DIM),
    "Ekv2E.weight": (HIDDEN, WIDTH),
    "Ekv2E.bias": (HIDDEN,),
}


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Random, and in fp16 without loss."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.3 * noise if "norm" in name else noise * shape[-1] ** -0.5).half().float()
    return tensors


def training_config(target: Path) -> dict[str, Any]:
    """The authors' trainer saves the target's config, in the spelling of its transformers (before 4.46)."""
    config = json.loads((target / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    return {**config, "rope_scaling": None, "architectures": ["MOASpec"], "_name_or_path": "somebody/target"}


def port_config(target: Path) -> dict[str, Any]:
    """What the authors' script for their vLLM port makes of it."""
    config = training_config(target)
    gone = ("_name_or_path", "num_hidden_layers", "num_key_value_heads", "intermediate_size", "attention_bias")
    config = {key: value for key, value in config.items() if key not in gone}
    config.update(model_type="moa_spec", architectures=["MOASpecModel"], disable_LSA=False, kv_hidden_size=WIDTH)
    for name, (kv_heads, mlp) in BLOCKS.items():
        config |= {f"{name}_num_key_value_heads": kv_heads, f"{name}_intermediate_size": mlp}
    return config


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Place:
    """A target, its model, and a checkpoint for it that tests may spoil."""

    def __init__(self, root: Path, model: Any, target: Path) -> None:
        self.root, self.model, self.target, self.output = root, model, target, root / "drafters" / "imported"
        self.source, self.config, self.tensors = root / "snapshot.1390.pt", training_config(target), weights()

    def write(self) -> Place:
        write_checkpoint(self.source, self.config, self.tensors)
        return self

    def run(self, **options: Any) -> MoAConfig:
        return import_checkpoint(self.source, TargetSource.resolve(str(self.target)), self.output, **options)


def make_model(family: str = "llama", tied: bool = False, seed: int = 3) -> Any:
    sizes: dict[str, Any] = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS}
    model = tiny_model(family, seed, VOCAB, tied=tied, dtype=torch.float32, **sizes)
    with torch.no_grad():
        model.model.norm.weight.normal_(1, 0.5)  # applying it by mistake must show
    return model


def shard(folder: Path, tensors: dict[str, Tensor]) -> Path:
    names = sorted(tensors)
    parts = [names[start::3] for start in range(3)]
    files = {f"model-0000{number}-of-00003.safetensors": part for number, part in enumerate(parts, 1)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {n: f for f, part in files.items() for n in part}}))
    (folder / "model.safetensors").unlink()
    return index


def refusal(place: Place, source: str | Path | None = None, **options: Any) -> str:
    """The one line that the import is refused with; nothing may have been written."""
    existed = place.output.exists()
    with pytest.raises((DrafterError, TargetError)) as caught:
        import_checkpoint(
            place.source if source is None else source, TargetSource.resolve(str(place.target)), place.output, **options
        )
    assert "\n" not in str(caught.value)
    assert place.output.exists() == existed
    return str(caught.value)
