"""`python -m export import`: a MoA checkpoint in the authors' layout (arXiv 2410.03804) -> a drafter folder.

The layout is that of github.com/huawei-noah/HEBO, branch mixture-of-attentions, and of its vLLM port: one folder
with `model.safetensors` (or shards and their index) and a `config.json` that is either the target's own, which may be
left out, or, for vLLM, has `model_type` "moa_spec". Weights keep their number format. Its tensors bear the names of
`outrider_core.models.moa`; E is the target's hidden size, H its heads, hd their width, G its key heads, D = 2 * G * hd:

| checkpoint, behind any one prefix      | drafter   | what it is                                               |
|----------------------------------------|-----------|----------------------------------------------------------|
| layer_self_attention.BLOCK             | same name | width D, H heads of D / H; positions are layer indices   |
| Ekv2E.weight [E, D], Ekv2E.bias [E]    | same name | behind the mean over layers                              |
| self_attention.BLOCK                   | same name | width E, H heads of hd                                   |
| cross_attention.BLOCK                  | same name | width E, H heads of hd; one input norm for queries and   |
|                                        |           | keys, so both halves get it                              |
| embed_tokens, lm_head, norm, layers.N, | left out  | frozen copies: the target's own are used                 |
| rotary_emb                             |           |                                                          |
| -                                      | draft_ids | the LM head's rows; default: the whole vocabulary        |

BLOCK is input_layernorm, self_attn.{q,k,v,o}_proj, post_attention_layernorm and mlp.{gate,up,down}_proj, each with a
`.weight`; key heads and MLP width may differ from block to block. The authors' layer self-attention reads every
target layer as [K_0|V_0|K_1|V_1|...], as `outrider_core.models.moa.ServerHalf` does, so nothing is permuted. There is
no null row.

Refused, because `outrider_core.models.moa` computes something else:

- target layer inference (the drafter re-uses the target's last N > 0 layers). A checkpoint need not mention it: the
  authors' trainer keeps N in its own settings only. Without a mention N = 0 is assumed, and noted;
- biases in the blocks. The authors' Qwen2 drafters have them: they are made of that family's own layers;
- rotary scaling (Llama 3.1 and later). The authors edit one shared config between the blocks, so self-attention gets
  the target's scaling, cross-attention and layer self-attention none;
- checkpoints without layer self-attention (the port's `disable_LSA`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.train.checkpoint import Checkpoint, first_line, open_checkpoint, read_tensors
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE
from outrider_core.models.drafter_files import save_drafter
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.models.target import head_dim_of, longest_text, model_folder
from outrider_core.targets.families import FAMILIES
from outrider_core.targets.source import TargetError, TargetSource

#: the authors trained on conversations cut at this length
TRAINED_CONTEXT = 2048
#: `model_type` in the config of a checkpoint converted for the authors' vLLM port
PORT_TYPE = "moa_spec"
FLOATS = ("F64", "F32", "BF16", "F16")


def import_checkpoint(
    source: str | Path,
    target: TargetSource,
    output: Path,
    *,
    draft_vocab_ids: Tensor | None = None,
    max_context: int | None = None,
) -> MoAConfig:
    """Write the checkpoint `source` as the drafter folder `output` for `target` and return its shapes.

    source: folder or Hugging Face id of a checkpoint in the authors' layout (see the module's table).
    target: only its config is read, so memory holds the drafter alone.
    draft_vocab_ids: [draft_vocab] integers, the token ids the device can propose, in the order of its LM head's
    rows; default: all. max_context: longest conversation, in tokens; default: the smaller of 2048 (what the authors
    trained on) and the target's.

    The drafter reads all target layers and has no null row. `output` may be new, empty, or a drafter folder without
    other files, which is replaced. Raises DrafterError or TargetError with one clear line; `output` is then as it was.
    """
    _check_output(output)
    folder = model_folder(target)
    shape = _target_config(target.name, folder)
    checkpoint = open_checkpoint(source)
    _refuse_other_networks(checkpoint, shape)
    ids = _draft_ids(draft_vocab_ids, shape.vocab_size)
    config = _moa_config(checkpoint, shape, target.identity, len(ids), max_context)
    _check_tensors(checkpoint, config)
    notes = {
        "imported": True,
        "source": checkpoint.name,
        "target": target.shown_name,
        **({} if checkpoint.stated else {"config": "none, the target's was taken"}),
        "target_layer_inference": "0" if "target_layer_inference" in checkpoint.config else "0, not stated",
    }
    _write(output, config, {**read_tensors(checkpoint), "draft_ids": ids}, notes)
    return config


def _check_output(output: Path) -> None:
    if not output.exists() and not output.is_symlink():
        return
    names = {path.name for path in output.iterdir()} if output.is_dir() else {"a file"}
    if not names:
        return
    if not {CONFIG_FILE, WEIGHTS_FILE} <= names:
        raise DrafterError(f"{output} exists and is not a drafter folder; choose an empty or new --output-dir")
    if other := sorted(names - {CONFIG_FILE, WEIGHTS_FILE}):
        raise DrafterError(f"{output} also holds {', '.join(other)}, which replacing would delete; choose a new folder")


# the target


def _target_config(target: str, folder: Path) -> Any:
    """Return the target's transformers config, all defaults filled in."""
    from transformers import AutoConfig

    try:
        family = json.loads((folder / "config.json").read_text()).get("model_type")
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise TargetError(f"{target}: model type {family!r} is not supported (supported: {known})")
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except TargetError:
        raise
    except Exception as error:  # a broken config makes transformers raise many kinds
        raise TargetError(f"{target}: config.json in {folder} is broken: {first_line(error)}") from error


