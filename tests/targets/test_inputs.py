"""Models as people have them, by name: each computes what transformers computes, or is refused in one line.

Damage and single keys are in test_weights, test_gguf, test_config, test_quantised and test_broken_files; text in
test_pre_tokenizers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.answers import write_answers
from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.convert import make_target_bundle
from outrider_core.targets.families import REFUSED
from outrider_core.targets.gguf_file import GgufFile
from outrider_core.targets.quality import compare
from outrider_core.targets.source import TargetSource
from outrider_core.targets.streamed import final_states, head_logits
from outrider_core.targets.weights import GgufWeights, open_weights
from tests.targets.gguf_files import (
    LLAMA,
    llama_arrays,
    llama_fields,
    random_arrays,
    tokenizer_fields,
    write_folder,
    write_gguf,
)
from tests.targets.plain import skip_unless_exact
from tests.tiers import first
from tests.tiny import FAMILIES, VARIANTS, tiny_model, tiny_tokenizer

IDS = list(range(5, 45))
LONG = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA_3 = {**LONG, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: what tiny_model changes
SHAPES: dict[str, dict[str, Any]] = {
    "untied head": {},
    "tied head": {"tied": True},
    "one key head": {"kv_heads": 1},
    "a key head for each query head": {"kv_heads": 4},
    "wide heads": {"head_dim": 16},
    "linear positions": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "dynamic positions": {"rope": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn positions": {"rope": {"rope_type": "yarn", **LONG}},
    "llama3 positions": {"rope": {"rope_type": "llama3", **LLAMA_3}},
}


def old_spelling(folder: Path) -> None:
    """`rope_theta` beside `rope_scaling` and its "type", as folders before transformers 5 have it."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    if (kind := rope.pop("rope_type")) != "default":
        values["rope_scaling"] = {"type": kind, **rope}
    path.write_text(json.dumps(values))


def without_defaults(folder: Path) -> None:
    """A config.json that leaves out what transformers adds, such as Mistral's window of 4,096 tokens."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    sparse = {name: value for name, value in values.items() if name not in ("sliding_window", "tie_word_embeddings")}
    path.write_text(json.dumps(sparse))


def in_a_hub_cache(folder: Path) -> None:
    """Each file is a link to a blob."""
    blobs = folder / "blobs"
    blobs.mkdir()
    for number, path in enumerate(each for each in sorted(folder.iterdir()) if each.is_file()):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), folder))


def consolidated_beside(folder: Path) -> None:
    """The same weights under their makers' own names, as Mistral publishes them."""
    save_file({"tok_embeddings.weight": np.ones((3, 3), np.float32)}, folder / "consolidated.safetensors")


def as_it_is(folder: Path) -> None:
    """Nothing is changed."""


#: how the folder is saved, and what happens to it then
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Path], None]]] = {
    "shards": ({"max_shard_size": "20KB"}, as_it_is),
    "shards, consolidated beside": ({"max_shard_size": "20KB"}, consolidated_beside),
    "consolidated beside": ({}, consolidated_beside),
    "hub cache": ({"max_shard_size": "20KB"}, in_a_hub_cache),
    "old spelling": ({}, old_spelling),
    "few keys": ({}, without_defaults),
}


