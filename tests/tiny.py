"""Tiny random targets and drafters, and the oracle: plain decoding. Shared by the tests of several rooms."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from outrider_core.models.drafter_files import save_drafter
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target
from outrider_core.protocol.constraint import Rules, adjusted
from outrider_core.protocol.sampling import Sampling, draw
from outrider_core.targets.identity import model_identity
from tests.device import DEVICE

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
#: more families, and variants with a window of fewer tokens than texts have -> config class, what differs from llama's
VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mistral-local": (MistralConfig, {"sliding_window": 7}),
    "qwen2-windows": (Qwen2Config, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-windows": (
        Qwen3Config,
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True},
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 7}),
    "granite": (
        GraniteConfig,
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        {
            "layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 64,
            "position_embedding_type": "rope", "mamba_n_heads": 4, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        },
    ),
    "ministral3": (
        Ministral3Config,
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "olmo2": (Olmo2Config, {}),
    "phi3": (
        Phi3Config,
        {
            "sliding_window": 7, "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {"sliding_window": 7, "query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}  # fmt: skip
EOS = 3
TEMPERATURE = 0.8  # of tiny drafters' confidence


def tiny_model(
    family: str = "llama",
    seed: int = 0,
    vocab: int = 199,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    rope: dict[str, Any] | None = None,
    positions: int = 512,
) -> Any:
    """A random causal LM in eval mode whose logits are spread enough to make sampling matter.

    rope: parameters of its rotary embedding, in the spelling of config.json.
    """
    kind, more = copy.deepcopy(VARIANTS.get(family) or (FAMILIES[family], {"sliding_window": None}))
    if family == "phi3":
        factors = (head_dim or hidden // heads) // 4
        more["rope_parameters"] |= {"short_factor": [1.5] * factors, "long_factor": [3.0] * factors}
    config = kind(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
        **more,
        **({"rope_parameters": {"rope_theta": 10_000.0, **rope}} if rope else {}),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.35)
    return model.requires_grad_(False).eval()


def tiny_target(model: Any, eos_ids: tuple[int, ...] = (EOS,)) -> Target:
    """The model as a loaded Target on DEVICE; its own copy, since a verifier replaces the attention."""
    return Target(copy.deepcopy(model).to(DEVICE), None, "tiny", Path("."), "tiny-target", eos_ids)


def tiny_drafter_config(
    model: Any, target_hash: str = "tiny-target", seed: int = 0, draft_ids: Tensor | None = None
) -> tuple[MoAConfig, dict[str, Tensor]]:
    """Random MoA drafter for the model: (config, tensors under the checkpoint's names).

    It drafts `draft_ids`, by default the first 64 tokens.
    """
    ids = torch.arange(64) if draft_ids is None else draft_ids
    config = MoAConfig.for_target(model.config, target_hash, layers=3, draft_vocab=len(ids), max_context=256)
    config = replace(config, confidence_temperature=TEMPERATURE)
    torch.manual_seed(seed)
    moa = MoA(config)
    with torch.no_grad():
        for parameter in moa.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    moa.adopt(copy.deepcopy(model).float(), ids)
    return config, moa.trained()


def tiny_tokenizer(vocab: int = 199) -> PreTrainedTokenizerFast:
    """Words w4, w5, ... split at spaces, behind <pad>, <s>, <unk> and </s>; with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "<unk>": 2, "</s>": EOS, **{f"w{i}": i for i in range(4, vocab)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = "<s> {% for message in messages %}{{ message['content'] }} </s> {% endfor %}"
    return tokenizer


JSON_TEXT = ['{"name": "ab", "n": [1, 20, -3], "ok": true, "no": false, "x": null}', "[[{}, {}]]", '"a", "b"]}']


def json_tokenizer(vocab: int = 320) -> PreTrainedTokenizerFast:
    """Every byte, and merges of JSON's punctuation, behind <pad>, <s>, <unk> and </s>; with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<pad>", "<s>", "<unk>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=names, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    inner.train_from_iterator(JSON_TEXT * 3, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = "<s>{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
    return tokenizer


def save_tiny_target(folder: Path, model: Any | None = None, tokenizer: Any | None = None) -> str:
    """Write model (default: a float32 llama) and tokenizer (default: words) as a target folder; returns its hash."""
    model = tiny_model(dtype=torch.float32) if model is None else model
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer(model.config.vocab_size)).save_pretrained(folder)
    return model_identity(folder)


def save_tiny_drafter(folder: Path, model: Any, target_hash: str, draft_ids: Tensor | None = None) -> None:
    """Write a random drafter folder for the model."""
    config, tensors = tiny_drafter_config(model, target_hash, draft_ids=draft_ids)
    save_drafter(folder, config, tensors, {"note": "random, for tests"})


@torch.inference_mode()
def plain_decode(
    model: Any,
    ids: Sequence[int],
    sampling: Sampling,
    max_new: int,
    eos_ids: Iterable[int] = (EOS,),
    max_context: int = 1 << 30,
    rules: Rules | None = None,
) -> list[int]:
    """The oracle: new tokens of plain decoding, a full forward without any cache for every token."""
    tokens, stop = list(ids), set(eos_ids)
    while len(tokens) < min(len(ids) + max_new, max_context):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        values = logits.numpy()
        if rules:
            rules.follow(tokens)
            values = adjusted(values, rules.adjustment())
        tokens.append(draw(values, sampling, len(tokens)))
        if tokens[-1] in stop:
            break
    return tokens[len(ids) :]


def arrays_of(half: torch.nn.Module) -> dict[str, Any]:
    """A module's tensors by name in numpy; they share its memory."""
    return {name: tensor.detach().numpy() for name, tensor in half.state_dict().items()}
