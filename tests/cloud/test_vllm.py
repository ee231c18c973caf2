"""The verifier on vLLM: the internals that it uses, models it serves or refuses, faults, and a real process.

That its texts are plain decoding's is shown in test_lossless, test_constrained_trees, test_prefixes and
test_engine_faults, which run on it too; its layout of trees in test_vllm_paths.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed

from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ERR_INTERNAL, Error, Generate, Verdict
from outrider_core.targets.source import TargetError
from tests.cloud.by_hand import ByHand
from tests.cloud.drive import FOR_VLLM, make_verifier, started
from tests.cloud.running import PROMPT, running, save_folder
from tests.tiny import plain_decode, tiny_model
from tests.waiting import HANG, until

pytestmark = pytest.mark.vllm

VOCAB = 199


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("vllm"), **FOR_VLLM)


def test_the_internals_that_are_used_are_those_of_this_release() -> None:
    """What `cloud.vllm_engine.steps` calls, sets and replaces."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    def named(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert named(GPUModelRunner._prepare_inputs) == ["self", "scheduler_output", "num_scheduled_tokens"]
    assert "return (\n            logits_indices,\n" in inspect.getsource(GPUModelRunner._prepare_inputs)
    assert named(GPUModelRunner._model_forward)[:3] == ["self", "input_ids", "positions"]
    source = inspect.getsource(GPUModelRunner.execute_model)
    assert "sample_hidden_states = hidden_states[logits_indices]" in source
    assert (
        source.index("self._update_states(") < source.index("self._prepare_inputs(") < source.index("_model_forward(")
    )
    assert {"logits", "hidden_states"} <= {*ExecuteModelState._fields}
    assert [field.name for field in dataclasses.fields(NewRequestData)][:8] == [
        "req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids",
        "num_computed_tokens", "lora_request",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(SchedulerOutput)][:8] == [
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens", "scheduled_encoder_inputs", "finished_req_ids", "free_encoder_mm_hashes",
    ]  # fmt: skip
    assert KVCacheBlockCopy._fields == ("src_block_id", "dst_block_id")
    attention = named(CPUAttentionBackendImpl.forward)
    assert attention[1:5] == ["layer", "query", "key", "value"] and "output" in attention
    assert named(CPUAttentionBackendImpl.do_kv_cache_update)[1:4] == ["layer", "key", "value"]


def test_the_chances_are_the_softmax_of_the_plain_logits() -> None:
    model = tiny_model(vocab=VOCAB, **FOR_VLLM)
    verifier = make_verifier(model, (), engine="vllm")
    logits = verifier.engine.runner.forward([_part(PROMPT, TokenTree((9, 8), (-1, -1)))])
    for row, text in enumerate((PROMPT, [*PROMPT, 9], [*PROMPT, 8])):
        want = model(input_ids=torch.tensor([text])).logits[0, -1].log_softmax(-1).numpy()
        best = np.argsort(-want)[:4]
        ((first, *rest),) = logits.chances([row], [7], 4)
        assert first[0] == 7 and [token for token, _ in rest] == best.tolist()
        assert np.allclose([chance for _, chance in (first, *rest)], want[[7, *best]], atol=1e-4)


def test_a_token_of_several_paths_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = make_verifier(tiny_model(vocab=VOCAB, **FOR_VLLM), (), engine="vllm")
    runner: Any = verifier.engine.runner
    model, ran = runner._executor._steps._runner.model, list[int]()
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda input_ids, *a, **k: ran.append(len(input_ids)) or forward(input_ids, *a, **k)
    )
    runner.forward([_part(PROMPT, TokenTree((9, 8, 7, 6), (-1, -1, 0, 0)))])
    assert ran == [len(PROMPT) + 4]


def test_what_is_not_a_number_reaches_no_session_that_takes_its_rows() -> None:
    """An attention kernel reads whole blocks, also behind a text's end."""
    model = tiny_model(vocab=VOCAB, **FOR_VLLM)
    truth = plain_decode(model, PROMPT, Sampling(), 20, eos_ids=())
    poison = next(token for token in range(4, VOCAB) if token not in truth)
    model.model.embed_tokens.weight[poison] = float("nan")
    hand = ByHand(make_verifier(model, (), engine="vllm", kv_tokens=152))
    for name in (b"a" * 16, b"b" * 16):
        hand.open(name, [5] * 40 + [poison] * 20)
        failed = hand.verify(name, 1, 60, TokenTree((9, 8, 7), (-1, -1, 0)))
        hand.finish()
        assert isinstance(failed.replies[-1], Error) and "not numbers" in failed.replies[-1].text
        hand.close(name)
        for prompt in (PROMPT, [5] * 33):  # in the first of its blocks, and in the one where it went wrong
            want = plain_decode(model, prompt, Sampling(), 20, eos_ids=())
            hand.open(b"c" * 16, prompt)
            tree = TokenTree((want[0], 8, want[1], 7), (-1, -1, 0, 0))
            verdict = hand.verify(b"c" * 16, 1, len(prompt), tree)
            hand.finish()
            assert isinstance(said := verdict.replies[-1], Verdict), said
            assert [*said.accepted] == [0, 2] and said.bonus == want[2]
            written = hand.generate(b"c" * 16, 2, len(prompt) + 3, 12)
            hand.finish()
            assert written.drawn == want[3:15]
            hand.close(b"c" * 16)


