"""Random schemas through a verifier: a valid document, or a refusal by name before the first token."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest
import regex

from cloud.engine.request import EngineRequest
from outrider_core.chat.grammar import GrammarError
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import Error, Generate, Open, pack_ids
from tests.cloud.by_hand import Asked
from tests.cloud.drive import started
from tests.cloud.test_structured import BEGIN, EOS, PROMPT, TOKENIZER, held_to, json_verifier
from tests.schemas import WideSchemas
from tests.waiting import HANG, until

MOST = 160
#: schemas that are asked for at once
BATCH = 10


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_five_hundred_schemas(
    temperature: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jsonschema._keywords.re", regex)  # Python's own knows no \p{L}
    monkeypatch.setattr("jsonschema._utils.re", regex)
    outcomes = Counter[str]()
    schemas = [WideSchemas(random.Random(10_000 + seed)).schema() for seed in range(500)]
    with started(json_verifier(kv_tokens=8192)) as direct:
        verifier = direct.verifier
        for first in range(0, len(schemas), BATCH):
            asked = list[tuple[dict[str, Any], Asked]]()
            for place, schema in enumerate(schemas[first : first + BATCH]):
                making = verifier.constraints.prepare("", held_to(schema), PROMPT, lambda: False)
                try:
                    rules = making.result(HANG)
                except GrammarError as error:
                    assert len(str(error)) > 30, error
                    outcomes["refused by name"] += 1
                    continue
                session = (first + place).to_bytes(16, "big")
                sampling = Sampling(temperature, seed=first + place)
                opening = Open(0, session, 0, pack_ids(PROMPT), len(PROMPT), sampling)
                answer = Asked(None)
                verifier.submit(EngineRequest(session, opening, lambda *_: None, tokens=list(PROMPT), rules=rules))
                verifier.submit(EngineRequest(session, Generate(0, 1, BEGIN, MOST), answer.take))
                asked.append((schema, answer))
            assert until(lambda: all(answer.done for _, answer in asked))  # noqa: B023
            for schema, answer in asked:
                faults = [reply.text for reply in answer.replies if isinstance(reply, Error)]
                assert not faults, (schema, faults)
                if answer.drawn[-1] != EOS:
                    outcomes[f"cut at {MOST} tokens"] += 1
                    continue
                text = TOKENIZER.decode(answer.drawn, skip_special_tokens=True)
                try:
                    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                    outcomes["valid"] += 1
                except (jsonschema.exceptions._WrappedReferencingError, RecursionError):
                    outcomes["valid, as far as jsonschema can tell"] += 1
    with capsys.disabled():
        print(f"\n500 schemas at temperature {temperature:g}:", dict(outcomes))
    assert outcomes["valid"] > 150
