"""The default target on vLLM: answers through random trees, beside others, with evictions and reconnects.

Greedy ones are vLLM's own plain decoding's, by its public API; sampled and constrained ones this verifier's, token by
token. In 16 bits, greedy answers may part from plain decoding at near-ties, which are counted.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from cloud.engine.served_model import ServedModel
from cloud.server.service import Verifier
from cloud.settings import Settings
from outrider_core.chat.grammar import Grammars, open_grammars
from outrider_core.models.target import model_folder
from outrider_core.protocol.constraint import GRAMMAR_JSON_SCHEMA, Constraint, Rules, pack_bias
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import FINISH_NONE, Generate, Verdict
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import Direct, in_chunks, started
from tests.cloud.test_every_bit import ANSWERS, ASKED, AT_ONCE, TOKENS, TOPICS, Text, answer
from tests.e2e.conftest import DRAFTER
from tests.waiting import HANG

#: two tokens are nearly tied if their logits differ by no more: twice what a bfloat16 between 16 and 32 is rounded by
NEAR_TIE = 0.25
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


class Plain(NamedTuple):
    """What vLLM writes by itself, and for each token how far the likeliest lie behind it, in logits."""

    tokens: Text
    behind: list[dict[int, float]]


def plain_greedy(prompts: Sequence[Text], dtype: str) -> tuple[Any, list[Plain]]:
    """vLLM, whose end would end what another engine of this process needs, and what it writes by itself."""
    from cloud.vllm_engine.executor import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model_folder(TargetSource.resolve())), dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=8,
        block_size=32, kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
    )  # fmt: skip
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, logprobs=8)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    found = list[Plain]()
    for each in llm.generate(asked, wanted, use_tqdm=False):
        said = each.outputs[0]
        behind = [
            {other: row[token].logprob - held.logprob for other, held in row.items()}
            for token, row in zip(said.token_ids, said.logprobs, strict=True)
        ]
        found.append(Plain(tuple(said.token_ids), behind))
    return llm, found


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


def served(dtype: str) -> tuple[ServedModel, Settings, list[Text]]:
    """The model with a pool for half of the sessions, and the prompts."""
    from cloud.vllm_engine.loading import load_model

    settings = Settings(
        engine="vllm", dtype=dtype, drafter=DRAFTER, max_model_len=256, max_nodes=24, tree_budget=24,
        kv_tokens=AT_ONCE * 64,
    )  # fmt: skip
    model = load_model(settings, TargetSource.resolve())
    assert model.tokenizer is not None
    asked = [question.format(topic) for topic in TOPICS for question in ASKED]
    return model, settings, [tuple(model.tokenizer.encode_chat([{"role": "user", "content": text}])) for text in asked]


def through_trees(
    direct: Direct,
    prompts: Sequence[Text],
    samplings: Sequence[Sampling],
    truths: Sequence[Text],
    rules: Callable[[int], Rules | None] = lambda number: None,
) -> list[Text]:
    """Answers to the prompts, several at once, as long as these."""
    rng, texts = random.Random(0), list[Text]()
    for start in range(0, len(prompts), AT_ONCE):
        ours = slice(start, start + AT_ONCE)
        told = [(text, list[bytes]()) for text in truths[ours]]
        texts += answer(
            direct, rng, prompts[ours], samplings[ours], told,
            lambda index, start=start: rules(start + index),  # type: ignore[misc]
        )  # fmt: skip
    assert direct.verifier.engine.pool.evictions > len(prompts)
    return [text[: len(truth)] for text, truth in zip(texts, truths, strict=True)]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_answers_through_trees_are_those_of_plain_decoding() -> None:
    model, settings, prompts = served("float32")
    assert model.tokenizer is not None
    samplings = [SAMPLINGS[number % len(SAMPLINGS)] for number in range(ANSWERS)]
    grammars = open_grammars(model.tokenizer.tokenizer, model.vocab_size, model.eos_ids)

    def rules(number: int) -> Rules | None:
        return rules_of(grammars, number, len(prompts[number]))

    kept, texts = plain_greedy([text for number, text in enumerate(prompts) if number % len(SAMPLINGS) < 2], "float32")
    by_itself, truths = iter(texts), list[Text]()
    with started(in_chunks(Verifier(model, settings), 29)) as direct:  # prompts come in pieces
        for number, prompt in enumerate(prompts):
            greedy = number % len(SAMPLINGS) < 2
            truths.append(
                (*prompt, *next(by_itself).tokens)
                if greedy
                else plain(direct, prompt, samplings[number], rules(number))
            )
        assert through_trees(direct, prompts, samplings, truths, rules) == truths
    del kept


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_narrow_formats_part_from_plain_decoding_at_near_ties_alone() -> None:
    """OUTRIDER_ANSWERS and OUTRIDER_DTYPE: how many answers, and the number format."""
    count, dtype = int(os.environ.get("OUTRIDER_ANSWERS", "30")), os.environ.get("OUTRIDER_DTYPE", "bfloat16")
    model, settings, prompts = served(dtype)
    prompts = prompts[:count]
    kept, told = plain_greedy(prompts, dtype)
    ties = sum(sorted(row.values())[1] <= NEAR_TIE for each in told for row in each.behind)
    truths = [(*prompt, *each.tokens) for prompt, each in zip(prompts, told, strict=True)]
    with started(in_chunks(Verifier(model, settings), 29)) as direct:
        texts = through_trees(direct, prompts, [Sampling()] * count, truths)
        evictions = direct.verifier.engine.pool.evictions
    del kept
    gaps = list[float]()  # at the first difference of each answer that has one, how far its token lies behind
    for prompt, text, each in zip(prompts, texts, told, strict=True):
        written = zip(text[len(prompt) :], each.tokens, each.behind, strict=False)  # the text may end earlier
        gaps += [row.get(own, math.inf) for own, token, row in written if own != token][:1]
    print(
        f"{count} answers in {model.arithmetic}, {sum(len(each.tokens) for each in told)} tokens, {ties} near-ties; "
        f"{len(gaps)} answers part, by {max(gaps, default=0):.3f} at most; {evictions} evictions"
    )
    assert all(gap <= NEAR_TIE for gap in gaps), gaps


def rules_of(grammars: Grammars, number: int, begin: int) -> Rules | None:
    held = constraint(number, begin)
    if held is None:
        return None
    return Rules(held, grammars.compile(held.schema).matcher() if held.schema else None)
