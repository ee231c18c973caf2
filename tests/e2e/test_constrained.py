"""An answer held to a schema, on the device: through cuts and restarts plain constrained decoding's, and valid."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from benchmarks.links import EmulatedLink
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from edge_runtime.events import Event, Finished, Provisional, Verified
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.timeouts import Patience
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from outrider.cli.serve import Endpoint
from outrider_core.chat import grammar
from outrider_core.chat.api.constraints import constraint_of
from outrider_core.chat.grammar import open_grammars
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import load_target
from outrider_core.protocol.constraint import Adjustment, Rules
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import in_chunks, serve
from tests.targets.test_understudy import with_understudy
from tests.tiny import EOS, json_tokenizer, plain_decode, save_tiny_drafter, save_tiny_target, tiny_model
from tests.waiting import HANG

VOCAB = 320
TOKENIZER = json_tokenizer(VOCAB)
PROMPT = [1, 40, 50, 60]
MOST = 150
#: nobody waits for the drafter here, and an answer waits as long as it must
PATIENCE = Patience(open=0.6, connect=0.3, silence=1.0, offline=60.0)
#: seconds behind which a link returns to a device that had fewer tokens left to write than was asked for
ENDED_ALONE = 5.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "numbers": {
            "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 4, "maxItems": 6
        },
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ASKED: dict[str, Any] = {"response_format": FORM, "frequency_penalty": 0.4, "logit_bias": {40: 1.5}}
Folders = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("json")
    target, drafter, bundle = root / "target", root / "drafter", root / "bundle"
    model = tiny_model(seed=5, vocab=VOCAB, dtype=torch.float32)
    save_tiny_drafter(drafter, model, save_tiny_target(target, model, TOKENIZER))
    write_bundle(
        BundleOptions(target=TargetSource.resolve(str(target)), drafter=drafter, output_dir=bundle, quant="fp32")
    )
    with_understudy(target, bundle)
    return target, drafter, bundle


@pytest.fixture(scope="module")
def bundle(folders: Folders) -> Bundle:
    return open_bundle(folders[2])


def json_verifier(folders: Folders) -> Verifier:
    settings = Settings(max_model_len=240, max_nodes=16, kv_tokens=2000, max_sessions=8)
    target = load_target(TargetSource.resolve(str(folders[0])), "float64")
    return in_chunks(Verifier(torch_model(target, load_drafter(folders[1]), settings), settings), 16)


def truth(folders: Folders, sampling: Sampling, prompt: list[int] = PROMPT) -> list[int]:
    constraint = constraint_of(len(prompt), VOCAB, **ASKED)
    assert constraint is not None
    rules = open_grammars(TOKENIZER.backend_tokenizer, VOCAB, [EOS]).compile(constraint.schema)
    model = load_target(TargetSource.resolve(str(folders[0])), "float64").model
    tokens = plain_decode(model, prompt, sampling, MOST, rules=Rules(constraint, rules.matcher()))
    assert_valid(tokens)
    return tokens


def assert_valid(tokens: list[int]) -> None:
    assert tokens[-1] == EOS
    jsonschema.validate(json.loads(TOKENIZER.decode(tokens[:-1])), SCHEMA)


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


CUT_POLICIES = {
    "repair": Policy(),
    "device first": Policy(writer="prefer-device"),
    "keep": Policy(on_return="keep"),
}
QUICK = {("repair", 1.0), ("device first", 0.0), ("keep", 1.0)}
CUTS = [
    pytest.param(
        temperature, policy, id=f"{temperature}-{name}", marks=() if (name, temperature) in QUICK else pytest.mark.slow
    )
    for temperature in (0.0, 1.0)
    for name, policy in CUT_POLICIES.items()
]


@pytest.mark.parametrize(("temperature", "policy"), CUTS)
def test_cut_in_mid_json(folders: Folders, bundle: Bundle, temperature: float, policy: Policy) -> None:
    """Cut after every few tokens, to the other of two replicas: the device goes on, and the JSON is whole."""
    sampling, rng = Sampling(temperature, seed=9), random.Random(temperature)

    async def run(first: str, second: str) -> list[Event]:
        events, cut_at, verified = list[Event](), 2, 0
        async with (
            EmulatedLink(port_of(first)) as link,
            EdgeRuntime(
                bundle,
                link.address,
                RuntimeOptions(policy=policy, patience=PATIENCE, threads=1),
                pinned=Pinned(mode="tree"),
            ) as runtime,
        ):
            asked = runtime.generate(PROMPT, max_new_tokens=MOST, temperature=temperature, seed=9, **ASKED)
            async for event in asked:
                events.append(event)
                verified += len(event.tokens) if isinstance(event, Verified) else 0
                if verified >= cut_at:
                    cut_at += rng.randrange(3, 9)
                    link.upstream_port = port_of(rng.choice([first, second]))
                    link.cut()
        return events

    with serve(json_verifier(folders)) as first, serve(json_verifier(folders)) as second:
        events = asyncio.run(run(first, second))
    end = events[-1]
    assert isinstance(end, Finished) and end.reason == "stop" and end.stats.opens > 2
    assert_valid(end.token_ids)
    if policy.on_return == "repair":
        assert end.token_ids == truth(folders, sampling)


def outage(address: str, bundle: Bundle, seed: int, policy: Policy, alone: int) -> Finished:
    """An answer whose link is away from some token on until the device has written `alone` tokens, if it can."""
    rng = random.Random(seed)

    async def run() -> Finished:
        verified, provisional, cut_at, loop = 0, 0, rng.randrange(2, 12), asyncio.get_running_loop()
        async with (
            EmulatedLink(port_of(address)) as link,
            EdgeRuntime(bundle, link.address, RuntimeOptions(policy=policy, patience=PATIENCE, threads=1)) as runtime,
        ):
            asked = runtime.generate(PROMPT, max_new_tokens=MOST, temperature=1.0, seed=seed, **ASKED)
            async for event in asked:
                match event:
                    case Verified():
                        verified += len(event.tokens)
                    case Provisional():
                        provisional += 1
                if verified >= cut_at and not link.silent:
                    link.silent, provisional = True, 0
                    link.cut()
                    loop.call_later(ENDED_ALONE, setattr, link, "silent", False)
                if link.silent and provisional >= alone:
                    link.silent, cut_at = False, verified + 1000
        assert isinstance(event, Finished)
        return event

    return asyncio.run(run())


def alone_in_mid_json(folders: Folders, bundle: Bundle, seeds: range) -> None:
    """Repaired or kept, by drafter or understudy, every answer is valid in the end; a repaired one the target's."""
    written = 0
    with serve(json_verifier(folders)) as address:
        for seed in seeds:
            understudy = ("off", "cold", "warm")[seed % 3]
            on_return = ("repair", "keep")[seed // 3 % 2]
            policy = Policy(on_return=on_return, understudy=understudy, offline="continue", offline_rate=1000.0)  # type: ignore[arg-type]
            end = outage(address, bundle, seed, policy, 1 + seed % 9)
            assert end.reason == "stop", (seed, end)
            assert_valid(end.token_ids)
            if on_return == "repair":
                assert end.token_ids == truth(folders, Sampling(1.0, seed=seed)), seed
            written += end.stats.provisional
    assert written > 2 * len(seeds)


def test_written_alone_in_mid_json(folders: Folders, bundle: Bundle) -> None:
    alone_in_mid_json(folders, bundle, range(6))


@pytest.mark.slow
def test_written_alone_in_a_hundred_answers(folders: Folders, bundle: Bundle) -> None:
    alone_in_mid_json(folders, bundle, range(100))


@pytest.mark.parametrize("understudy", ["off", "cold"])
def test_json_without_a_verifier(bundle: Bundle, understudy: Literal["off", "cold"]) -> None:
    async def run() -> Finished:
        policy = Policy(understudy=understudy)
        async with EdgeRuntime(bundle, None, RuntimeOptions(policy=policy, patience=PATIENCE, threads=1)) as runtime:
            *_, end = [e async for e in runtime.generate(PROMPT, max_new_tokens=MOST, temperature=1.0, seed=3, **ASKED)]
            bad = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}
            with pytest.raises(ValueError, match="cannot be obeyed"):
                async for event in runtime.generate(PROMPT, **bad):
                    last = event
        assert isinstance(last, Finished) and last.reason == "refused" and "cannot be obeyed" in last.detail
        assert isinstance(end, Finished)
        return end

    end = asyncio.run(run())
    assert_valid(end.token_ids)
    assert {span.writer for span in end.spans} <= {"drafter", "understudy"}


