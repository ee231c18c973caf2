"""Write the vectors that ports replay beside outrider_core/protocol/vectors' frames, noise and sessions.

`python -m tests.android.make_vectors`. Each file is an array with one vector a line.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import outrider_core.protocol
from outrider_core.protocol.costs import CostCurve, unpack_costs
from outrider_core.protocol.rows import RowShape, pack_rows, unpack_rows
from outrider_core.protocol.sampling import Sampling, draw, log_probs
from tests.android.drafter_vectors import controller_vectors, drafter_vectors, row_cost_vectors
from tests.android.form_vectors import amount_vectors, constraint_vectors, tool_chat_vectors
from tests.android.text_vectors import (
    boundary_vectors,
    chat_vectors,
    sentencepiece_vectors,
    stop_vectors,
    tokenizer_vectors,
)
from tests.protocol.make_vectors import text

FOLDER = Path(outrider_core.protocol.__file__).parent / "vectors"


def row_vectors() -> list[dict[str, Any]]:
    """Packed feature rows and their values: halves of every kind among the scales."""
    rng = np.random.default_rng(0)
    vectors = []
    for count, shape, size in ((0, RowShape(1, 1), 1.0), (1, RowShape(1, 2), 1.0), (3, RowShape(3, 8), 1e-4),
                               (2, RowShape(2, 5), 2e6), (2, RowShape(1, 4), 1e-6)):  # fmt: skip
        rows = (size * rng.standard_normal((count, 2, *shape))).astype(np.float32)
        data = pack_rows(rows)
        values = unpack_rows(data, shape).ravel().tolist()
        vectors.append({"heads": shape.heads, "head_dim": shape.head_dim, "hex": data.hex(), "values": values})
    return vectors


def sampling_vectors() -> list[dict[str, Any]]:
    """Logits, parameters and position; the distribution's logarithms (null: cut off) and the draw."""
    rng = np.random.default_rng(1)
    settings = [
        Sampling(), Sampling(1.0, seed=5), Sampling(0.7, top_k=3, seed=6), Sampling(1.3, top_p=0.8, seed=7),
        Sampling(0.9, min_p=0.1, seed=8), Sampling(1.0, 5, 0.9, 0.05, 2**63 - 1), Sampling(0.01, seed=9),
        Sampling(100.0, top_p=0.999, seed=10),
    ]  # fmt: skip
    vectors = []
    for number in range(48):
        sampling = settings[number % len(settings)]
        logits = np.round(3 * rng.standard_normal(2 + number), 4).astype(np.float32)
        distribution = log_probs(logits, sampling)
        vectors.append(
            {
                "logits": logits.tolist(), "sampling": msgspec.structs.asdict(sampling), "position": 7 * number,
                "law": [None if value == -np.inf else value for value in distribution.tolist()],
                "token": draw(logits, sampling, 7 * number),
            }
        )  # fmt: skip
    return vectors


def cost_vectors() -> list[dict[str, Any]]:
    """Packed cost curves and the seconds of some steps; null where the bytes are no curve."""
    rng = random.Random(2)
    packed = [b"", b"1234", b"\0" * 8, CostCurve((1,), (0.01,)).pack(), CostCurve((8, 4), (0.01, 0.02)).pack()]
    for points in (2, 5, 16):
        tokens = sorted(rng.sample(range(1, 200), points))
        packed.append(CostCurve(tuple(tokens), tuple(rng.uniform(0.001, 0.2) for _ in tokens)).pack())
    vectors = []
    for data in packed:
        curve = unpack_costs(data)
        steps = [0, 1, 1.5, 7, 64, 199.25, 1000]
        vectors.append({"hex": data.hex(), "steps": steps, "seconds": curve and [curve.at(step) for step in steps]})
    return vectors


MAKERS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "rows": row_vectors,
    "sampling": sampling_vectors,
    "costs": cost_vectors,
    "tokenizer": tokenizer_vectors,
    "sentencepiece": sentencepiece_vectors,
    "stops": stop_vectors,
    "chat": chat_vectors,
    "boundary": boundary_vectors,
    "drafter": drafter_vectors,
    "row_cost": row_cost_vectors,
    "controller": controller_vectors,
    "constraints": constraint_vectors,
    "amounts": amount_vectors,
    "tool_chats": tool_chat_vectors,
}


def main() -> None:
    for name, make in MAKERS.items():
        file = FOLDER / f"{name}.json"
        file.write_text(text(make()), encoding="utf-8")
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
