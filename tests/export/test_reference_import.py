"""Importing the authors' checkpoints: the formulas once more in plain numpy, the folder's layout, and every refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

import export.train.reference_import
from export.train.reference_import import import_checkpoint
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE
from outrider_core.models.drafter_files import load_drafter, save_drafter
from outrider_core.models.moa import device_half, server_half
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.targets.identity import model_identity
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


# a checkpoint as the authors write it


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


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[Any, Path]]:
    kinds = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True)]
    found = {}
    for family, tied in kinds:
        folder, model = tmp_path_factory.mktemp("target") / family, make_model(family, tied)
        model.save_pretrained(folder)
        found[family, tied] = model, folder
    return found


@pytest.fixture
def place(tmp_path: Path, targets: dict[tuple[str, bool], tuple[Any, Path]]) -> Place:
    return Place(tmp_path, *targets["llama", False])


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


# refusals


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


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_not_opened(place: Place, file: str) -> None:
    place.write()
    (place.source / "model.safetensors").unlink()
    (place.source / file).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    text = refusal(place)
    assert "no .safetensors weights there" in text
    assert "safetensors.torch.save_file" in text


@pytest.mark.parametrize("name", SHAPES)
def test_missing_reference_tensor(place: Place, name: str) -> None:
    del place.tensors[name]
    place.write()
    text = refusal(place)
    assert (
        (f"no tensor {name}" in text) if name == "Ekv2E.weight" else (f"tensor {name} " in text and "missing" in text)
    )


@pytest.mark.parametrize("name", [n for n in SHAPES if not n.endswith(("k_proj.weight", "gate_proj.weight"))])
def test_tensor_of_another_shape(place: Place, name: str) -> None:
    first, *rest = SHAPES[name]
    place.tensors[name] = torch.zeros(first + 1, *rest)
    place.write()
    text = refusal(place)
    assert f"tensor {name} has shape {[first + 1, *rest]}, expected {[first, *rest]}" in text


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        (
            "self_attention.self_attn.k_proj.weight",
            (HEAD_DIM + 1, HIDDEN),
            "9 rows, which is not a multiple of the head width 8",
        ),
        ("self_attention.self_attn.k_proj.weight", (0, HIDDEN), "has 0 rows"),
        ("self_attention.self_attn.k_proj.weight", (16,), "expected two dimensions"),
        ("self_attention.self_attn.k_proj.weight", (3 * HEAD_DIM, HIDDEN), "sa_kv_heads 3 must divide"),
        ("self_attention.self_attn.k_proj.weight", (4 * HEAD_DIM, HIDDEN), "v_proj.weight has shape [16, 64]"),
        ("cross_attention.self_attn.k_proj.weight", (HEAD_DIM, HIDDEN + 1), "has shape [8, 65], expected [8, 64]"),
        ("layer_self_attention.self_attn.k_proj.weight", (6, WIDTH), "not a multiple of the head width 4"),
        ("cross_attention.mlp.gate_proj.weight", (57, HIDDEN), "up_proj.weight has shape [56, 64], expected [57, 64]"),
        ("cross_attention.mlp.gate_proj.weight", (56, 63), "has shape [56, 63], expected [56, 64]"),
    ],
)  # fmt: skip
def test_widths_that_do_not_fit(place: Place, name: str, shape: tuple[int, ...], part: str) -> None:
    place.tensors[name] = torch.zeros(shape)
    place.write()
    assert part in refusal(place)


@pytest.mark.parametrize("layers", [1, 3])
def test_target_layer_inference(place: Place, layers: int) -> None:
    place.config["target_layer_inference"] = layers
    place.write()
    text = refusal(place)
    assert f"last {layers} layers" in text and "target_layer_inference" in text


def test_without_layer_self_attention(place: Place) -> None:
    place.config = {**port_config(place.target), "disable_LSA": True}
    place.tensors = {n: t for n, t in place.tensors.items() if not n.startswith(("layer_self_attention", "Ekv2E"))}
    place.write()
    assert "disable_LSA" in refusal(place)


@pytest.mark.parametrize(
    "name",
    [
        "self_attention.self_attn.q_proj.bias", "layer_self_attention.self_attn.v_proj.bias",
        "cross_attention.self_attn.o_proj.bias", "self_attention.mlp.down_proj.bias",
    ],
)  # fmt: skip
def test_biases(place: Place, name: str) -> None:
    place.tensors[name] = torch.zeros(4)
    place.write()
    text = refusal(place)
    assert name in text and "no biases" in text


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("spec_model_fc.weight", "does not belong to"), ("null_row", "does not belong to"),
        ("other.self_attention.self_attn.q_proj.weight", "does not belong to"),
        ("self_attention.self_attn.q_norm.weight", "is in no MoA block"),
        ("module.Ekv2E.weight", "2 tensors Ekv2E.weight"),
    ],
)  # fmt: skip
def test_unknown_tensors(place: Place, name: str, part: str) -> None:
    place.tensors[name] = torch.zeros(4)
    place.write()
    assert part in refusal(place)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0}}, "yarn"),
    ],
)
def test_rotary_scaling_of_the_checkpoint(place: Place, config: dict[str, Any], kind: str) -> None:
    place.config |= config
    place.write()
    assert f"{place.source.name}: rotary scaling {kind!r}" in refusal(place)


def test_rotary_scaling_of_the_target(place: Place, tmp_path: Path) -> None:
    place.write()
    config = json.loads((place.target / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": THETA, **LLAMA3}
    place.target = tmp_path / "scaled"
    place.target.mkdir()
    (place.target / "config.json").write_text(json.dumps(config))
    assert "the target: rotary scaling 'llama3'" in refusal(place)


def test_plain_rotary_embedding_in_the_new_spelling(place: Place) -> None:
    place.config = {**json.loads((place.target / "config.json").read_text()), "architectures": ["MOASpec"]}
    place.write().run()
    assert_same(place, place.tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 128), ("num_attention_heads", 4), ("num_hidden_layers", 4), ("num_key_value_heads", 4),
        ("vocab_size", 62), ("rms_norm_eps", 1e-5), ("rope_theta", 500000.0), ("rope_theta", "much"), ("head_dim", 16),
        ("model_type", "qwen2"),
    ],
)  # fmt: skip
def test_checkpoint_of_another_target(place: Place, key: str, value: Any) -> None:
    place.config[key] = value
    place.write()
    assert f"its config.json says {key} {value}, but the target has" in refusal(place)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("kv_hidden_size", 64, "the target has 32"), ("self_attention_num_key_value_heads", 4, "its tensors have 2"),
        ("cross_attention_intermediate_size", 6144, "its tensors have 56"),
        ("layer_self_attention_num_key_value_heads", 8, "its tensors have 4"), ("num_attention_heads", 4, "has 8"),
    ],
)  # fmt: skip
def test_port_config_that_contradicts(place: Place, key: str, value: int, part: str) -> None:
    place.config = {**port_config(place.target), key: value}
    place.write()
    text = refusal(place)
    assert f"says {key} {value}" in text and part in text


def test_other_activation(place: Place) -> None:
    place.config["hidden_act"] = "gelu"
    place.write()
    assert "hidden_act is 'gelu'" in refusal(place)


def test_heads_that_do_not_cut_the_keys_and_values(tmp_path: Path) -> None:
    model = tiny_model(layers=2, hidden=48, heads=6, kv_heads=2, vocab=VOCAB, dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    place = Place(tmp_path, model, tmp_path / "target").write()
    assert "lsa_heads 6, the target's, must cut 32" in refusal(place)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_no_numbers(place: Place, value: float) -> None:
    place.tensors["cross_attention.mlp.up_proj.weight"][3, 5] = value
    place.write()
    text = refusal(place)
    assert "cross_attention.mlp.up_proj.weight" in text and f"holds {value:g}" in text


def test_values_beyond_half_precision(place: Place) -> None:
    place.tensors = {name: tensor.bfloat16() for name, tensor in place.tensors.items()}
    place.tensors["cross_attention.mlp.up_proj.weight"][3, 5] = 1e5
    place.write().run()
    assert load_drafter(place.output)[1]["cross_attention.mlp.up_proj.weight"].max() > 65504


def test_quantised_weights(place: Place) -> None:
    place.tensors["Ekv2E.weight"] = place.tensors["Ekv2E.weight"].to(torch.int8)
    place.write()
    assert "tensor Ekv2E.weight is I8" in refusal(place)


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_broken_checkpoint_config(place: Place, content: str) -> None:
    path = place.write().source / "config.json"
    path.write_text(content)
    assert "config.json" in refusal(place)


def test_truncated_weights(place: Place) -> None:
    path = place.write().source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "is not a readable safetensors file" in refusal(place)


def test_several_files_without_an_index(place: Place) -> None:
    shard(place.write().source, place.tensors).unlink()
    assert "3 .safetensors files" in refusal(place)


def test_missing_shard(place: Place) -> None:
    shard(place.write().source, place.tensors)
    (place.source / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refusal(place)


def test_index_that_lists_what_is_not_there(place: Place) -> None:
    index = shard(place.write().source, place.tensors)
    listed = json.loads(index.read_text())
    listed["weight_map"]["Ekv2E.bias"] = listed["weight_map"]["self_attention.mlp.up_proj.weight"]
    index.write_text(json.dumps(listed))
    assert "lacks Ekv2E.bias" in refusal(place)


@pytest.mark.parametrize("shards", [{"Ekv2E.weight": "../model.safetensors"}, {"Ekv2E.weight": 3}, [], None])
def test_index_that_points_elsewhere(place: Place, shards: Any) -> None:
    index = shard(place.write().source, place.tensors)
    index.write_text(json.dumps({"weight_map": shards}))
    assert "weight_map must map" in refusal(place)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c"])
def test_no_such_folder(place: Place, name: str) -> None:
    assert refusal(place, source=name) == f"{name}: no such folder"


def test_a_file_is_no_checkpoint(place: Place) -> None:
    assert "is a file; name the folder" in refusal(place, source=place.write().source / "model.safetensors")


def test_unreachable_hub(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert refusal(place, source="some/checkpoint").endswith("the model hub gave nothing: no route")


@pytest.mark.parametrize("content", ['{"model_type": "gpt2"}', "{", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_target_that_cannot_be_used(place: Place, tmp_path: Path, content: str) -> None:
    place.write()
    place.target = tmp_path / "bad"
    place.target.mkdir()
    (place.target / "config.json").write_text(content)
    assert str(place.target) in refusal(place)
