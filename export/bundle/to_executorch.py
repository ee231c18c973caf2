"""Lower the device half to one ExecuTorch program (`.pte`) for XNNPACK, Core ML or Qualcomm.

Linears become XNNPACK's dynamically quantised ones: int8 activations with one scale per token, int4 weights in
groups of 32 (8da4w) or int8 weights with one scale per output (8da8w). The embedding is read by plain
operators from 4- or 8-bit blocks, so no extra kernel library is needed on the device. The delegate packs its
own copy of every linear, so a tied LM head is stored once more here than in ONNX.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from export.bundle.blocks import Profile
from export.bundle.steps import example_inputs
from export.bundle.torch_tables import embedding, replace_norms, without_tables
from outrider_core.drafting.bundle import BundleError
from outrider_core.drafting.drafter import MAX_WIDTH, TREE_ROWS
from outrider_core.models.moa import DeviceHalf

GROUP = 32
BACKENDS = ("xnnpack", "coreml", "qualcomm")
QUANTS = {"fp32": "fp32", "int8": "8da8w", "int4": "8da4w"}


def check_backend(backend: str, profile: Profile) -> None:
    """Raise BundleError with one clear line if this machine cannot lower for `backend`."""
    if profile.quant not in QUANTS:
        raise BundleError(f"--format executorch has no {profile.quant}; choose {', '.join(QUANTS)}")
    if backend == "coreml" and platform.system() != "Darwin":
        raise BundleError("--backend coreml needs Apple's Core ML compiler; run the same command on macOS with Xcode")
    if backend == "qualcomm" and not os.environ.get("QNN_SDK_ROOT"):
        raise BundleError(
            "--backend qualcomm needs the Qualcomm AI Engine Direct SDK; install it and set QNN_SDK_ROOT, "
            "or use --backend xnnpack, which runs on any phone's CPU"
        )
    if backend != "xnnpack" and profile.quant != "fp32":
        raise BundleError(f"--backend {backend} takes the fp32 drafter and chooses its own precision; use --quant fp32")


def write_executorch(
    half: DeviceHalf, profile: Profile, path: Path, metadata: dict[str, Any], max_context: int, backend: str = "xnnpack"
) -> dict[str, Any]:
    """Write `half` in `profile` to `path`; `metadata` become constant methods.

    Returns the delegation table: {"delegated": n, "not_delegated": n, "operators": {name: [in, out]}}.
    """
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    check_backend(backend, profile)
    program = torch.export.export(
        _quantised(half, profile), _inputs(half), dynamic_shapes=_shapes(max_context), strict=False
    )
    edge = to_edge_transform_and_lower(
        program, partitioner=_partitioners(backend, profile), constant_methods=metadata,
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )  # fmt: skip
    info = get_delegation_info(edge.exported_program().graph_module)
    # inputs are not planned: the runtime's own buffers are read in place
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=True)
    lowered = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
    with path.open("wb") as file:
        lowered.write_to_file(file)
    operators = {name: [row.delegated, row.non_delegated] for name, row in sorted(info.delegation_by_operator.items())}
    return {
        "delegated": info.num_delegated_nodes, "not_delegated": info.num_non_delegated_nodes,
        "subgraphs": info.num_delegated_subgraphs, "operators": operators,
    }  # fmt: skip


def _quantised(half: DeviceHalf, profile: Profile) -> DeviceHalf:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quantize_.workflows.intx.intx_choose_qparams_algorithm import IntxChooseQParamsAlgorithm

    head, embedded = half.head.weight, embedding(half, profile)
    half = without_tables(half)
    half.embedding = embedded  # type: ignore[assignment]
    half.head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    half.head.weight = nn.Parameter(head, requires_grad=False)
    replace_norms(half, LinearNorm)
    int8 = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))
    int4 = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=getattr(torch, "int4"),  # noqa: B009 - torch does not type it
        weight_granularity=PerGroup(GROUP),
        intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY,
    )  # fmt: skip

    def bits(x: nn.Module, name: str) -> int:
        """Return a linear's own bits: 4 need inputs in whole groups, others of that profile get 8. 0: not a linear."""
        if not isinstance(x, nn.Linear):
            return 0
        wanted = profile.embedding_bits if name == "head" else profile.bits
        return 8 if wanted == 4 and x.in_features % GROUP else wanted

    for width, setting in ((4, int4), (8, int8)):
        quantize_(half, setting, lambda x, name, width=width: bits(x, name) == width)
    return half


class LinearNorm(nn.Module):
    """RMSNorm whose mean is a linear layer (bias: eps), as XNNPACK has no mean over a row."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        width = norm.weight.shape[0]
        self.weight = norm.weight
        self.share = nn.Parameter(torch.full((1, width), 1.0 / width), requires_grad=False)
        self.eps = nn.Parameter(torch.tensor([norm.eps or 0.0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(nn.functional.linear(x * x, self.share, self.eps)) * self.weight


def _inputs(half: DeviceHalf) -> tuple[torch.Tensor, ...]:
    inputs = list(example_inputs(half.config, 5, 7, 9))
    inputs[2] = torch.tensor([0, 2, 4])
    return tuple(inputs)


def _shapes(max_context: int) -> tuple[dict[int, Any], ...]:
    """Return the shapes of one program for every width, past and number of rows up to the limits."""
    dim = torch.export.Dim
    width, wanted = dim("width", min=1, max=MAX_WIDTH), dim("wanted", min=1, max=MAX_WIDTH)
    past, rows = dim("past", min=1, max=max_context + TREE_ROWS), dim("rows", min=1, max=max_context + 1)
    return (
        {0: width}, {0: width}, {0: wanted}, {0: width, 1: dim.DYNAMIC}, {0: past}, {0: past}, {0: rows}, {0: rows},
    )  # fmt: skip


def _partitioners(backend: str, profile: Profile) -> list[Any]:
    if backend == "coreml":
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner

        return [CoreMLPartitioner()]
    if backend == "qualcomm":
        from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
        from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
        from executorch.backends.qualcomm.utils.utils import (
            generate_htp_compiler_spec,
            generate_qnn_executorch_compiler_spec,
        )

        options = generate_htp_compiler_spec(use_fp16=True)
        return [QnnPartitioner(generate_qnn_executorch_compiler_spec(QcomChipset.SM8650, options))]
    from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    if profile.quant == "fp32":
        return [XnnpackPartitioner()]
    # quantised linears one by one, so that each keeps its own activation scales; then everything else
    return [
        XnnpackPartitioner(config_precisions=ConfigPrecisionType.DYNAMIC_QUANT, per_op_mode=True),
        XnnpackPartitioner(),
    ]