def test_recorded_in_mid_json_and_resumed_by_another_process(folders: Folders, bundle: Bundle) -> None:
    async def run(address: str) -> Finished:
        record: dict[str, Any] | None = None
        async with EdgeRuntime(
            bundle, address, RuntimeOptions(patience=PATIENCE, threads=1), pinned=Pinned(mode="tree")
        ) as runtime:
            asked = runtime.generate(PROMPT, max_new_tokens=MOST, temperature=1.0, seed=9, **ASKED)
            async for event in asked:
                if isinstance(event, Verified):
                    record = json.loads(json.dumps(runtime.record()))
                    break
            await asked.aclose()
        assert record is not None and record["version"] == 1
        async with EdgeRuntime(
            bundle, address, RuntimeOptions(patience=PATIENCE, threads=1), pinned=Pinned(mode="stream")
        ) as runtime:
            for damaged in ({"version": 2}, {"constraint": None}, {"constraint": "93"}, {"constraint": "xy"}):
                with pytest.raises(ValueError, match="not a record"):
                    await anext(runtime.resume(record | damaged))
            *_, end = [event async for event in runtime.resume(record)]
        assert isinstance(end, Finished)
        return end

    with serve(json_verifier(folders)) as address:
        assert asyncio.run(run(address)).token_ids == truth(folders, Sampling(1.0, seed=9))