def test_a_step_that_fails_inside_vllm_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(vocab=VOCAB, **FOR_VLLM)
    truth = plain_decode(model, PROMPT, Sampling(), 8, eos_ids=())
    verifier = make_verifier(model, (), engine="vllm")
    runner: Any = verifier.engine.runner
    tree = TokenTree((9, truth[0], 8, truth[1]), (-1, -1, 0, 1))
    with started(verifier) as direct:
        direct.open(b"s" * 16, PROMPT)
        for place, name in (
            (runner._executor._steps._runner.model, "forward"),
            (runner._executor._steps._runner, "_update_states"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, _fails)
                failed = direct.verify(b"s" * 16, 1, 3, tree).get(timeout=HANG)
                assert isinstance(failed, Error) and failed.code == ERR_INTERNAL
            direct.open(b"s" * 16, PROMPT)
        verdict = direct.verify(b"s" * 16, 1, 3, tree).get(timeout=HANG)
        assert isinstance(verdict, Verdict) and (list(verdict.accepted), verdict.bonus) == ([1, 3], truth[2])


def test_a_text_reaches_the_end_of_the_context() -> None:
    """Nodes past the longest sequence that vLLM was started for are asked for, and never run."""
    model = tiny_model(vocab=VOCAB, positions=300, **FOR_VLLM)
    prompt = [random.Random(1).randrange(4, VOCAB) for _ in range(290)]
    truth = plain_decode(model, prompt, Sampling(), 10, eos_ids=())
    with started(
        make_verifier(model, (), engine="vllm", max_model_len=300, kv_tokens=1024, prefill_chunk=512)
    ) as direct:
        session = os.urandom(16)
        direct.open(session, prompt)
        tree = TokenTree((*truth[:8], 5, 6), (-1, *range(7), 7, 8))
        assert isinstance(first := direct.verify(session, 1, 290, tree).get(timeout=HANG), Verdict)
        assert len(first.accepted) == 8 and first.bonus == truth[8] and not first.finish
        tree = TokenTree.chain([truth[9], 4, 5, 6])
        assert isinstance(last := direct.verify(session, 2, 299, tree).get(timeout=HANG), Verdict)
        assert (list(last.accepted), last.bonus, last.finish) == ([], truth[9], 2)


def test_models_that_are_not_served_are_refused_in_one_line(tmp_path: Path) -> None:
    from cloud.vllm_engine.executor import StepExecutor

    windowed = save_folder(tmp_path, family="qwen3-windows", **FOR_VLLM) / "target"
    with pytest.raises(TargetError, match=r"vLLM does not run .*Sliding window for some but all layers") as refused:
        StepExecutor(windowed, 40, 32, 256, "float32")
    assert "\n" not in str(refused.value)
    with pytest.raises(TargetError, match="vLLM ignores its llama_4_scaling_beta; use --engine"):
        make_verifier(tiny_model("ministral3", **FOR_VLLM), engine="vllm")
    narrow = tmp_path / "narrow"
    tiny_model(dtype=torch.float32).save_pretrained(narrow)
    with pytest.raises(TargetError, match=r"vLLM does not run .*head_dim=8") as refused:
        StepExecutor(narrow, 40, 32, 256, "auto")
    assert "\n" not in str(refused.value)


def test_a_process_serves_trees_and_ends_as_any_verifier(folder: Path) -> None:
    """Its standard output is the ready line alone. SIGTERM lets an answer end; a killed one takes the link down."""
    model = tiny_model(**FOR_VLLM)
    truth = plain_decode(model, PROMPT, Sampling(), 60, eos_ids=())
    with running(folder, "--engine", "vllm", "--tree-budget", "8", "--served-model-name", "tiny") as server:
        with server.client() as client:
            asked = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "w5 w6"}],
                "temperature": 0,
                "logprobs": True,
            }
            url = f"http://{server.address}/v1/chat/completions"
            said = httpx.post(url, json={**asked, "max_tokens": 6}, timeout=HANG).json()["choices"][0]
            words = [each["token"].strip() for each in said["logprobs"]["content"]]
            assert words == [f"w{token}" for token in plain_decode(model, [1, 5, 6, 3], Sampling(), 6, eos_ids=())]
            client.open(PROMPT)
            assert client.verify(1, 3, TokenTree((9, *truth[:2]), (-1, -1, 1))).bonus == truth[2]
            client.send(Generate(0, 2, 6, 57))
            got = [client.receive(Verdict).bonus]
            server.process.send_signal(signal.SIGTERM)
            while len(got) < 57:
                message = client.any()
                got += [message.bonus] if isinstance(message, Verdict) else []
            assert got == truth[3:]
        said, _ = server.process.communicate(timeout=HANG)
        assert server.process.returncode == 0 and said == ""
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        (loaded,) = (line for line in lines if line["event"] == "loaded")
        assert (loaded["engine"], loaded["arithmetic"]) == ("vllm", "vllm-0.32-float32")


@pytest.mark.parametrize("fault", ["fail", "kill"])
def test_a_step_that_fails_and_a_killed_process(folder: Path, tmp_path: Path, fault: str) -> None:
    with running(folder, "--engine", "vllm", "--tree-budget", "8", fault=tmp_path / "fault") as server:
        client = server.client()
        client.open(PROMPT)
        first = client.verify(1, 3, TokenTree()).bonus
        if fault == "kill":
            client.send(Generate(0, 2, 4, 90))
            client.receive(Verdict)
            server.process.kill()
            with pytest.raises(ConnectionClosed):
                while True:
                    client.any()
            return
        (tmp_path / "fault").write_text("fail")
        client.send(Generate(0, 2, 4, 3))
        assert client.receive(Error).code == ERR_INTERNAL
        (tmp_path / "fault").unlink()
        assert until(lambda: not (tmp_path / "fault").exists())
        client.open(PROMPT)
        assert client.verify(1, 3, TokenTree()).bonus == first


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _part(tokens: list[int], tree: TokenTree) -> Any:
    from outrider_core.targets.part import Part

    return Part(0, 0, tuple(tokens), tree)
