"""Importing the authors' checkpoints: the formulas once more in plain numpy, and the folder that is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

import export.train.reference_import
from export.train.reference_import import import_checkpoint
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.moa import device_half, server_half
from outrider_core.models.moa_config import MoAConfig
from outrider_core.targets.identity import model_identity
from outrider_core.targets.source import TargetSource
from tests.export.checkpoints import (
    BLOCKS,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LENGTH,
    LSA_DIM,
    ROOT,
    SHAPES,
    THETA,
    VOCAB,
    WIDTH,
    Place,
    block,
    make_model,
    port_config,
    refusal,
    shard,
    weights,
)

Array = NDArray[np.float64]


# the authors' formulas, in plain loops


def norm(x: Array, weight: Array) -> Array:
    return x / math.sqrt(float((x * x).mean()) + EPS) * weight


def turn(head: Array, position: int) -> Array:
    """Rotary embedding: dimension i turns with dimension i + d/2."""
    out, half = head.copy(), len(head) // 2
    for i in range(half):
        angle = position * THETA ** (-2 * i / len(head))
        a, b = head[i], head[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


class Block:
    """One decoder layer of the checkpoint for one vector at a time."""

    def __init__(self, w: dict[str, Array], name: str, head_dim: int) -> None:
        self.w, self.name, self.head_dim = w, name, head_dim

    def weight(self, part: str) -> Array:
        return self.w[f"{self.name}.{part}.weight"]

    def normed(self, x: Array) -> Array:
        return norm(x, self.weight("input_layernorm"))

    def heads(self, kind: str, u: Array) -> Array:
        return (self.weight(f"self_attn.{kind}_proj") @ u).reshape(-1, self.head_dim)

    def key(self, u: Array, position: int) -> Array:
        return np.stack([turn(head, position) for head in self.heads("k", u)])

    def output(self, x: Array, position: int, keys: list[Array], values: list[Array]) -> Array:
        """x attends to all the keys; then the MLP; both with their residuals."""
        mixed = []
        for number, query in enumerate(self.heads("q", self.normed(x))):
            shared = number // (HEADS // len(keys[0]))
            scores = np.array([turn(query, position) @ key[shared] for key in keys]) / math.sqrt(self.head_dim)
            share = np.exp(scores - scores.max())
            mixed.append(sum(a * value[shared] for a, value in zip(share / share.sum(), values, strict=True)))
        x = x + self.weight("self_attn.o_proj") @ np.concatenate(mixed)
        u = norm(x, self.weight("post_attention_layernorm"))
        gate = self.weight("mlp.gate_proj") @ u
        result: Array = x + self.weight("mlp.down_proj") @ (
            gate / (1 + np.exp(-gate)) * (self.weight("mlp.up_proj") @ u)
        )
        return result


def reference_row(w: dict[str, Array], keys: Array, values: Array, position: int) -> Array:
    """One token's keys and values [layers, kv_heads, head_dim] of the target -> its cross-attention [K, V]."""
    lsa, ca = Block(w, "layer_self_attention", LSA_DIM), Block(w, "cross_attention", HEAD_DIM)
    layers = []
    for k, v in zip(keys, values, strict=True):
        pieces: list[Array] = []
        for head in range(KV_HEADS):
            pieces += [k[head], v[head]]
        layers.append(np.concatenate(pieces))
    lsa_keys = [lsa.key(lsa.normed(x), layer) for layer, x in enumerate(layers)]
    lsa_values = [lsa.heads("v", lsa.normed(x)) for x in layers]
    outputs = [lsa.output(x, layer, lsa_keys, lsa_values) for layer, x in enumerate(layers)]
    feature = w["Ekv2E.weight"] @ (sum(outputs) / len(outputs)) + w["Ekv2E.bias"]
    u = ca.normed(feature)  # the norm that the queries go through too
    return np.stack([ca.key(u, position), ca.heads("v", u)])


def reference_logits(w: dict[str, Array], embedded: Array, head: Array, rows: Array) -> Array:
    """Logits behind every token from ROOT on: all rows 0..ROOT-1 are visible, no final norm."""
    sa, ca = Block(w, "self_attention", HEAD_DIM), Block(w, "cross_attention", HEAD_DIM)
    keys = [sa.key(sa.normed(x), position) for position, x in enumerate(embedded)]
    values = [sa.heads("v", sa.normed(x)) for x in embedded]
    logits = []
    for position in range(ROOT, len(embedded)):
        x = sa.output(embedded[position], position, keys[: position + 1], values[: position + 1])
        logits.append(head @ ca.output(x, position, list(rows[:, 0]), list(rows[:, 1])))
    return np.stack(logits)


