"""A tiny target folder, a drafter for it, their bundles, and random draft steps."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from filelock import FileLock
from onnx import TensorProto, numpy_helper
from torch import nn

from export.bundle import bundle as module
from export.bundle import to_executorch
from export.bundle.blocks import BLOCKS, Profile, dequantise, quantise
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from export.bundle.steps import example_inputs
from export.bundle.to_executorch import write_executorch
from export.bundle.to_onnx import write_onnx
from export.train.features import FeatureCache
from outrider_core.drafting.bundle import MANIFEST, BundleError, open_bundle
from outrider_core.drafting.engines import Engine
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.moa import DeviceHalf, device_half_on
from outrider_core.models.moa_config import MoAConfig
from outrider_core.models.target import Target, open_target
from outrider_core.targets.source import TargetSource
from tests.export.checkpoints import Place, make_model
from tests.export.tiny_training import some_sequences
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model, tiny_target
from tests.waiting import HANG

Inputs = tuple[torch.Tensor, ...]
ENGINE_FILE = "drafter.onnx"
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "export", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG)


@dataclass(frozen=True)
class Folders:
    target: Path
    drafter: Path
    target_hash: str

    def options(self, output: Path, quant: str = "fp32", *formats: str, **others: object) -> BundleOptions:
        """What writes a bundle of them to `output`, for ONNX Runtime unless `formats` say otherwise."""
        return BundleOptions(
            target=TargetSource.resolve(str(self.target)), drafter=self.drafter, output_dir=output,
            format=formats or ("onnx",), quant=quant, **others,  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run have in common: what takes long to make is made once, under a lock."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "export"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def folders(shared: Path) -> Folders:
    with FileLock(shared / "folders.lock"):
        if not (shared / "hash").exists():
            model = tiny_model(dtype=torch.float32)
            target_hash = save_tiny_target(shared / "target", model)
            save_tiny_drafter(shared / "drafter", model, target_hash)
            (shared / "hash").write_text(target_hash)
    return Folders(shared / "target", shared / "drafter", (shared / "hash").read_text())


def eager_half(folders: Folders) -> DeviceHalf:
    config, tensors, _ = load_drafter(folders.drafter)
    return device_half_on(config, tensors, *open_target(TargetSource.resolve(str(folders.target))).tables())


@pytest.fixture(scope="session")
def half(folders: Folders) -> DeviceHalf:
    return eager_half(folders)


def write_loosely(options: BundleOptions) -> None:
    """Random weights in 4 and 8 bits flip more argmaxes than a bundle may. What a test has replaced is as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.AGREEMENT, 8, (0.0, 0.0))
        patch.setitem(module.AGREEMENT, 4, (0.0, 0.0))
        patch.setattr(module, "write_onnx", write_onnx)
        patch.setattr(to_executorch, "write_executorch", write_executorch)
        write_bundle(options)


class Bundles:
    """Bundles of `folders`, each written when it is first asked for. A test that changes one copies it."""

    def __init__(self, folders: Folders, root: Path) -> None:
        self.folders, self.root = folders, root

    def __call__(self, quant: str = "fp32", engine: str = "onnx", embedding_bits: int | None = None) -> Path:
        """Its folder."""
        name = f"{engine}-{quant}-{embedding_bits}"
        output = self.root / name / "bundle"
        with FileLock(self.root / f"{name}.lock"):
            if not output.exists():
                write_loosely(self.folders.options(output, quant, engine, embedding_bits=embedding_bits))
        return output


@pytest.fixture(scope="session")
def bundles(folders: Folders, shared: Path) -> Bundles:
    return Bundles(folders, shared)


class Reused:
    """Stands for both exporters: copies float32 engines that were lowered before, and notes what was asked for.

    `wrong` is raised instead by the exporter it is set for, once.
    """

    def __init__(self, bundles: Bundles) -> None:
        self.bundles = bundles
        self.lowered: list[str] = []
        self.wrong: dict[str, BaseException] = {}

    def __call__(self, engine: str, path: Path) -> dict[str, Any]:
        self.lowered.append(engine)
        if engine in self.wrong:
            path.write_bytes(b"half of it")
            raise self.wrong.pop(engine)
        source = self.bundles("fp32", engine)
        for part in source.glob(path.name + "*"):
            shutil.copy(part, path.parent)
        report: dict[str, Any] = json.loads((source / "report.json").read_text())["engines"][engine]["lowering"]
        return report


@pytest.fixture
def reused(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> Reused:
    stand_in = Reused(bundles)
    monkeypatch.setattr(module, "write_onnx", lambda config, tensors, profile, path, *_: stand_in("onnx", path))
    monkeypatch.setattr(to_executorch, "write_executorch", lambda half, profile, path, *_: stand_in("executorch", path))
    return stand_in


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / MANIFEST
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def tree_inputs(config: MoAConfig, width: int, past: int, rows: int, seed: int = 0) -> Inputs:
    """A step on a random tree of `width` tokens behind `past`, of which some are wanted, in any order."""
    rng = np.random.default_rng(seed)
    inputs = list(example_inputs(config, width, past, rows, seed))
    mask = torch.full((width, past + width), -1e9)
    mask[:, :past] = 0.0
    depth = []
    for node in range(width):
        parent = int(rng.integers(max(-1, node - 3), node))
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, past + node] = 0.0
    inputs[1] = past + torch.tensor(depth)
    inputs[2] = torch.from_numpy(rng.integers(0, width, rng.integers(1, width + 1)))
    inputs[3] = mask
    return tuple(inputs)


