"""The tokenizer and chat template inside a GGUF file, as the files of a model folder. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.weights import GgufWeights

#: token types of GGUF (llama.cpp, `llama_token_type`)
_CONTROL = 3


def check_tokenizer(source: GgufWeights) -> None:
    """Raise UnsupportedTarget for other kinds than byte-level BPE."""
    kind = source.field("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedTarget(f"a GGUF file with a tokenizer of kind {kind!r} is not supported; use the model folder")


def write_tokenizer(source: GgufWeights, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    The tokenizer is the one that `transformers` makes of the file. Raises UnsupportedTarget: see `check_tokenizer`.
    """
    check_tokenizer(source)
    tokens: list[str] = source.field("tokenizer.ggml.tokens")
    pairs = [merge.partition(" ") for merge in source.field("tokenizer.ggml.merges")]
    model = BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[(left, right) for left, _, right in pairs],
        continuing_subword_prefix="",
        end_of_word_suffix="",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])  # type: ignore[assignment]
    types: list[int] = source.field("tokenizer.ggml.token_type")
    special = [token for token, each in zip(tokens, types, strict=True) if each == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # `save` raises no OSError
    named = {
        f"{name}_token": tokens[source.field(f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if source.field(f"tokenizer.ggml.{key}_token_id") is not None
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if template := source.field("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template)