def reference(tensors: dict[str, Tensor], model: Any, tokens: Tensor) -> tuple[Array, Array]:
    """(rows [ROOT, 2, ca_kv_heads, head_dim], logits [LENGTH - ROOT, vocab]) of the checkpoint's own tensors."""
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    keys, values = (torch.stack(parts).double().numpy() for parts in cached(model, tokens))
    rows = np.stack([reference_row(w, keys[:, :, p], values[:, :, p], p) for p in range(ROOT)])
    embedded = model.get_input_embeddings().weight[tokens].double().numpy()
    return rows, reference_logits(w, embedded, model.get_output_embeddings().weight.double().numpy(), rows)


@torch.no_grad()
def cached(model: Any, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The target's keys and values, per layer [kv_heads, n, head_dim]."""
    cache = DynamicCache(config=model.config)
    model.model(tokens[None], cache=cache, use_cache=True)
    return [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]


def some_tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed))


# the same by the imported drafter


@torch.no_grad()
def imported(folder: Path, model: Any, tokens: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Array, Array]:
    """(rows, logits) as `reference` gives them, by the two halves of the drafter in `folder`."""
    config, tensors, _ = load_drafter(folder)
    server, device = server_half(config, tensors).to(dtype), device_half(config, tensors, model).to(dtype)
    both = [torch.stack([k, v], 1).permute(2, 0, 1, 3).flatten(1) for k, v in zip(*cached(model, tokens), strict=True)]
    kv = torch.stack([both[layer] for layer in config.target_layers], 1)[:ROOT].to(dtype)
    rows = server(kv, torch.arange(ROOT))
    seen = device.with_null_row(rows)
    empty = torch.zeros(0, config.sa_kv_heads, config.head_dim, dtype=dtype)
    causal = torch.full((LENGTH, LENGTH), -1e9, dtype=dtype).triu(1)
    steps = tokens, torch.arange(LENGTH), torch.arange(ROOT, LENGTH), causal, empty, empty
    logits = device(*steps, seen[:, 0], seen[:, 1])[0]
    return rows.double().numpy(), logits.double().numpy()


