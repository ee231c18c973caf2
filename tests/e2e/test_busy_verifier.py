"""A verifier without room for a device: the device asks again at the stated time, not at once or indefinitely."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from cloud.server.accounts import Accounts
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from edge_runtime.events import Finished
from edge_runtime.options import RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.timeouts import Patience
from outrider_core.drafting.bundle import Bundle
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import ERR_UNKNOWN, Hello, Open, Opened, pack_ids
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import Client, in_chunks, serve

Folders = tuple[Path, Path, Path]
PROMPT = list(range(20, 40))


def test_a_device_over_its_sessions_asks_again_when_it_was_told(
    folders: Folders, bundle: Bundle, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"app {hashlib.sha256(b'secret').hexdigest()} sessions=1\n")
    settings = Settings(max_model_len=120, max_nodes=16, kv_tokens=600, max_sessions=8)
    model = torch_model(
        load_target(TargetSource.resolve(str(folders[0])), "float64"), load_drafter(folders[1]), settings
    )
    verifier = in_chunks(Verifier(model, settings, Accounts(tokens)), 16)

    async def answered(address: str) -> Finished:
        patience = Patience(open=0.6, connect=0.3, silence=1.0, offline=3.0)
        async with EdgeRuntime(
            bundle, address, RuntimeOptions(token="secret", patience=patience, threads=1)
        ) as runtime:
            last = [event async for event in runtime.generate(PROMPT, max_new_tokens=20)][-1]
        assert isinstance(last, Finished)
        return last

    with serve(verifier) as address:
        hello = Hello(1, verifier.target_hash, verifier.drafter_hash)
        with Client(address, hello, token="secret") as holder:
            holder.send(Open(0, b"o" * 16, 0, pack_ids(PROMPT), 0, Sampling()))
            assert holder.receive(Opened)
            last = asyncio.run(answered(address))
    refused = {
        sample.labels["code"]: sample.value
        for metric in verifier.metrics.errors.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert last.reason == "length" and last.provisional, last
    assert sum(refused.values()) < 20, refused
    assert refused.get(str(ERR_UNKNOWN), 0) < 10, refused
