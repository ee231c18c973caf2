"""The choice of an engine for a bundle, the error if none can open it, and the inputs of the runtimes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from outrider_core.drafting import engines
from outrider_core.drafting.bundle import Bundle, BundleError
from outrider_core.drafting.engines import INPUTS, OUTPUTS, RUNTIMES, Floats, Ints, installed, open_engine
from outrider_core.drafting.engines import executorch as executorch_room
from outrider_core.drafting.engines import onnx as onnx_room
from outrider_core.drafting.engines.executorch import ExecuTorchEngine
from outrider_core.drafting.engines.onnx import OnnxEngine
from outrider_core.models.moa import DeviceHalf
from outrider_core.models.moa_config import MoAConfig

ALL_PACKAGES = {package for packages, _ in RUNTIMES.values() for package in packages}


def bundle_of(folder: Path, *names: str) -> Bundle:
    """What `open_engine` reads of a bundle: its folder and the files of its engines, in the manifest's order."""
    held = {name: SimpleNamespace(file=f"drafter.{name}") for name in names}
    manifest = SimpleNamespace(engines=held)
    return cast(Bundle, SimpleNamespace(folder=folder, manifest=manifest, path=lambda name: folder / name))


Packages = Callable[..., None]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Call it with what is installed."""

    def only(*names: str) -> None:
        assert set(names) <= ALL_PACKAGES
        monkeypatch.setattr(engines, "find_spec", lambda name: SimpleNamespace() if name in names else None)

    return only


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, int]]:
    """Both engines replaced: (engine, path, threads) of each that was opened."""
    calls: list[tuple[str, Path, int]] = []
    for name, room, kind in (("onnx", onnx_room, "OnnxEngine"), ("executorch", executorch_room, "ExecuTorchEngine")):
        monkeypatch.setattr(room, kind, lambda path, threads, name=name: calls.append((name, path, threads)))
    return calls


# the choice


@pytest.mark.parametrize(
    ("held", "there", "chosen"),
    [
        (["onnx"], ["onnxruntime"], "onnx"),
        (["executorch"], ["executorch"], "executorch"),
        (["executorch"], ["executorch_numpy_runtime"], "executorch"),
        (["onnx", "executorch"], ["onnxruntime", "executorch"], "onnx"),
        (["executorch", "onnx"], ["onnxruntime", "executorch"], "onnx"),  # not the manifest's order
        (["onnx", "executorch"], ["executorch"], "executorch"),
        (["executorch", "onnx"], ["onnxruntime"], "onnx"),
        (["executorch"], ["onnxruntime", "executorch"], "executorch"),
        (["npu", "onnx"], ["onnxruntime"], "onnx"),  # a later version's engine is passed over
    ],
)
def test_the_best_engine_that_is_held_and_installed_opens(
    tmp_path: Path, packages: Packages, opened: list[Any], held: list[str], there: list[str], chosen: str
) -> None:
    packages(*there)
    open_engine(bundle_of(tmp_path, *held))
    assert opened == [(chosen, tmp_path / f"drafter.{chosen}", 0)]


@pytest.mark.parametrize("name", list(RUNTIMES))
def test_a_named_engine_opens_with_the_threads_asked_for(
    tmp_path: Path, packages: Packages, opened: list[Any], name: str
) -> None:
    packages(*ALL_PACKAGES)
    open_engine(bundle_of(tmp_path, *RUNTIMES), name, 3)
    assert opened == [(name, tmp_path / f"drafter.{name}", 3)]


def test_the_runtime_without_torch_is_preferred(packages: Packages) -> None:
    packages("executorch", "executorch_numpy_runtime")
    assert installed("executorch") == "executorch_numpy_runtime"
    packages("executorch")
    assert installed("executorch") == "executorch"
    packages("onnxruntime")
    assert installed("executorch") is None and installed("onnx") == "onnxruntime"


def refusal(open_it: Callable[[], object]) -> str:
    with pytest.raises(BundleError) as caught:
        open_it()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_engine_that_the_bundle_does_not_hold(tmp_path: Path, packages: Packages, opened: list[Any]) -> None:
    packages(*ALL_PACKAGES)
    line = refusal(lambda: open_engine(bundle_of(tmp_path, "onnx"), "executorch"))
    assert line == f"{tmp_path} holds no executorch engine (it has: onnx)"
    line = refusal(lambda: open_engine(bundle_of(tmp_path, "executorch", "onnx"), "oonx"))
    assert line == f"{tmp_path} holds no oonx engine (it has: executorch, onnx)"
    assert opened == []


@pytest.mark.parametrize("name", ["npu", None])
def test_engine_of_a_later_version(tmp_path: Path, packages: Packages, name: str | None) -> None:
    packages(*ALL_PACKAGES)
    line = refusal(lambda: open_engine(bundle_of(tmp_path, "npu"), name))
    assert line == f"{tmp_path}: engine 'npu' is unknown here (known: onnx, executorch); update"


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("engine", "there", "install"),
    [
        ("onnx", ["executorch", "executorch_numpy_runtime"], "onnxruntime"),
        ("executorch", ["onnxruntime"], "outrider[executorch]"),
    ],
)
def test_nothing_that_runs_the_engine(
    tmp_path: Path, packages: Packages, engine: str, there: list[str], install: str, by_name: bool
) -> None:
    packages(*there)
    line = refusal(lambda: open_engine(bundle_of(tmp_path, engine), engine if by_name else None))
    assert line == f"nothing here runs drafter.{engine}; run: pip install '{install}'"


def test_a_named_engine_is_never_replaced_by_another(tmp_path: Path, packages: Packages, opened: list[Any]) -> None:
    packages("onnxruntime")
    assert "drafter.executorch" in refusal(lambda: open_engine(bundle_of(tmp_path, *RUNTIMES), "executorch"))
    assert opened == []


# ONNX Runtime

KINDS = {
    "tokens": (TensorProto.INT64, ["n"]), "positions": (TensorProto.INT64, ["n"]),
    "wanted": (TensorProto.INT64, ["w"]), "sa_mask": (TensorProto.FLOAT, ["n", "all"]),
    "sa_keys": (TensorProto.FLOAT, ["past", 1, 2]), "sa_values": (TensorProto.FLOAT, ["past", 1, 2]),
    "row_keys": (TensorProto.FLOAT, ["m", 1, 2]), "row_values": (TensorProto.FLOAT, ["m", 1, 2]),
}  # fmt: skip


def write_echo(path: Path, inputs: list[str], outputs: tuple[str, ...] = OUTPUTS[::-1]) -> None:
    """An ONNX file whose logits are tokens, positions, wanted and mask one after the other as floats; its keys are
    past keys and row keys, its values likewise. Inputs that a drafter does not have are ignored."""
    names = [name for name in inputs if name in KINDS]
    nodes = [helper.make_node("Constant", [], ["flat"], value=helper.make_tensor("flat", TensorProto.INT64, [1], [-1]))]
    for name in names[:4]:
        nodes.append(helper.make_node("Cast", [name], [f"{name}_float"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Reshape", [f"{name}_float", "flat"], [f"{name}_flat"]))
    nodes.append(helper.make_node("Concat", [f"{name}_flat" for name in names[:4]], ["logits"], axis=0))
    keys, values = names[4::2], names[5::2]
    nodes.append(helper.make_node("Concat", keys, ["new_keys"], axis=0))
    nodes.append(helper.make_node("Concat", values, ["new_values"], axis=0))
    found = [helper.make_tensor_value_info(name, *KINDS.get(name, (TensorProto.FLOAT, ["x"]))) for name in inputs]
    sizes = {"logits": ["all of it"], "new_keys": ["k", 1, 2], "new_values": ["v", 1, 2]}
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes[name]) for name in outputs]
    graph = helper.make_graph(nodes, "echo", found[::-1], given)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))


def some_step(past: int) -> tuple[Any, ...]:
    """Inputs of one step, all values different."""
    numbers = iter(range(1, 1000))

    def filled(kind: type, *shape: int) -> Any:
        return np.array([next(numbers) for _ in range(int(np.prod(shape)))], kind).reshape(shape)

    return (
        filled(np.int64, 2), filled(np.int64, 2), filled(np.int64, 1), filled(np.float32, 2, past + 2),
        *(filled(np.float32, past, 1, 2) for _ in range(2)), *(filled(np.float32, 3, 1, 2) for _ in range(2)),
    )  # fmt: skip


@pytest.mark.parametrize("past", [0, 3])
def test_onnx_inputs_and_outputs_go_by_name(tmp_path: Path, past: int) -> None:
    """The file lists its inputs and outputs in reverse."""
    write_echo(tmp_path / "drafter.onnx", list(INPUTS))
    inputs = some_step(past)
    logits, keys, values = OnnxEngine(tmp_path / "drafter.onnx", 1).step(*inputs)
    np.testing.assert_array_equal(logits, np.concatenate([x.ravel() for x in inputs[:4]]).astype(np.float32))
    np.testing.assert_array_equal(keys, np.concatenate([inputs[4], inputs[6]]))
    np.testing.assert_array_equal(values, np.concatenate([inputs[5], inputs[7]]))


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_onnx_threads_are_those_asked_for(tmp_path: Path, threads: int) -> None:
    write_echo(tmp_path / "drafter.onnx", list(INPUTS))
    session = OnnxEngine(tmp_path / "drafter.onnx", threads).session
    assert session.get_session_options().intra_op_num_threads == threads


@pytest.mark.parametrize(
    "inputs",
    [
        [*INPUTS[:6], "rows"],
        [*INPUTS, "temperature"],
        [name for name in INPUTS if name != "wanted"],
        [*INPUTS[:7], "rows"],
    ],
    ids=["rows in one input", "one more", "one less", "another name"],
)
def test_onnx_file_of_another_interface(tmp_path: Path, inputs: list[str]) -> None:
    path = tmp_path / "drafter.onnx"
    write_echo(path, inputs)
    expected = f"{path} takes {', '.join(inputs[::-1])} instead of {', '.join(INPUTS)}; export it again"
    assert refusal(lambda: OnnxEngine(path)) == expected


@pytest.mark.parametrize("content", [b"", b"no model", None], ids=["empty", "text", "missing"])
def test_onnx_file_that_does_not_load(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "drafter.onnx"
    if content is not None:
        path.write_bytes(content)
    assert refusal(lambda: OnnxEngine(path)).startswith(f"{path} does not load: ")


# ExecuTorch, through a runtime that runs Python functions

Method = Callable[[list[Any]], list[Any]]


class ExecutionError(RuntimeError):
    """What that runtime raises where a method's result is none that it knows, a string for one."""


