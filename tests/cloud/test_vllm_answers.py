"""The default target on vLLM: answers through random trees, beside others, with evictions and reconnects.

Greedy ones are vLLM's own plain decoding's, by its public API; sampled and constrained ones this verifier's, token by
token. OUTRIDER_ANSWERS: how many (default 100); OUTRIDER_DTYPE: in 16 bits near-ties are counted in place of failing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.chat.grammar import Grammars, open_grammars
from outrider_core.models.target import model_folder
from outrider_core.protocol.constraint import GRAMMAR_JSON_SCHEMA, Constraint, Rules, pack_bias
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import FINISH_NONE, Generate, Verdict
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import Direct, in_chunks, started
from tests.cloud.test_every_bit import ASKED, AT_ONCE, TOKENS, TOPICS, Text, answer
from tests.e2e.conftest import DRAFTER
from tests.waiting import HANG

ANSWERS, DTYPE = int(os.environ.get("OUTRIDER_ANSWERS", "100")), os.environ.get("OUTRIDER_DTYPE", "float32")
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}'
#: sampling parameters by the answer's number; constraints come with the last two
SAMPLINGS = [
    Sampling(), Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.0, top_p=0.9, seed=4), Sampling(),
    Sampling(temperature=0.7, top_k=40, seed=5),
]  # fmt: skip


def constraint(number: int, begin: int) -> Constraint | None:
    if number % len(SAMPLINGS) == 4:
        return Constraint(begin, grammar=GRAMMAR_JSON_SCHEMA, schema=SCHEMA)
    return Constraint(begin, 0.9, 0.4, *pack_bias({260: 3.0, 99: -5.0})) if number % len(SAMPLINGS) == 5 else None


def plain_greedy(prompts: Sequence[Text]) -> tuple[Any, list[Text]]:
    """vLLM, whose end would end what another engine of this process needs, and what it writes by itself."""
    from cloud.vllm_engine.executor import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model_folder(TargetSource.resolve())), dtype=DTYPE, enforce_eager=True, max_model_len=256, max_num_seqs=8,
        block_size=32, kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
    )  # fmt: skip
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm, [tuple(each.outputs[0].token_ids) for each in llm.generate(asked, wanted, use_tqdm=False)]


def plain(direct: Direct, prompt: Text, sampling: Sampling, rules: Rules | None) -> Text:
    """What this verifier writes token by token."""
    session, text = os.urandom(16), prompt
    direct.open(session, prompt, 0, sampling, rules=rules)
    _, replies = direct.submit(session, Generate(0, 1, len(prompt), TOKENS))
    while len(text) < len(prompt) + TOKENS:
        verdict = replies.get(timeout=HANG)
        assert isinstance(verdict, Verdict), verdict
        text = (*text, verdict.bonus)
        if verdict.finish != FINISH_NONE:
            break
    return text


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_answers_through_trees_are_those_of_plain_decoding() -> None:
    from cloud.vllm_engine.loading import load_model

    # a pool for half of the sessions, and prompts in pieces
    settings = Settings(
        engine="vllm", dtype=DTYPE, drafter=DRAFTER, max_model_len=256, max_nodes=24, tree_budget=24,
        kv_tokens=AT_ONCE * 64,
    )  # fmt: skip
    model = load_model(settings, TargetSource.resolve())
    chat = model.tokenizer
    assert chat is not None
    asked = [question.format(topic) for topic in TOPICS for question in ASKED][:ANSWERS]
    prompts = [tuple(chat.encode_chat([{"role": "user", "content": text}])) for text in asked]
    samplings = [SAMPLINGS[number % len(SAMPLINGS)] for number in range(len(prompts))]
    grammars = open_grammars(chat.tokenizer, model.vocab_size, model.eos_ids)
    verifier = in_chunks(Verifier(model, settings), 29)
    rng, truths, near_ties = random.Random(0), list[Text](), 0

    def rules(number: int) -> Rules | None:
        return rules_of(grammars, number, len(prompts[number]))

    kept, texts = plain_greedy([prompt for number, prompt in enumerate(prompts) if number % len(SAMPLINGS) < 2])
    by_itself = iter(texts)
    with started(verifier) as direct:
        for number, prompt in enumerate(prompts):
            greedy = number % len(SAMPLINGS) < 2
            told = (*prompt, *next(by_itself)) if greedy else plain(direct, prompt, samplings[number], rules(number))
            truths.append(told)
        for start in range(0, len(prompts), AT_ONCE):
            ours = range(start, min(start + AT_ONCE, len(prompts)))
            told = [(truths[number], list[bytes]()) for number in ours]
            made = answer(
                direct, rng, [prompts[n] for n in ours], [samplings[n] for n in ours], told,
                lambda index, start=start: rules(start + index),  # type: ignore[misc]
            )  # fmt: skip
            for number, text in zip(ours, made, strict=True):
                near_ties += text[: len(truths[number])] != truths[number]
        evictions = verifier.engine.pool.evictions
    del kept
    print(f"{len(prompts)} answers in {model.arithmetic}, {near_ties} not plain decoding's; {evictions} evictions")
    assert evictions > len(prompts) and (not near_ties or DTYPE != "float32")


def rules_of(grammars: Grammars, number: int, begin: int) -> Rules | None:
    held = constraint(number, begin)
    if held is None:
        return None
    return Rules(held, grammars.compile(held.schema).matcher() if held.schema else None)