def _kv_width(shape: Any) -> int:
    return 2 * int(shape.num_key_value_heads) * head_dim_of(shape)


# what fits


def _refuse_other_networks(checkpoint: Checkpoint, shape: Any) -> None:
    """Refuse what `outrider_core.models.moa` would compute differently, and checkpoints of another target."""
    config, name = checkpoint.config, checkpoint.name
    if (layers := config.get("target_layer_inference")) not in (None, 0):
        raise DrafterError(
            f"{name}: it re-uses the target's last {layers} layers (target_layer_inference), which Outrider cannot "
            "draft with; import a checkpoint trained with 0"
        )
    for owner, values in ((name, config), ("the target", shape.to_dict())):
        if scaling := _rope_scaling(values):
            raise DrafterError(
                f"{owner}: rotary scaling {scaling!r}: the authors' self-attention then rotates by other angles than "
                "their cross-attention, which Outrider cannot do; train a drafter for this target instead"
            )
        if (act := values.get("hidden_act", "silu")) != "silu":
            raise DrafterError(f"{owner}: hidden_act is {act!r}, but a MoA drafter's is 'silu'; it cannot be imported")
    for tensor in checkpoint.tensors:
        if tensor.endswith(".bias") and tensor != "Ekv2E.bias":
            raise DrafterError(
                f"{name}: tensor {tensor}: Outrider's MoA blocks have no biases (the authors' Qwen2 drafters do); "
                "train a drafter for this target instead"
            )
    _check_target(checkpoint, shape)


def _rope_scaling(values: dict[str, Any]) -> str | None:
    """Return the kind of rotary scaling in a model config, in the old or the new spelling."""
    for key in ("rope_scaling", "rope_parameters"):
        stated = values.get(key)
        kind = (stated.get("rope_type") or stated.get("type")) if isinstance(stated, dict) else stated
        if kind not in (None, "default"):
            return str(kind)
    return None


def _rope_theta(values: dict[str, Any]) -> Any:
    return values.get("rope_theta") or (values.get("rope_parameters") or {}).get("rope_theta")