def only_drafted(half: DeviceHalf, inputs: Inputs) -> Inputs:
    """The same step on tokens of the draft vocabulary."""
    return half.draft_ids[inputs[0] % len(half.draft_ids)].long(), *inputs[1:]


@torch.inference_mode()
def both(engine: Engine, half: DeviceHalf, inputs: Inputs) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the engine gives and what the eager model gives, output by output; shapes must be equal."""
    expected = [x.numpy() for x in half(*inputs)]
    got = engine.step(*(x.numpy() for x in inputs))  # type: ignore[call-arg]
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, np.float32) for x in expected]
    return list(zip(got, expected, strict=True))


def difference(engine: Engine, half: DeviceHalf, inputs: Inputs) -> float:
    """Largest difference of any output."""
    return max(float(np.abs(a - b).max()) for a, b in both(engine, half, inputs))


def correlation(engine: Engine, half: DeviceHalf, steps: Iterable[Inputs]) -> float:
    """Least correlation of any of the three outputs over all `steps`."""
    outputs = zip(*(both(engine, half, inputs) for inputs in steps), strict=True)
    sides = ([np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1)] for pairs in outputs)
    return min(float(np.corrcoef(*pair)[0, 1]) for pair in sides)


def stored(folder: Path) -> Counter[int]:
    """Bytes of the ONNX file's weights by type; single numbers are none."""
    counts: Counter[int] = Counter()
    for tensor in onnx.load(folder / "drafter.onnx").graph.initializer:
        counts[tensor.data_type] += numpy_helper.to_array(tensor).nbytes if math.prod(tensor.dims) > 1 else 0
    return counts


def table_bytes(rows: int, width: int, bits: int) -> Counter[int]:
    if bits >= 16:
        return Counter({{32: TensorProto.FLOAT, 16: TensorProto.FLOAT16}[bits]: rows * width * bits // 8})
    block = {4: 32, 8: 64}[bits]
    blocks = rows * -(-width // block)  # each with a float32 scale
    return Counter({TensorProto.UINT8: blocks * block * bits // 8, TensorProto.FLOAT: 4 * blocks})


def expected(half: DeviceHalf, bits: int, embedding_bits: int, tied: bool) -> Counter[int]:
    """The same by the format's description: one table for the draft vocabulary where the LM head is tied to the
    embedding, else two; and where values are quantised, tokens that are never drafted take 4 bits."""
    config = half.config
    drafted, rare = config.draft_vocab_size, config.vocab_size - config.draft_vocab_size
    counts = table_bytes(rare, config.hidden_size, 4 if embedding_bits < 16 else embedding_bits)
    for _ in range(1 if tied else 2):
        counts += table_bytes(drafted, config.hidden_size, embedding_bits)
    for name, linear in half.named_modules():
        if isinstance(linear, nn.Linear) and name != "head":
            counts += table_bytes(*linear.weight.shape, bits)
    return counts


def rounded(half: DeviceHalf, profile: Profile) -> DeviceHalf:
    """`half` with the weights that a file of this profile holds, in float32."""
    half = copy.deepcopy(half)

    def kept(weight: torch.Tensor, bits: int) -> torch.Tensor:
        if bits in BLOCKS:
            return torch.from_numpy(dequantise(*quantise(weight.numpy(), bits), weight.shape[1]).copy())
        return weight.half().float() if bits == 16 else weight

    rare = torch.ones(len(half.embedding.weight), dtype=torch.bool)
    rare[half.draft_ids.long()] = False
    for name, linear in half.named_modules():
        if isinstance(linear, nn.Linear):
            linear.weight.copy_(kept(linear.weight, profile.embedding_bits if name == "head" else profile.bits))
    table, bits = half.embedding.weight, profile.embedding_bits
    few = min(bits, 4) if bits in BLOCKS else bits
    table.copy_(torch.where(rare[:, None], kept(table, few), kept(table, bits)))
    return half


# training


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny one to train on."""
    return tiny_target(tiny_model("llama", dtype=torch.float32))


@pytest.fixture(scope="module")
def config(target: Target) -> MoAConfig:
    return MoAConfig.for_target(target.config, target.model_hash, layers=2, draft_vocab=64)


@pytest.fixture
def cache(target: Target, config: MoAConfig, tmp_path: Path) -> FeatureCache:
    return FeatureCache(target, config, some_sequences(23), tmp_path / "features")


@pytest.fixture
def exact(bundles: Bundles) -> Path:
    """A float32 bundle, not to be changed."""
    return bundles()


@pytest.fixture
def copied(exact: Path, tmp_path: Path) -> Path:
    """A bundle that a test may break."""
    return Path(shutil.copytree(exact, tmp_path / "copied"))


def command(folders: Folders, output: Path, *more: str) -> list[str]:
    return ["bundle", "--target", str(folders.target), "--drafter", str(folders.drafter), "--output-dir", str(output),
            "--quant", "fp32", *more]  # fmt: skip


def folders_of(output: Path) -> set[str]:
    return {path.name for path in output.parent.iterdir()}


def no_call(*_: object, **__: object) -> None:
    raise AssertionError("this must not be called")


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


def open_error(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)