def assert_same(place: Place, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
    tokens = some_tokens()
    expected, got = reference(tensors, place.model, tokens), imported(place.output, place.model, tokens, dtype)
    for wanted, found in zip(expected, got, strict=True):
        assert np.abs(wanted).max() > 0.5
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_imported_drafter_computes_the_authors_formulas(
    tmp_path: Path, targets: dict[tuple[str, bool], tuple[Any, Path]], family: str, tied: bool, dtype: torch.dtype
) -> None:
    place = Place(tmp_path, *targets[family, tied]).write()
    config = place.run()
    assert config == load_drafter(place.output)[0]
    assert_same(place, place.tensors, dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_every_tensor_counts(place: Place, name: str) -> None:
    """Each tensor reaches the outputs, and reaches them as the authors' formulas say."""
    place.write().run()
    tokens = some_tokens()
    before = imported(place.output, place.model, tokens)
    tensor = place.tensors[name]
    flat = tensor.view(-1)
    flat[: len(flat) // 2] = (flat[: len(flat) // 2] + 0.5).half().float()
    place.write().run()
    after = imported(place.output, place.model, tokens)
    assert max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)) > 1e-3
    assert_same(place, place.tensors)


def test_shapes_and_notes(place: Place) -> None:
    assert place.write().run() == MoAConfig(
        target_hash=model_identity(place.target), target_layers=(0, 1, 2), target_kv_heads=KV_HEADS,
        target_head_dim=HEAD_DIM, vocab_size=VOCAB, draft_vocab_size=VOCAB, hidden_size=HIDDEN, lsa_heads=HEADS,
        lsa_kv_heads=4, lsa_mlp=24, heads=HEADS, head_dim=HEAD_DIM, sa_kv_heads=2, sa_mlp=40, ca_kv_heads=1, ca_mlp=56,
        rope_theta=THETA, norm_eps=EPS, max_context=512, null_row=False, final_norm=False,
    )  # fmt: skip
    stored, written = load_file(place.output / WEIGHTS_FILE), json.loads((place.output / CONFIG_FILE).read_text())
    assert stored.keys() == SHAPES.keys() | {"draft_ids"}
    assert stored.pop("draft_ids").tolist() == list(range(VOCAB))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert written["notes"] == {
        "imported": True, "source": "snapshot.1390.pt", "target": place.target.name,
        "target_layer_inference": "0, not stated",
    }  # fmt: skip


@pytest.mark.parametrize("kv_heads", [(8, 8, 8), (1, 4, 2), (2, 1, 8)])
def test_key_heads_of_each_block(place: Place, monkeypatch: pytest.MonkeyPatch, kv_heads: tuple[int, ...]) -> None:
    for (name, (_, mlp)), heads in zip(list(BLOCKS.items()), kv_heads, strict=True):
        monkeypatch.setitem(BLOCKS, name, (heads, mlp))
        head_dim, width = (LSA_DIM, WIDTH) if name.startswith("layer") else (HEAD_DIM, HIDDEN)
        for tensor, shape in block(name, width, head_dim).items():
            monkeypatch.setitem(SHAPES, tensor, shape)
    place.tensors = weights()
    config = place.write().run()
    assert (config.lsa_kv_heads, config.sa_kv_heads, config.ca_kv_heads) == kv_heads
    assert_same(place, place.tensors)


def test_rope_theta_and_norm_eps_are_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.config.rope_parameters["rope_theta"], model.config.rms_norm_eps = 500.0, 0.01
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.01
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.save_pretrained(tmp_path / "target")
    place = Place(tmp_path, model, tmp_path / "target").write()
    config = place.run()
    assert (config.rope_theta, config.norm_eps) == (500.0, 0.01)
    with pytest.raises(AssertionError):
        assert_same(place, place.tensors)
    monkeypatch.setitem(globals(), "THETA", 500.0)
    monkeypatch.setitem(globals(), "EPS", 0.01)
    assert_same(place, place.tensors)


# where the tensors lie


@pytest.mark.parametrize("prefix", ["module.", "model.", "drafter.moa."])
def test_common_prefix(place: Place, prefix: str) -> None:
    original = place.tensors
    place.tensors = {prefix + name: tensor for name, tensor in original.items()}
    place.write().run()
    assert_same(place, original)


def test_config_of_the_vllm_port(place: Place) -> None:
    place.config = port_config(place.target)
    place.write().run()
    assert_same(place, place.tensors)


def test_copies_of_the_targets_tensors_are_left_out(place: Place) -> None:
    original = dict(place.tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.rotary_emb.inv_freq",
                 "self_attention.self_attn.rotary_emb.inv_freq", "model.layers.2.self_attn.q_proj.weight",
                 "model.layers.2.self_attn.q_proj.bias"):  # fmt: skip
        place.tensors[name] = torch.zeros(2, 2)
    place.config["target_layer_inference"] = 0
    place.write().run()
    assert load_file(place.output / WEIGHTS_FILE).keys() == SHAPES.keys() | {"draft_ids"}
    assert json.loads((place.output / CONFIG_FILE).read_text())["notes"]["target_layer_inference"] == "0"
    assert_same(place, original)


def test_sharded_weights(place: Place) -> None:
    shard(place.write().source, place.tensors)
    place.run()
    assert_same(place, place.tensors)


def test_a_whole_file_goes_before_an_index(place: Place) -> None:
    """As transformers reads such a folder."""
    shard(place.write().source, weights(seed=9))
    place.write().run()
    assert_same(place, place.tensors)


def test_weights_under_another_name(place: Place) -> None:
    (place.write().source / "model.safetensors").rename(place.source / "moa.safetensors")
    place.run()
    assert_same(place, place.tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_of_the_weights(place: Place, dtype: torch.dtype) -> None:
    place.tensors = {name: tensor.to(dtype) for name, tensor in place.tensors.items()}
    place.write().run()
    assert_same(place, place.tensors)
    stored = load_file(place.output / WEIGHTS_FILE)
    del stored["draft_ids"]
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32 if dtype == torch.float64 else dtype}
    assert all(torch.equal(stored[name], tensor.to(stored[name].dtype)) for name, tensor in place.tensors.items())


def test_weights_keep_every_bit(place: Place) -> None:
    """Rounding to fp16 cost 2e-3 of a logit."""
    noise = torch.Generator().manual_seed(9)
    place.tensors = {n: t + 1e-4 * torch.randn(t.shape, generator=noise) for n, t in place.tensors.items()}
    place.write().run()
    tokens = some_tokens()
    wanted, found = reference(place.tensors, place.model, tokens), imported(place.output, place.model, tokens)
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6 * float(np.abs(one).max()))


def test_a_folder_without_a_config_is_of_the_target(place: Place) -> None:
    place.write().run()
    config, _, hashed = load_drafter(place.output)
    (place.source / "config.json").unlink()
    assert place.run() == config and load_drafter(place.output)[2] == hashed
    assert "target's" in json.loads((place.output / CONFIG_FILE).read_text())["notes"]["config"]
    place.tensors["Ekv2E.weight"] = place.tensors["Ekv2E.weight"][:, :-2].clone()
    place.write()
    (place.source / "config.json").unlink()
    assert "Ekv2E.weight" in refusal(place)


