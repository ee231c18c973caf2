"""Prompts in, the target's own answers out: equal to plain generation, resumable."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export.answers import SlotDecoder, generate_answers, read_answers, read_prompts, render_prompt
from models.target import Target
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer

#: many ids end an answer, so that answers differ in length and slots are refilled at different times
ENDS = (3, *range(20, 50))


def answering_target(family: str = "llama", seed: int = 0) -> Target:
    return replace(tiny_target(tiny_model(family, seed), ENDS), tokenizer=tiny_tokenizer())


def some_prompts(count: int, longest: int = 12) -> list[str]:
    rng = random.Random(4)
    return [" ".join(f"w{rng.randrange(4, 199)}" for _ in range(rng.randint(1, longest))) for _ in range(count)]


@torch.inference_mode()
def reference(target: Target, prompt: str, max_new: int) -> list[int]:
    ids = torch.tensor([render_prompt(target, prompt)])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new, eos_token_id=list(ENDS),
        pad_token_id=0,
    )  # fmt: skip
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


class Counter:
    """What `on_tokens` was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, tokens: int, answers: int) -> None:
        self.calls.append((tokens, answers))


def answer(
    target: Target, prompts: list[str], path: Path, slots: int = 3, max_prompt: int = 32, max_new: int = 16
) -> Counter:
    counter = Counter()
    generate_answers(
        target, prompts, path, max_prompt=max_prompt, max_new=max_new, slots=slots, on_tokens=counter
    )  # fmt: skip
    return counter


def answers_of(path: Path) -> dict[int, list[int]]:
    rows = list(read_answers(path))
    assert len({row["index"] for row in rows}) == len(rows), "an index was answered twice"
    return {row["index"]: row["answer"] for row in rows}


# generating


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_answers_equal_plain_generation_with_refills(family: str, tmp_path: Path) -> None:
    prompts = some_prompts(11)
    expected = {i: reference(answering_target(family), prompt, 16) for i, prompt in enumerate(prompts)}
    assert len({len(tokens) for tokens in expected.values()}) > 3, "lengths should differ"
    answer(answering_target(family), prompts, tmp_path / "answers.jsonl")
    assert answers_of(tmp_path / "answers.jsonl") == expected


@pytest.mark.parametrize("slots", [1, 2, 7, 11])
def test_slots_do_not_change_the_answers(slots: int, tmp_path: Path) -> None:
    prompts = some_prompts(7)
    target = answering_target(seed=2)
    expected = {i: reference(target, prompt, 16) for i, prompt in enumerate(prompts)}
    answer(target, prompts, tmp_path / "answers.jsonl", slots=slots)
    assert answers_of(tmp_path / "answers.jsonl") == expected


@pytest.mark.parametrize("slots", [1, 2])
def test_answers_that_end_with_their_first_token(slots: int, tmp_path: Path) -> None:
    """All slots may be free behind a prefill while prompts still wait."""
    prompts = some_prompts(7)
    answer(answering_target(), prompts, tmp_path / "answers.jsonl", slots=slots, max_new=1)
    assert {i: len(tokens) for i, tokens in answers_of(tmp_path / "answers.jsonl").items()} == dict.fromkeys(
        range(7), 1
    )


def test_a_slot_without_work_stays_inside_its_cache(tmp_path: Path) -> None:
    """Three answers of full length in two slots: the second slot idles through the third answer."""
    target = replace(answering_target(), eos_ids=())
    answer(target, [" ".join([word] * 30) for word in ("w5", "w6", "w7")], tmp_path / "answers.jsonl", slots=2)
    assert {i: len(tokens) for i, tokens in answers_of(tmp_path / "answers.jsonl").items()} == {0: 16, 1: 16, 2: 16}


def test_rows_hold_the_rendered_prompt(tmp_path: Path) -> None:
    prompts, target = some_prompts(3), answering_target()
    answer(target, prompts, tmp_path / "answers.jsonl")
    rows = {row["index"]: row["prompt"] for row in read_answers(tmp_path / "answers.jsonl")}
    assert rows == {i: render_prompt(target, prompt) for i, prompt in enumerate(prompts)}