class FakeProgram:
    """A program of `executorch_numpy_runtime`."""

    def __init__(self, methods: dict[str, Method]) -> None:
        self.methods, self.method_names = methods, list(methods)

    def load_method(self, name: str) -> Method:
        return self.methods[name]


@pytest.fixture
def numpy_runtime(monkeypatch: pytest.MonkeyPatch, packages: Packages) -> dict[str, Method]:
    """Methods of every program that is loaded."""
    methods: dict[str, Method] = {}

    def load_program(path: str) -> FakeProgram:
        if Path(path).read_bytes() == b"broken":
            raise RuntimeError("Program identifier mismatch")
        return FakeProgram(methods)

    runtime = SimpleNamespace(get=lambda: SimpleNamespace(load_program=load_program))
    package = SimpleNamespace(Runtime=runtime, errors=SimpleNamespace(ExecutionError=ExecutionError))
    monkeypatch.setitem(sys.modules, "executorch_numpy_runtime", cast(Any, package))
    packages("executorch_numpy_runtime")
    return methods


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "drafter.pte").write_bytes(b"program")
    return tmp_path / "drafter.pte"


class Recorder:
    """A `forward` that keeps what came."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.inputs = inputs
        return [np.float32(number) for number in (1, 2, 3)]


def test_executorch_takes_a_step_in_place(numpy_runtime: dict[str, Method], program: Path) -> None:
    forward = numpy_runtime["forward"] = Recorder()
    inputs = some_step(past=4)
    assert ExecuTorchEngine(program).step(*inputs) == (1, 2, 3)
    assert len(forward.inputs) == len(INPUTS)
    for got, expected in zip(forward.inputs, inputs, strict=True):
        assert got.dtype == expected.dtype and np.shares_memory(got, expected)
        np.testing.assert_array_equal(got, expected)


def test_executorch_sees_contiguous_arrays(numpy_runtime: dict[str, Method], program: Path) -> None:
    forward = numpy_runtime["forward"] = Recorder()
    inputs = list(some_step(past=4))
    inputs[3], inputs[6] = np.asfortranarray(inputs[3]), inputs[6][::2]
    ExecuTorchEngine(program).step(*inputs)
    assert all(array.flags.c_contiguous for array in forward.inputs)
    for got, expected in zip(forward.inputs, inputs, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_executorch_gets_one_masked_row_where_there_is_no_past(numpy_runtime: dict[str, Method], program: Path) -> None:
    forward = numpy_runtime["forward"] = Recorder()
    inputs = some_step(past=0)
    ExecuTorchEngine(program).step(*inputs)
    got = dict(zip(INPUTS, forward.inputs, strict=True))
    assert got["sa_keys"].shape == got["sa_values"].shape == (1, 1, 2)
    assert not got["sa_keys"].any() and not got["sa_values"].any()
    assert (got["sa_mask"][:, 0] <= -1e8).all()
    np.testing.assert_array_equal(got["sa_mask"][:, 1:], inputs[3])
    assert {array.dtype for array in forward.inputs[3:]} == {np.dtype(np.float32)}


def test_that_masked_row_changes_no_result(numpy_runtime: dict[str, Method], program: Path) -> None:
    config = MoAConfig(
        target_hash="", target_layers=(0,), target_kv_heads=1, target_head_dim=4, vocab_size=30, draft_vocab_size=12,
        hidden_size=16, lsa_heads=1, lsa_kv_heads=1, lsa_mlp=8, heads=4, head_dim=4, sa_kv_heads=2, sa_mlp=24,
        ca_kv_heads=1, ca_mlp=24, rope_theta=100.0, norm_eps=1e-5, max_context=64, null_row=True,
        final_norm=False,
    )  # fmt: skip
    torch.manual_seed(0)
    half = DeviceHalf(config)
    for parameter in half.requires_grad_(False).parameters():
        parameter.normal_(0, 0.4)
    numpy_runtime["forward"] = lambda inputs: [x.numpy() for x in half(*(torch.from_numpy(x) for x in inputs))]
    rng = np.random.default_rng(0)
    empty: Floats = np.zeros((0, 2, 4), np.float32)
    row_keys, row_values = rng.standard_normal((2, 3, 1, 4)).astype(np.float32)
    steps: Ints = np.arange(5)
    causal = np.triu(np.full((5, 5), -1e9, np.float32), 1)
    inputs = steps + 7, steps, steps, causal, empty, empty, row_keys, row_values
    expected = half(*(torch.from_numpy(x) for x in inputs))
    for got, wanted in zip(ExecuTorchEngine(program).step(*inputs), expected, strict=True):
        np.testing.assert_allclose(got, wanted.numpy(), atol=1e-5)


def test_executorch_constants_are_metadata(numpy_runtime: dict[str, Method], program: Path) -> None:
    numpy_runtime |= {"forward": Recorder(), "get_vocab_size": lambda _: [49152], "get_eos_ids": lambda _: [2, 0]}
    assert ExecuTorchEngine(program).metadata == {"get_vocab_size": 49152, "get_eos_ids": [2, 0]}


def test_executorch_constant_that_the_runtime_cannot_read_is_none(
    numpy_runtime: dict[str, Method], program: Path
) -> None:
    def target_hash(_: list[Any]) -> list[Any]:
        raise ExecutionError("unsupported tag")

    numpy_runtime |= {"forward": Recorder(), "get_target_hash": target_hash, "get_vocab_size": lambda _: [49152]}
    assert ExecuTorchEngine(program).metadata == {"get_target_hash": None, "get_vocab_size": 49152}


@pytest.mark.parametrize("package", ["executorch_numpy_runtime", "executorch"])
def test_executorch_file_that_is_not_there(tmp_path: Path, packages: Packages, package: str) -> None:
    packages(package)
    path = tmp_path / "drafter.pte"
    line = refusal(lambda: ExecuTorchEngine(path))
    assert line == f"{path} is missing; copy the whole folder or export again"


def test_executorch_file_that_does_not_load(numpy_runtime: dict[str, Method], program: Path) -> None:
    program.write_bytes(b"broken")
    assert refusal(lambda: ExecuTorchEngine(program)) == (
        f"{program} does not load with executorch_numpy_runtime: Program identifier mismatch; "
        "export it for this version"
    )