def test_a_verifier_that_does_not_know_constraints_is_not_asked(folders: Folders, bundle: Bundle) -> None:
    """It would pass over the field and write what it likes. An answer without one is its own affair."""
    verifier = json_verifier(folders)

    async def run(address: str) -> tuple[Finished, Finished]:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE, threads=1)) as runtime:
            ends = []
            for asked in (ASKED, {}):
                *_, end = [event async for event in runtime.generate(PROMPT, max_new_tokens=5, **asked)]
                assert isinstance(end, Finished)
                ends.append(end)
            return ends[0], ends[1]

    with serve(verifier) as address:
        verifier.constraints.obeys = 0
        refused, plain = asyncio.run(run(address))
    assert refused.stats.tokens == 0
    # whether the device's own rules are made by the time of WELCOME decides whether it writes alone
    alone = len(refused.token_ids)
    assert refused.reason == "refused" and alone in (0, 5)
    assert "does not support the answer's constraint" in refused.detail
    assert plain.reason == "length" and len(plain.token_ids) == 5


def test_arguments(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(**asked: Any) -> None:
        async with EdgeRuntime(bundle, "127.0.0.1:9", RuntimeOptions(threads=1)) as runtime:
            runtime.generate(PROMPT, **asked)

    wrong: list[dict[str, Any]] = [
        {"response_format": {"type": "yaml"}}, {"logit_bias": {VOCAB: 1.0}}, {"logit_bias": {1.5: 1.0}},
        {"frequency_penalty": 3.0}, {"presence_penalty": float("nan")},
    ]  # fmt: skip
    for asked in wrong:
        with pytest.raises(ValueError, match=next(iter(asked))):
            asyncio.run(run(**asked))

    async def alone() -> None:
        async with EdgeRuntime(bundle, None, RuntimeOptions(threads=1)) as runtime:
            runtime.generate(PROMPT, **ASKED)

    monkeypatch.setattr(grammar.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need a verifier.*llguidance"):
        asyncio.run(alone())


def test_the_devices_endpoint(folders: Folders, bundle: Bundle) -> None:
    messages = [{"role": "user", "content": "abc"}]
    body = {"model": bundle.manifest.target, "messages": messages, "max_tokens": MOST, "temperature": 1, "seed": 4}
    bad = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}
    form = {"type": "json_schema", "name": "a", "schema": {"not": {}}}
    flat = {"model": bundle.manifest.target, "input": "abc", "text": {"format": form}}
    text = TOKENIZER.decode(
        truth(folders, Sampling(1.0, seed=4), bundle.render_chat(messages)), skip_special_tokens=True
    )

    async def run(server: str | None) -> list[httpx.Response]:
        async with EdgeRuntime(bundle, server, RuntimeOptions(patience=PATIENCE, threads=1)) as runtime:
            transport = httpx.ASGITransport(Endpoint(runtime).app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1", timeout=HANG) as client:
                bodies = [body | ASKED, body | bad, body | bad | {"stream": True}]
                replies = [await client.post("/chat/completions", json=each) for each in bodies]
                flats = [flat, flat | {"stream": True}]
                return replies + [await client.post("/responses", json=each) for each in flats]

    with serve(json_verifier(folders)) as address:
        good, *refusals = asyncio.run(run(address))
    assert good.json()["choices"][0]["message"]["content"] == text
    assert good.json()["choices"][0]["finish_reason"] == "stop"
    assert [refused.status_code for refused in refusals] == [400] * 4, "a stream that is refused has not begun"
    alone, *unobeyed = asyncio.run(run(None))
    assert [(each.status_code, each.json()["error"]["code"]) for each in unobeyed] == [(400, "invalid_schema")] * 4
    assert [each.json()["error"]["param"] for each in unobeyed] == ["response_format"] * 2 + ["text.format"] * 2
    assert [each.json()["error"]["param"] for each in refusals] == [each.json()["error"]["param"] for each in unobeyed]
    for each in refusals + unobeyed:
        assert each.json()["error"]["code"] == "invalid_schema"
        assert "cannot be obeyed" in each.json()["error"]["message"]
    assert_valid([*TOKENIZER.encode(alone.json()["choices"][0]["message"]["content"], add_special_tokens=False), EOS])


def test_openais_client_at_the_devices_endpoint(folders: Folders, bundle: Bundle) -> None:
    """Choices, text and responses, whole and streamed; what only the verifier can tell is refused."""
    model, most = bundle.manifest.target, {"max_tokens": 40, "seed": 4}

    async def run(address: str) -> None:
        async with EdgeRuntime(bundle, address, RuntimeOptions(patience=PATIENCE, threads=1)) as runtime:
            web = httpx.AsyncClient(transport=httpx.ASGITransport(Endpoint(runtime).app))
            async with AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=web) as client:
                await asked(client)

    async def asked(client: AsyncOpenAI) -> None:
        said: Any = {"model": model, "messages": [{"role": "user", "content": "a"}]}
        whole = await client.chat.completions.create(**said, **most, n=2)
        assert [choice.index for choice in whole.choices] == [0, 1] and whole.usage is not None
        text = ["", ""]
        async for chunk in await client.chat.completions.create(**said, **most, n=2, stream=True):
            text[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert text == [choice.message.content for choice in whole.choices]
        plain = await client.completions.create(model=model, prompt=PROMPT, **most)
        parts = [
            part async for part in await client.completions.create(model=model, prompt=PROMPT, stream=True, **most)
        ]
        assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text
        answer = await client.responses.create(model=model, input="a", max_output_tokens=40, extra_body={"seed": 4})
        assert answer.output_text == whole.choices[0].message.content
        for refused in ({"logprobs": True}, {"n": 9}):
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(**said, **refused)  # type: ignore[call-overload]
            assert error.value.param in refused
        with pytest.raises(NotFoundError) as unknown:
            await client.embeddings.create(model=model, input="a")
        assert unknown.value.code == "unknown_url"

    with serve(json_verifier(folders)) as address:
        asyncio.run(run(address))


class Tired(Rules):
    """A grammar that allows nothing any more behind `most` tokens, as one that has run out of fuel."""

    most = 6

    @property
    def broken(self) -> str:
        return "the grammar is out of fuel" if len(self._answer) >= self.most else super().broken

    def adjustment(self) -> Adjustment:
        made = super().adjustment()
        assert made.allowed is not None
        return made._replace(allowed=np.zeros_like(made.allowed)) if self.broken else made


@pytest.mark.parametrize("most", [0, 6], ids=["at once", "in its middle"])
@pytest.mark.parametrize("mode", ["tree", "stream"])
def test_what_the_verifier_refuses_for_good_is_refused_by_the_device(
    folders: Folders, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, mode: Literal["tree", "stream"], most: int
) -> None:
    """With the verifier's reason, and at once: nobody behind it waits."""
    monkeypatch.setattr(Tired, "most", most)
    model, messages = bundle.manifest.target, [{"role": "user", "content": "abc"}]
    plain = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
    bodies = [plain | ASKED | {"max_tokens": MOST, "stream": streams} for streams in (False, True)]
    verifier = json_verifier(folders)
    prepare = verifier.constraints.prepare

    def tired(*arguments: Any) -> Any:
        future = prepare(*arguments)
        future.add_done_callback(lambda done: setattr(done.result(), "__class__", Tired))
        return future

    monkeypatch.setattr(verifier.constraints, "prepare", tired)

    async def run(address: str) -> list[httpx.Response]:
        options = RuntimeOptions(patience=Patience(connect=5.0), threads=1)  # what it would wait offline: 300 s
        async with EdgeRuntime(bundle, address, options, pinned=Pinned(mode=mode)) as runtime:
            transport = httpx.ASGITransport(Endpoint(runtime).app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1", timeout=HANG) as client:
                async with asyncio.timeout(60):
                    return list(
                        await asyncio.gather(
                            *(client.post("/chat/completions", json=each) for each in [*bodies, plain])
                        )
                    )

    with serve(verifier) as address:
        whole, streamed, behind = asyncio.run(run(address))
    assert whole.status_code == 400
    error = whole.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_schema", "response_format") and "fuel" in error["message"]
    if streamed.status_code == 200:
        *_, last, done = streamed.text.strip().split("\n\n")
        assert done == "data: [DONE]" and json.loads(last.removeprefix("data: ")) == whole.json()
    else:
        assert streamed.status_code == 400 and streamed.json() == whole.json()
    assert behind.status_code == 200