def test_the_targets_attention_is_put_back(tmp_path: Path) -> None:
    target, tokens = answering_target(), torch.tensor([[5, 6, 7]])
    before = target.model(tokens).logits
    answer(target, some_prompts(3), tmp_path / "answers.jsonl")
    torch.testing.assert_close(target.model(tokens).logits, before, rtol=0, atol=1e-12)


def test_too_long_prompts_are_counted_and_left_empty(tmp_path: Path) -> None:
    prompts = ["w5", " ".join(["w6"] * 31), "w7 w8"]
    counter = answer(answering_target(), prompts, tmp_path / "answers.jsonl", slots=1)
    found = answers_of(tmp_path / "answers.jsonl")
    assert [bool(found[i]) for i in range(3)] == [True, False, True]
    assert sum(answers for _, answers in counter.calls) == 3
    assert sum(tokens for tokens, _ in counter.calls) == sum(map(len, found.values()))


def test_a_prompt_of_exactly_the_longest_length_is_answered(tmp_path: Path) -> None:
    target, prompt = answering_target(), " ".join(["w6"] * 30)  # and <s>, </s>
    answer(target, [prompt], tmp_path / "answers.jsonl", slots=1)
    assert answers_of(tmp_path / "answers.jsonl") == {0: reference(target, prompt, 16)}


def test_resume_after_a_cut_last_line(tmp_path: Path) -> None:
    prompts, path = some_prompts(9), tmp_path / "answers.jsonl"
    answer(answering_target(), prompts, path)
    expected, lines = answers_of(path), path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    kept = [json.loads(line) for line in lines[:4]]
    counter = answer(answering_target(), prompts, path)
    assert counter.calls[0] == (sum(len(row["answer"]) for row in kept), 4)
    assert sum(answers for _, answers in counter.calls) == 9
    assert answers_of(path) == expected
    assert path.read_bytes().splitlines(keepends=True)[:4] == lines[:4]


def test_a_finished_file_is_left_as_it_is(tmp_path: Path) -> None:
    prompts, path = some_prompts(3), tmp_path / "answers.jsonl"
    answer(answering_target(), prompts, path)
    before = path.read_bytes()
    assert answer(answering_target(), prompts, path).calls[1:] == []
    assert path.read_bytes() == before


def test_decoder_keeps_slots_apart() -> None:
    """Logits of a slot equal a forward over its own tokens, whatever the others hold."""
    target = answering_target()
    plain = tiny_model()
    decoder = SlotDecoder(target, 3, 24)
    texts = {0: [5, 6], 2: [9, 8, 7, 6, 5], 1: [100, 101, 102]}
    logits = decoder.prefill(texts)
    for step in range(4):
        for row, (slot, ids) in enumerate(texts.items()):
            expected = plain(torch.tensor([ids])).logits[0, -1]
            got = logits[row] if step == 0 else logits[slot]
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        for slot in texts:
            texts[slot].append(60 + 10 * slot + step)
        logits = decoder.step(torch.tensor([texts[slot][-1] for slot in range(3)]))


# prompts


def test_prompt_formats(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "one"}\n\n{"turns": ["two", "ignored"], "id": 3}\n{"prompt": "größe ✓"}', "utf-8")
    text = tmp_path / "b.txt"
    text.write_bytes(b"four\r\n \nfive, {not json}\n")
    assert read_prompts([rows, text]) == ["one", "two", "größe ✓", "four", "five, {not json}"]


@pytest.mark.parametrize(
    "line",
    ["not json", '{"text": "x"}', '{"turns": []}', "[1]", "7", '"prompt"', "null", '{"prompt": 5}', '{"turns": "x"}',
     '{"turns": [null]}', '{"prompt": null}'],
)  # fmt: skip
def test_a_broken_row_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: not a JSON object with `prompt` or `turns`$"):
        read_prompts([path])


def test_no_answers_file_means_no_answers(tmp_path: Path) -> None:
    assert list(read_answers(tmp_path / "nothing.jsonl")) == []