def same_as_transformers(folder: Path) -> None:
    weights, config = open_weights(folder)
    found = head_logits(weights, config, final_states(weights, config, [IDS])[0])
    with torch.inference_mode():
        wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([IDS])).logits[0]
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape(tmp_path: Path, family: str, shape: str) -> None:
    tiny_model(family, dtype=torch.float32, **SHAPES[shape]).save_pretrained(tmp_path)
    same_as_transformers(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_in_the_old_spelling(tmp_path: Path, family: str, kind: str) -> None:
    tiny_model(family, dtype=torch.float32, **SHAPES[f"{kind} positions"]).save_pretrained(tmp_path)
    old_spelling(tmp_path)
    same_as_transformers(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout(tmp_path: Path, family: str, layout: str) -> None:
    options, change = LAYOUTS[layout]
    tiny_model(family, dtype=torch.float32).save_pretrained(tmp_path, **options)
    change(tmp_path)
    same_as_transformers(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_a_number_format(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    tiny_model(family, dtype=dtype).save_pretrained(tmp_path)
    same_as_transformers(tmp_path)


@pytest.mark.parametrize("biases", ["attention_bias", "mlp_bias"])
def test_biases_of_a_llama(tmp_path: Path, biases: str) -> None:
    values = {**LLAMA, biases: True}
    write_folder(tmp_path, values, random_arrays(TargetConfig.from_json(values)))
    same_as_transformers(tmp_path)


def test_mistrals_window_counts_when_its_key_is_left_out() -> None:
    values = {**LLAMA, "model_type": "mistral", "max_position_embeddings": 32_768}
    assert TargetConfig.from_json(values).sliding_window == 4096


@pytest.mark.parametrize(
    "kind", [kind for kind in GGML_QUANT_SIZES if not re.fullmatch(r"[IF]\d+", kind.name)], ids=lambda kind: kind.name
)
def test_a_gguf_files_number_format(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Every one: whole and a few rows, or refused by name."""
    count, size = GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 256, (12, 512 // count * size), np.uint8)
    path = write_gguf(tmp_path / "model.gguf", {}, {"weight": stored}, kinds={"weight": kind})
    file = GgufFile(path)
    try:
        wanted = dequantize(stored, kind)
    except NotImplementedError:
        with pytest.raises(UnsupportedTarget, match=f"tensor weight is stored as {kind.name}, which is not supported"):
            file.values("weight")
        return
    np.testing.assert_array_equal(file.values("weight"), wanted)
    np.testing.assert_array_equal(file.values("weight", slice(5, 9)), wanted[5:9])


def matches(found: GgufWeights, values: dict[str, Any]) -> None:
    for name, array in random_arrays(TargetConfig.from_json(values)).items():
        np.testing.assert_array_equal(found.read(name), array)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_gguf_files_version(tmp_path: Path, version: int) -> None:
    arrays = llama_arrays(random_arrays(TargetConfig.from_json(LLAMA)))
    path = write_gguf(tmp_path / "model.gguf", llama_fields(), arrays)
    content = path.read_bytes()
    path.write_bytes(content[:4] + version.to_bytes(4, "little") + content[8:])
    if version == 4:
        with pytest.raises(BrokenTarget, match="version 4; 2 and 3 are read"):
            GgufWeights(path)
    else:
        matches(GgufWeights(path), LLAMA)


def test_a_gguf_file_of_llama_3(tmp_path: Path) -> None:
    """Llama 3.2: a tied head, its own rule for text, divisors of frequencies, and two ends."""
    values = {**LLAMA, "tie_word_embeddings": True}
    options = {"rope_type": "llama3", **LLAMA_3}
    rope = TargetConfig.from_json({**values, "rope_scaling": options}).rope
    divisors = 10_000.0 ** -(np.arange(0, 8, 2) / 8) / rope.inverse_frequencies(8)[0]
    stored = llama_arrays(random_arrays(TargetConfig.from_json(values)))
    stored["rope_freqs.weight"] = divisors.astype(np.float32)
    tokens = tokenizer_fields(pre="llama-bpe", bos_token_id=267, eos_token_id=266, eot_token_id=268)
    path = write_gguf(tmp_path / "model.gguf", llama_fields(tokens), stored)
    source = TargetSource.resolve(str(path))
    found = source.gguf()
    matches(found, values)
    assert found.eos_ids == [266, 268]
    for table, wanted in zip(source.shape().rope.tables(256, 8), rope.tables(256, 8), strict=True):
        np.testing.assert_allclose(table, wanted, atol=1e-5)


def test_a_gguf_file_of_mistral_7b(tmp_path: Path) -> None:
    """A llama there, with sentence pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    fill = [f"[control_{number}]" for number in range(300 - len(pieces))]
    tokens = {
        "model": "llama", "tokens": [*pieces, *fill], "scores": [0.0] * 259 + [-3.0, -2.0, -1.0] + [0.0] * len(fill),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 3 + [3] * len(fill), "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0,
    }  # fmt: skip
    fields = llama_fields(
        {f"tokenizer.ggml.{name}": value for name, value in tokens.items()}, rope__freq_base=1e6, vocab_size=300
    )
    path = write_gguf(tmp_path / "model.gguf", fields, llama_arrays(random_arrays(TargetConfig.from_json(LLAMA))))
    found = TargetSource.resolve(str(path)).gguf()
    matches(found, LLAMA)
    assert (found.config.rope.theta, found.eos_ids) == (1e6, [2])


def test_attention_scale_of_a_gguf_file_is_obeyed(tmp_path: Path) -> None:
    arrays = llama_arrays(random_arrays(TargetConfig.from_json(LLAMA)))
    path = write_gguf(tmp_path / "model.gguf", llama_fields(attention__scale=0.5), arrays)
    assert GgufWeights(path).config.score_scale == 0.5


#: what people run elsewhere, by its names in config.json and in GGUF files
OTHERS = {
    **{name: why for why, names in REFUSED.items() for name in names.split()},
    **dict.fromkeys(("stablelm", "internlm2", "internlm3", "gpt2", "phi", "phi2", "falcon", "gemma2"), "supported: "),
    **dict.fromkeys(("glm4", "chatglm", "starcoder2", "exaone4", "cohere2", "hunyuan-dense"), "supported: "),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_that_is_not_computed_is_refused_by_name(tmp_path: Path, name: str) -> None:
    says = f"{re.escape(repr(name))} is not supported .*{OTHERS[name]}"
    with pytest.raises(UnsupportedTarget, match=says):
        TargetConfig.from_json({**LLAMA, "model_type": name})
    if name not in ("gemma3", "mistral3"):  # text models there
        with pytest.raises(UnsupportedTarget, match=says):
            GgufWeights(write_gguf(tmp_path / "model.gguf", {}, {}, family=name))


def large_biases(model: Any) -> None:
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.bias.normal_(0, 20)


def huge_weights(model: Any) -> None:
    """Beyond float16's range; the next product takes the size away."""
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.mul_(1e6)
        layer.self_attn.o_proj.weight.mul_(1e-6)


def small_embeddings(model: Any) -> None:
    """The smaller ones that are refused are in test_exact."""
    model.get_input_embeddings().weight.mul_(0.01)


#: numbers that are hard to round: the family, what is done to a model, and its shape
ODD: dict[str, tuple[str, Callable[[Any], None], dict[str, Any]]] = {
    "usual numbers": ("llama", lambda model: None, {}),
    "large biases of queries and keys": ("qwen2", large_biases, {}),
    "weights beyond 16 bits": ("llama", huge_weights, {}),
    "small embeddings": ("llama", small_embeddings, {}),
    "odd sizes": ("llama", lambda model: None, {"hidden": 36, "head_dim": 10}),
}
#: most nats a token by which a copy may differ; the weights are noise, of which 4 bits leave little
MOST = {32: 1e-6, 8: 0.03, 4: 0.6}


@pytest.mark.parametrize("bits", MOST)
@pytest.mark.parametrize("name", first(2, ODD))
def test_a_copy_of_odd_numbers_is_near(tmp_path: Path, name: str, bits: int) -> None:
    skip_unless_exact(bits)
    family, change, shape = ODD[name]
    model = tiny_model(family, dtype=torch.float32, **shape)
    change(model)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    source = TargetSource.resolve(str(tmp_path / "model"))
    bundle = make_target_bundle(source, tmp_path / "bundle", 256, bits=bits)
    answers = write_answers(bundle, ["w4 w5", "w7"], 60, Sampling(temperature=1.0))
    quality = compare(bundle, *open_weights(source.path), answers)
    print(name, bits, quality)
    assert quality.tokens >= 60 and quality.divergence < MOST[bits]