def test_only_the_targets_config_is_read(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_bytes((place.target / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    place.write()
    place.target = folder
    assert place.run().target_hash == model_identity(folder)


def test_checkpoint_from_the_hub(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write()

    def download(name: str, allow_patterns: list[str]) -> str:
        assert (name, sorted(allow_patterns)) == ("some/checkpoint", ["*.json", "*.safetensors"])
        return str(place.source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    import_checkpoint("some/checkpoint", TargetSource.resolve(str(place.target)), place.output)
    assert json.loads((place.output / CONFIG_FILE).read_text())["notes"]["source"] == "some/checkpoint"
    assert_same(place, place.tensors)


# options


def test_draft_vocabulary(place: Place) -> None:
    ids = torch.tensor([3, 60, 17, 0])
    config = place.write().run(draft_vocab_ids=ids)
    assert config.draft_vocab_size == 4
    assert load_drafter(place.output)[1]["draft_ids"].tolist() == ids.tolist()
    whole = reference(place.tensors, place.model, some_tokens())[1]
    np.testing.assert_allclose(imported(place.output, place.model, some_tokens())[1], whole[:, ids.numpy()], atol=1e-3)


@pytest.mark.parametrize(
    "ids", [[], [1, 1], [-1, 2], [0, VOCAB], [[0, 1]], [0.0, 1.0], [True, False]], ids=lambda ids: str(ids)
)
def test_draft_vocabulary_that_does_not_fit(place: Place, ids: list[Any]) -> None:
    place.write()
    assert "draft vocabulary" in refusal(place, draft_vocab_ids=torch.tensor(ids))


@pytest.mark.parametrize("given", [1, 100, 512])
def test_max_context(place: Place, given: int) -> None:
    assert place.write().run(max_context=given).max_context == given


@pytest.mark.parametrize("given", [0, -1, 513])
def test_max_context_beyond_the_target(place: Place, given: int) -> None:
    place.write()
    assert "give 1 to 512" in refusal(place, max_context=given)


# the output folder


def test_a_drafter_folder_is_replaced(place: Place) -> None:
    place.write().run()
    place.tensors = weights(seed=9)
    place.write().run()
    assert_same(place, place.tensors)
    assert [path.name for path in place.output.parent.iterdir()] == [place.output.name]


def test_an_empty_folder_is_filled(place: Place) -> None:
    place.output.mkdir(parents=True)
    place.write().run()
    assert_same(place, place.tensors)


def test_other_folders_are_left_alone(place: Place) -> None:
    place.write()
    place.output.mkdir(parents=True)
    (place.output / "thesis.txt").write_text("ten years of work")
    assert "is not a drafter folder" in refusal(place)
    assert (place.output / "thesis.txt").read_text() == "ten years of work"


def test_a_drafter_folder_with_other_files_is_left_alone(place: Place) -> None:
    place.write().run()
    (place.output / "README.md").write_text("a card")
    assert "also holds README.md" in refusal(place)
    assert (place.output / "README.md").is_file()


def test_the_checkpoint_is_not_its_own_output(place: Place) -> None:
    place.write()
    place.output = place.source
    assert "is not a drafter folder" in refusal(place)


def test_a_file_in_the_way(place: Place) -> None:
    place.write()
    place.output = place.root / "file"
    place.output.write_text("")
    assert "is not a drafter folder" in refusal(place)


@pytest.mark.parametrize("before", [False, True])
def test_failing_halfway_leaves_the_output_as_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    place.write()
    if before:
        place.run()
    hashes = load_drafter(place.output)[2] if before else None

    def fail(folder: Path, *rest: Any, **options: Any) -> None:
        save_drafter(folder, *rest, **options)
        (folder / WEIGHTS_FILE).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(export.train.reference_import, "save_drafter", fail)
    place.tensors = weights(seed=9)
    with pytest.raises(OSError, match="disk full"):
        place.write().run()
    assert [path.name for path in place.output.parent.iterdir()] == ([place.output.name] if before else [])
    if before:
        assert load_drafter(place.output)[2] == hashes


def test_failing_to_swap_puts_the_old_drafter_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write().run()
    before, rename = load_drafter(place.output)[2], Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise OSError("no")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    place.tensors = weights(seed=9)
    with pytest.raises(OSError, match="no"):
        place.write().run()
    assert load_drafter(place.output)[2] == before


def test_plain_rotary_embedding_in_the_new_spelling(place: Place) -> None:
    place.config = {**json.loads((place.target / "config.json").read_text()), "architectures": ["MOASpec"]}
    place.write().run()
    assert_same(place, place.tensors)
