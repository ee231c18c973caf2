"""A GGUF file is read as it is meant: each tensor and each key is used, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.gguf_tokenizer import check_tokenizer
from outrider_core.targets.source import TargetError, TargetSource
from outrider_core.targets.weights import GgufWeights, folder_weights
from tests.targets.gguf_files import (
    LLAMA,
    Arrays,
    llama_arrays,
    llama_fields,
    random_arrays,
    tokenizer_fields,
    write_folder,
    write_gguf,
)

CONFIG = TargetConfig.from_json(LLAMA)


@pytest.fixture
def arrays() -> Arrays:
    return random_arrays(CONFIG)


def written(folder: Path, arrays: Arrays, tokenizer: dict[str, Any] | None = None, **keys: Any) -> Path:
    return write_gguf(folder / "model.gguf", llama_fields(tokenizer, **keys), llama_arrays(arrays))


def test_it_holds_what_the_folder_holds(tmp_path: Path, arrays: Arrays) -> None:
    ours = GgufWeights(written(tmp_path, arrays))
    theirs, config = folder_weights(write_folder(tmp_path / "folder", LLAMA, arrays))
    assert replace(ours.config, rms_norm_eps=config.rms_norm_eps) == config
    for name in config.tensors():
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "MXFP4"])
def test_quantised_tensors_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    from gguf.quants import dequantize, quantize

    config = TargetConfig.from_json({**LLAMA, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    format_ = GGMLQuantizationType[kind]
    plain = llama_arrays(random_arrays(config))
    stored = {name: quantize(each, format_) if each.ndim == 2 else each for name, each in plain.items()}
    kinds = {name: format_ for name, each in plain.items() if each.ndim == 2}
    keys = {
        "embedding_length": 256,
        "feed_forward_length": 256,
        "attention__key_length": 64,
        "rope__dimension_count": 64,
    }
    read = GgufWeights(write_gguf(tmp_path / "model.gguf", llama_fields(**keys), stored, kinds=kinds))
    expected = dequantize(stored["blk.1.ffn_down.weight"], format_).reshape(256, 256)
    np.testing.assert_array_equal(read.read("layers.1.mlp.down_proj"), expected)


@pytest.mark.parametrize("biases", ["attention", "output", "mlp"])
def test_biases_are_read(tmp_path: Path, arrays: Arrays, biases: str) -> None:
    parts = {"attention": "qkv", "output": "o", "mlp": ("gate", "up", "down")}[biases]
    room = "mlp" if biases == "mlp" else "self_attn"
    rng = np.random.default_rng(1)
    for layer in range(2):
        for part in parts:
            name = f"layers.{layer}.{room}.{part}_proj"
            arrays[f"{name}.bias"] = rng.normal(size=len(arrays[name])).astype(np.float32)
    weights = GgufWeights(written(tmp_path, arrays))
    assert (weights.config.attention_bias, weights.config.output_bias, weights.config.mlp_bias) == (
        biases == "attention", biases == "output", biases == "mlp",
    )  # fmt: skip
    for name, values in arrays.items():
        np.testing.assert_array_equal(weights.read(name), values)


def test_a_bias_of_one_layer_alone_is_refused_by_name(tmp_path: Path, arrays: Arrays) -> None:
    arrays["layers.1.self_attn.o_proj.bias"] = np.ones(32, np.float32)
    with pytest.raises(
        UnsupportedTarget, match=r"a tensor blk\.1\.attn_output\.bias, which a llama model does not have"
    ):
        GgufWeights(written(tmp_path, arrays))


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path, arrays: Arrays) -> None:
    fields, stored = llama_fields(), llama_arrays(arrays)
    for name in ("blk.0.attn_sinks.weight", "rope_factors_short.weight"):  # the latter comes with factors of long texts
        path = write_gguf(tmp_path / "model.gguf", fields, {**stored, name: np.ones(4, np.float32)})
        with pytest.raises(UnsupportedTarget, match=f"a tensor {name}"):
            GgufWeights(path)


def test_a_file_that_is_cut_short_is_refused_before_anything_is_read(tmp_path: Path, arrays: Arrays) -> None:
    path = written(tmp_path, arrays)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(TargetError, match=r"tensor \S+ is cut short; download the file again"):
        TargetSource.resolve(str(path)).shape()


def test_rotary_scaling_is_obeyed(tmp_path: Path, arrays: Arrays) -> None:
    def rope(**keys: Any) -> Any:
        return GgufWeights(written(tmp_path, arrays, **keys)).config.rope

    plain = rope().tables(256, 8)
    for keys in (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scaling__factor": 4.0},  # without a type
        {"rope__scale_linear": 4.0},
    ):
        for table, expected in zip(rope(**keys).tables(256, 8), plain, strict=True):
            np.testing.assert_allclose(table[::4], expected[:64], atol=1e-6)
    assert rope(rope__scaling__type="none", rope__scaling__factor=4.0) == rope()
    yarn = rope(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64,
        rope__scaling__yarn_beta_fast=16.0,
    )  # fmt: skip
    assert (yarn.kind, yarn.options) == (
        "yarn", {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    )  # fmt: skip


def test_rotary_factors_of_llama_3_are_obeyed(tmp_path: Path, arrays: Arrays) -> None:
    options = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    theirs = TargetConfig.from_json({**LLAMA, "rope_scaling": options}).rope
    inverse = 10_000.0 ** -(np.arange(0, 8, 2) / 8)
    stored = llama_arrays(arrays) | {
        "rope_freqs.weight": (inverse / theirs.inverse_frequencies(8)[0]).astype(np.float32)
    }
    ours = GgufWeights(write_gguf(tmp_path / "model.gguf", llama_fields(), stored)).config.rope
    for table, expected in zip(ours.tables(256, 8), theirs.tables(256, 8), strict=True):
        np.testing.assert_allclose(table, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rope__dimension_count": 4}, r"llama\.rope\.dimension_count 4 beside heads of 8"),
        ({"attention__value_length": 16}, r"llama\.attention\.value_length 16 beside"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5 is not supported"),
        ({"embedding_scale": 12.0}, r"llama\.embedding_scale = 12\.0 is not supported"),
        ({"attention__sliding_window": 64}, r"llama\.attention\.sliding_window = 64 is not supported"),
        ({"attention__causal": False}, r"llama\.attention\.causal = False"),
        ({"expert_count": 8}, r"llama\.expert_count = 8"),
        ({"of_tomorrow": 1}, r"llama\.of_tomorrow = 1"),
        ({"rope__scaling__type": "su"}, "rotary scaling of type 'su'"),
        ({"attention__head_count_kv": [2, 1]}, r"layers of different llama\.attention\.head_count_kv"),
    ],
)
def test_a_key_that_changes_something_is_refused_by_name(
    tmp_path: Path, arrays: Arrays, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedTarget, match=says):
        GgufWeights(written(tmp_path, arrays, **keys))


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path, arrays: Arrays) -> None:
    plain = GgufWeights(written(tmp_path, arrays)).config
    keys = {"logit_scale": 1.0, "expert_count": 0, "attention__causal": True, "attention__head_count": [4, 4]}
    assert GgufWeights(written(tmp_path, arrays, **keys)).config == plain


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"block_count": None}, r"its metadata lacks llama\.block_count"),
        ({"block_count": 3}, r"no tensor blk\.2\.attn_q\.weight, which a model of type 'llama' has"),
        ({"attention__head_count": "four"}, r"its metadata has 'four' for llama\.attention\.head_count"),
        ({"attention__head_count_kv": 4}, r"tensor blk\.0\.attn_k\.weight has the shape \[16, 32\]; by its conf"),
        ({"attention__head_count_kv": 3}, "4 heads, 3 key and value heads"),
        ({"embedding_length": 33}, "has the shape"),
    ],
)
def test_metadata_that_does_not_fit_is_one_line(
    tmp_path: Path, arrays: Arrays, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(BrokenTarget, match=says):
        GgufWeights(written(tmp_path, arrays, **keys))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "entries there that are not pairs"),
        ({"token_type": None}, "lacks tokenizer.ggml.token_type"),
        ({"token_type": [1.5] * 300}, "lacks tokenizer.ggml.token_type"),
        ({"merges": ["a b", "zz zz"]}, "its merges do not match its tokens: 'zz' is not one of them"),
        ({"token_type": [1, 1]}, "does not give every token a type"),
        ({"eos_token_id": 300}, "has 300 for tokenizer.ggml.eos_token_id"),
        ({"tokens": ["a"] * 300}, "token 'a' occurs twice"),
    ],
)
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, arrays: Arrays, changes: dict[str, Any], says: str) -> None:
    source = TargetSource.resolve(str(written(tmp_path, arrays, tokenizer_fields(**changes))))
    with pytest.raises(TargetError, match=says):
        source.shape()


def test_no_padding_token_is_none(tmp_path: Path, arrays: Arrays) -> None:
    fields = tokenizer_fields(padding_token_id=0xFFFFFFFF)
    check_tokenizer(fields)
    TargetSource.resolve(str(written(tmp_path, arrays, fields))).shape()


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"eos_token_id": 266}, [266]),
        ({"eos_token_id": 266, "eot_token_id": 268, "eom_token_id": 267}, [266, 267, 268]),
        ({"eos_token_id": 266, "template": TEMPLATE}, [266, 268]),
        ({"eos_token_id": None, "template": TEMPLATE}, [268]),
        ({"eos_token_id": 268}, [268]),
    ],
)
def test_an_answer_ends_at_every_token_that_ends_a_turn(
    tmp_path: Path, arrays: Arrays, fields: dict[str, Any], ends: list[int]
) -> None:
    template = fields.pop("template", None)
    stored = {**tokenizer_fields(**fields), "tokenizer.chat_template": template}
    assert GgufWeights(written(tmp_path, arrays, stored)).eos_ids == ends


@pytest.mark.parametrize("name", ["sha256-0123", "MODEL.GGUF", "folder/of/one.gguf"])
def test_a_file_is_known_by_what_it_holds(tmp_path: Path, arrays: Arrays, name: str) -> None:
    """Under the name of an Ollama blob, in capitals, and alone in a folder."""
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    written(tmp_path, arrays).rename(place)
    given = place.parent if "/" in name else place
    source = TargetSource.resolve(str(given))
    assert source.path == place and source.shape().family == "llama"


def test_a_folder_of_several_files_asks_which(tmp_path: Path, arrays: Arrays) -> None:
    for name in ("a.gguf", "b.gguf"):
        written(tmp_path, arrays).rename(tmp_path / name)
    with pytest.raises(TargetError, match=r"no config\.json there but 2 GGUF files; name one of them"):
        TargetSource.resolve(str(tmp_path))


def test_parts_and_other_byte_orders_are_refused(tmp_path: Path, arrays: Arrays) -> None:
    part = write_gguf(tmp_path / "part.gguf", {**llama_fields(), "split.count": 2}, llama_arrays(arrays))
    with pytest.raises(UnsupportedTarget, match="one part of a split GGUF file; join them"):
        GgufWeights(part)
    with pytest.raises(UnsupportedTarget, match="big-endian"):
        GgufWeights(write_gguf(tmp_path / "big.gguf", llama_fields(), llama_arrays(arrays), big=True))
    adapter = write_gguf(tmp_path / "a.gguf", {**llama_fields(), "general.type": "adapter"}, llama_arrays(arrays))
    with pytest.raises(UnsupportedTarget, match="of type 'adapter', not a model"):
        GgufWeights(adapter)
    mixture = write_gguf(tmp_path / "moe.gguf", {}, {}, family="qwen3moe")
    with pytest.raises(UnsupportedTarget, match=r"'qwen3moe' is not supported .*mixtures of experts; vLLM serves it"):
        GgufWeights(mixture)


def test_values_that_are_not_numbers_are_refused(tmp_path: Path, arrays: Arrays) -> None:
    arrays["layers.1.mlp.up_proj"][3, 4] = np.nan
    with pytest.raises(BrokenTarget, match=r"blk\.1\.ffn_up\.weight holds values that are not numbers"):
        GgufWeights(written(tmp_path, arrays)).read("layers.1.mlp.up_proj")