def _check_target(checkpoint: Checkpoint, shape: Any) -> None:
    """Check that the checkpoint's config is the target's, or the port's, whose fewer statements must agree."""
    config, port = checkpoint.config, checkpoint.config.get("model_type") == PORT_TYPE
    wanted = {name: getattr(shape, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")}
    wanted |= {"rms_norm_eps": shape.rms_norm_eps, "head_dim": head_dim_of(shape), "kv_hidden_size": _kv_width(shape)}
    if not port:  # its type is its own, and so are its layers and key heads: they count its two caches
        wanted |= {name: getattr(shape, name) for name in ("model_type", "num_hidden_layers", "num_key_value_heads")}
    stated = {name: config[name] for name in wanted if config.get(name) is not None}
    wanted["rope_theta"], stated["rope_theta"] = _rope_theta(shape.to_dict()), _rope_theta(config)
    for name, value in stated.items():
        if value is not None and value != wanted[name]:
            raise DrafterError(
                f"{checkpoint.name}: its config.json says {name} {value}, but the target has {wanted[name]}; "
                "give the target it was trained on"
            )


def _draft_ids(ids: Tensor | None, vocab: int) -> Tensor:
    """Return checked ids [draft_vocab] int32; all of the vocabulary for None."""
    if ids is None:
        return torch.arange(vocab, dtype=torch.int32)
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DrafterError(f"draft vocabulary: {list(ids.shape)} {ids.dtype} given, a list of token ids is needed")
    if ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) != len(ids):
        raise DrafterError(f"draft vocabulary: its ids must lie in 0..{vocab - 1}, each at most once")
    return ids.to(torch.int32)


def _moa_config(
    checkpoint: Checkpoint, shape: Any, target_hash: str, draft_vocab: int, max_context: int | None
) -> MoAConfig:
    longest = longest_text(shape)
    context = min(TRAINED_CONTEXT, longest) if max_context is None else max_context
    if not 1 <= context <= longest:
        raise DrafterError(f"max_context {context} does not fit the target; give 1 to {longest}")
    head_dim, heads, width = head_dim_of(shape), shape.num_attention_heads, _kv_width(shape)
    if width % heads:
        raise DrafterError(f"lsa_heads {heads}, the target's, must cut {width} into even head widths")
    config = MoAConfig(
        target_hash=target_hash,
        target_layers=tuple(range(shape.num_hidden_layers)),
        target_kv_heads=shape.num_key_value_heads,
        target_head_dim=head_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=shape.hidden_size,
        lsa_heads=heads,
        lsa_kv_heads=_key_heads(checkpoint, "layer_self_attention", width // heads),
        lsa_mlp=_mlp(checkpoint, "layer_self_attention"),
        heads=heads,
        head_dim=head_dim,
        sa_kv_heads=_key_heads(checkpoint, "self_attention", head_dim),
        sa_mlp=_mlp(checkpoint, "self_attention"),
        ca_kv_heads=_key_heads(checkpoint, "cross_attention", head_dim),
        ca_mlp=_mlp(checkpoint, "cross_attention"),
        rope_theta=float(_rope_theta(shape.to_dict())),
        norm_eps=shape.rms_norm_eps,
        max_context=context,
        null_row=False,
        final_norm=False,
    )
    config.check()
    return config


def _key_heads(checkpoint: Checkpoint, block: str, head_dim: int) -> int:
    name = f"{block}.self_attn.k_proj.weight"
    rows = _rows(checkpoint, name)
    if rows % head_dim or not rows:
        raise DrafterError(
            f"{checkpoint.name}: tensor {name} has {rows} rows, which is not a multiple of the head width {head_dim}"
        )
    return _stated(checkpoint, f"{block}_num_key_value_heads", rows // head_dim)


def _mlp(checkpoint: Checkpoint, block: str) -> int:
    rows = _rows(checkpoint, f"{block}.mlp.gate_proj.weight")
    return _stated(checkpoint, f"{block}_intermediate_size", rows)


def _rows(checkpoint: Checkpoint, name: str) -> int:
    if name not in checkpoint.tensors:
        raise DrafterError(f"{checkpoint.name}: tensor {name} is missing; get the checkpoint again")
    shape = checkpoint.tensors[name].shape
    if len(shape) != 2:
        raise DrafterError(f"{checkpoint.name}: tensor {name} has shape {list(shape)}, expected two dimensions")
    return shape[0]


def _stated(checkpoint: Checkpoint, key: str, found: int) -> int:
    """Return `found`, which the port's config must repeat if it states it."""
    if (stated := checkpoint.config.get(key)) not in (None, found):
        raise DrafterError(f"{checkpoint.name}: its config.json says {key} {stated}, but its tensors have {found}")
    return found


def _check_tensors(checkpoint: Checkpoint, config: MoAConfig) -> None:
    """Check that names, shapes and types are those of a MoA with these widths."""
    with torch.device("meta"):  # shapes without memory
        expected = {name: tuple(tensor.shape) for name, tensor in MoA(config).trained().items()}
    del expected["draft_ids"]
    for name, shape in expected.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise DrafterError(f"{checkpoint.name}: tensor {name} {list(shape)} is missing; get the checkpoint again")
        if stored.shape != shape:
            raise DrafterError(
                f"{checkpoint.name}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}; "
                "give the target it was trained on"
            )
        if stored.kind not in FLOATS:
            raise DrafterError(
                f"{checkpoint.name}: tensor {name} is {stored.kind}; only {', '.join(FLOATS)} can be imported"
            )
    if strange := sorted(checkpoint.tensors.keys() - expected.keys()):
        raise DrafterError(f"{checkpoint.name}: tensor {strange[0]} is in no MoA block; it cannot be imported")


def _write(output: Path, config: MoAConfig, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write the folder under another name, then swap it in: a half-written drafter never has the final name."""
    output = output.resolve()  # a link to a folder stays a link
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    new, old = aside / "new", aside / "old"
    try:
        save_drafter(new, config, tensors, notes, as_given=True)
        if output.exists():
            output.rename(old)
        new.rename(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
