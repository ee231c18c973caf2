"""Whatever is changed in a model's files, they are read, or refused in one line: nothing else is raised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.gguf_tokenizer import write_tokenizer
from outrider_core.targets.weights import GgufWeights, folder_weights
from tests.targets.gguf_files import LLAMA, llama_arrays, llama_fields, random_arrays, write_folder, write_gguf

SMALL = {**LLAMA, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
#: a mutation: where, as a share of the bytes; what stands there then; how many are left out
MUTATIONS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=9), st.integers(0, 9)), min_size=1, max_size=4
)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mutated(content: bytes, mutations: list[tuple[float, bytes, int]], upto: int) -> bytes:
    """Of the first `upto` bytes, which hold what is interpreted."""
    for share, new, gone in mutations:
        at = int(share * min(upto, len(content)))
        content = content[:at] + new + content[at + gone :]
    return content


def read_whole(weights: Any, config: TargetConfig) -> None:
    for name, shape in config.tensors().items():
        assert weights.read(name).shape == shape


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    arrays = llama_arrays(random_arrays(TargetConfig.from_json(SMALL)))
    keys = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "attention__key_length": 4}
    fields = llama_fields(rope__dimension_count=4, **keys)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", fields, arrays).read_bytes()


@quick
@given(mutations=MUTATIONS, upto=st.sampled_from([200, 1000, 14_000]))
def test_a_gguf_file(gguf: bytes, tmp_path: Path, mutations: list[tuple[float, bytes, int]], upto: int) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(mutated(gguf, mutations, upto))
    try:
        weights = GgufWeights(path)
        read_whole(weights, weights.config)
        assert all(isinstance(each, int) for each in weights.eos_ids)
        write_tokenizer(weights.fields, tmp_path)
    except (BrokenTarget, UnsupportedTarget) as error:
        assert "\n" not in str(error)


def test_the_gguf_file_is_whole(gguf: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf)
    weights = GgufWeights(tmp_path / "a.gguf")
    read_whole(weights, weights.config)


@quick
@given(mutations=MUTATIONS, upto=st.sampled_from([8, 2000]))
def test_a_safetensors_file(tmp_path: Path, mutations: list[tuple[float, bytes, int]], upto: int) -> None:
    if not (whole := tmp_path / "whole").is_dir():
        write_folder(whole, SMALL, random_arrays(TargetConfig.from_json(SMALL)))
        write_folder(tmp_path / "broken", SMALL, {})
    content = mutated((whole / "model.safetensors").read_bytes(), mutations, upto)
    (tmp_path / "broken" / "model.safetensors").write_bytes(content)
    try:
        read_whole(*folder_weights(tmp_path / "broken"))
    except (BrokenTarget, UnsupportedTarget) as error:
        assert "\n" not in str(error)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    *SMALL, "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers", "attention_bias", "mlp_bias", "hidden_act", "partial_rotary_factor",
]  # fmt: skip


@quick
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3", "mistral"]),
    changes=st.dictionaries(st.sampled_from(KEYS), ANYTHING, min_size=1, max_size=3),
)
def test_a_configuration(family: str, changes: dict[str, Any]) -> None:
    values = json.loads(json.dumps({**SMALL, "model_type": family, **changes}))
    try:
        config = TargetConfig.from_json(values)
    except (BrokenTarget, UnsupportedTarget) as error:
        assert "\n" not in str(error)
        return
    assert config.num_hidden_layers > 0


OPTIONS = [
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
    "attention_factor", "mscale", "mscale_all_dim", "truncate",
]  # fmt: skip


@quick
@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    options=st.dictionaries(st.sampled_from(OPTIONS), ANYTHING | st.floats(0.1, 1000), min_size=1),
)
def test_rotary_positions(kind: str, options: dict[str, Any]) -> None:
    try:
        rope = TargetConfig.from_json({**SMALL, "rope_scaling": {"rope_type": kind, **options}}).rope
        assert rope.tables(4, 4)[0].shape == (4, 2)
    except (BrokenTarget, UnsupportedTarget) as error:
        assert "\n" not in str(error)
