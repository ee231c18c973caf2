"""Prompts in, the target's own answers out: equal to plain generation, resumable."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export.train.answers import AnswerLimits, generate_answers, read_answers
from export.train.decoder import SlotDecoder, choose
from export.train.prompts import ChatFormat, Conversation, UserTurn, plan, read_prompts
from outrider_core.models.target import Target, open_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.device import DEVICE, EXACT
from tests.tiny import plain_decode, tiny_model, tiny_target, tiny_tokenizer

#: many ids end an answer, so that answers differ in length and slots are refilled at different times
ENDS = (3, *range(20, 50))


def answering_target(family: str = "llama", seed: int = 0) -> Target:
    return replace(tiny_target(tiny_model(family, seed), ENDS), tokenizer=tiny_tokenizer())


def some_prompts(count: int, longest: int = 12) -> list[str]:
    rng = random.Random(4)
    return [" ".join(f"w{rng.randrange(4, 199)}" for _ in range(rng.randint(1, longest))) for _ in range(count)]


@torch.inference_mode()
def reference(target: Target, prompt: str, max_new: int) -> list[int]:
    ids = torch.tensor([render(target, prompt)])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new, eos_token_id=list(ENDS),
        pad_token_id=0,
    )  # fmt: skip
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


def render(target: Target, prompt: str) -> list[int]:
    """What a user's question becomes everywhere else in the product."""
    chat = [{"role": "user", "content": prompt}]
    return list(target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def asked(prompts: list[str]) -> list[Conversation]:
    return [Conversation((UserTurn(prompt),)) for prompt in prompts]


def answer_all(
    target: Target, conversations: list[Conversation], path: Path, slots: int, limits: AnswerLimits
) -> list[int]:
    """Answer those that are not in the file yet; returns the answer tokens of each that ended."""
    done = {row["index"] for row in read_answers(path)}
    ended: list[int] = []
    left = {index: conversation for index, conversation in enumerate(conversations) if index not in done}
    generate_answers(target, left, path, limits=limits, slots=slots, on_end=ended.append)
    return ended


def answer(
    target: Target, prompts: list[str], path: Path, slots: int = 3, max_prompt: int = 32, max_new: int = 16
) -> list[int]:
    return answer_all(target, asked(prompts), path, slots, AnswerLimits(max_prompt, max_new, max_prompt + max_new))


def answers_of(path: Path) -> dict[int, list[int]]:
    rows = list(read_answers(path))
    assert len({row["index"] for row in rows}) == len(rows), "an index was answered twice"
    return {row["index"]: [token for begin, end in row["answers"] for token in row["ids"][begin:end]] for row in rows}


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_are_kept_in_float32_on_a_cpu(dtype: torch.dtype) -> None:
    """The logits behind a prompt and one more token are those of one plain forward pass, within the model's dtype."""
    target = tiny_target(tiny_model(dtype=dtype))
    texts = {0: [5, 9, 44, 17, 60], 1: [8, 7]}
    with torch.inference_mode():
        plain = torch.stack([target.model(torch.tensor([[*ids, 12]])).logits[0, -1] for ids in texts.values()])
    decoder = SlotDecoder(target, slots=2, capacity=16)
    assert (decoder.keys.dtype, decoder.values.dtype) == (torch.float32, dtype)
    decoder.prefill(texts)
    logits = decoder.step(torch.tensor([12, 12]))
    decoder.close()
    assert logits.dtype == dtype
    close = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits, plain, rtol=close, atol=close)


def test_a_slot_without_work_stays_inside_its_cache(tmp_path: Path) -> None:
    """Three answers of full length in two slots: the second slot idles through the third answer."""
    target = replace(answering_target(), eos_ids=())
    answer(target, [" ".join([word] * 30) for word in ("w5", "w6", "w7")], tmp_path / "answers.jsonl", slots=2)
    assert {i: len(tokens) for i, tokens in answers_of(tmp_path / "answers.jsonl").items()} == {0: 16, 1: 16, 2: 16}


def test_rows_hold_the_rendered_prompt(tmp_path: Path) -> None:
    prompts, target = some_prompts(3), answering_target()
    answer(target, prompts, tmp_path / "answers.jsonl")
    rows = {row["index"]: row["ids"][: row["answers"][0][0]] for row in read_answers(tmp_path / "answers.jsonl")}
    assert rows == {i: render(target, prompt) for i, prompt in enumerate(prompts)}


def test_the_targets_attention_is_put_back(tmp_path: Path) -> None:
    target, tokens = answering_target(), torch.tensor([[5, 6, 7]])
    before = target.model(tokens).logits
    answer(target, some_prompts(3), tmp_path / "answers.jsonl")
    torch.testing.assert_close(target.model(tokens).logits, before, rtol=0, atol=1e-12)


def test_too_long_prompts_are_counted_and_left_empty(tmp_path: Path) -> None:
    prompts = ["w5", " ".join(["w6"] * 31), "w7 w8"]
    ended = answer(answering_target(), prompts, tmp_path / "answers.jsonl", slots=1)
    found = answers_of(tmp_path / "answers.jsonl")
    assert [bool(found[i]) for i in range(3)] == [True, False, True]
    assert sorted(ended) == sorted(map(len, found.values()))


def test_a_prompt_of_exactly_the_longest_length_is_answered(tmp_path: Path) -> None:
    target, prompt = answering_target(), " ".join(["w6"] * 30)  # and <s>, </s>
    answer(target, [prompt], tmp_path / "answers.jsonl", slots=1)
    assert answers_of(tmp_path / "answers.jsonl") == {0: reference(target, prompt, 16)}


def test_resume_after_a_cut_last_line(tmp_path: Path) -> None:
    prompts, path = some_prompts(9), tmp_path / "answers.jsonl"
    answer(answering_target(), prompts, path)
    expected, lines = answers_of(path), path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    assert len(answer(answering_target(), prompts, path)) == 5
    assert answers_of(path) == expected
    assert path.read_bytes().splitlines(keepends=True)[:4] == lines[:4]


def test_lines_that_a_crash_has_zeroed_are_answered_again(tmp_path: Path) -> None:
    prompts, path = some_prompts(9), tmp_path / "answers.jsonl"
    answer(answering_target(), prompts, path)
    expected, content = answers_of(path), bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    path.write_bytes(content)
    assert 0 < len(answer(answering_target(), prompts, path)) < 9
    assert answers_of(path) == expected


def test_a_finished_file_is_left_as_it_is(tmp_path: Path) -> None:
    prompts, path = some_prompts(3), tmp_path / "answers.jsonl"
    answer(answering_target(), prompts, path)
    before = path.read_bytes()
    assert answer(answering_target(), prompts, path) == []
    assert path.read_bytes() == before


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [5, 126])
def test_decoder_keeps_slots_apart(longest: int) -> None:
    """Logits of a slot equal a forward over its own tokens, whatever the others hold, past one graph's span too."""
    target = answering_target()
    target.model.to(DEVICE)
    plain = tiny_model()
    decoder = SlotDecoder(target, 3, 256)
    texts = {0: [5, 6], 2: [4 + 7 * i % 190 for i in range(longest)], 1: [100, 101, 102]}
    logits = decoder.prefill(texts)
    for step in range(4):
        for row, (slot, ids) in enumerate(texts.items()):
            expected = plain(torch.tensor([ids])).logits[0, -1]
            got = logits[row] if step == 0 else logits[slot]
            torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=EXACT)
        for slot in texts:
            texts[slot].append(60 + 10 * slot + step)
        logits = decoder.step(torch.tensor([texts[slot][-1] for slot in range(3)], device=DEVICE))


# several turns


def test_follow_up_turns_stand_behind_the_answers(tmp_path: Path) -> None:
    """The second answer is greedy decoding behind the conversation as the chat template renders it."""
    target = answering_target()
    conversations = [Conversation((UserTurn("w5 w6"), UserTurn("w9"))), Conversation((UserTurn("w7"),))]
    limits = AnswerLimits(32, 16, 64)
    answer_all(target, conversations, tmp_path / "a.jsonl", 2, limits)
    rows = {row["index"]: row for row in read_answers(tmp_path / "a.jsonl")}
    assert [len(rows[i]["answers"]) for i in range(2)] == [2, 1]
    ids, ((begin, end), (again, last)) = rows[0]["ids"], rows[0]["answers"]
    assert ids[:begin] == render(target, "w5 w6") and last == len(ids)
    words = target.tokenizer("w9 </s>", add_special_tokens=False)["input_ids"]
    assert ids[end:again] == words if ids[end - 1] == 3 else [3, *words]
    expected = plain_decode(tiny_model(), ids[:again], Sampling(), 16, ENDS)
    assert ids[again:] == expected


def test_the_target_writes_prompts_itself(tmp_path: Path) -> None:
    """Its turn begins as told, stands closed in the text as the template renders it, and is answered greedily."""
    target = answering_target()
    conversations = plan([], self_prompts=12, openings=["w5 w6"], seed=3)
    assert {turn for asked in conversations for turn in asked.turns} == {UserTurn("", True), UserTurn("w5 w6", True)}
    limits = AnswerLimits(24, 8, 64)
    answer_all(target, conversations, tmp_path / "a.jsonl", 5, limits)
    rows = list(read_answers(tmp_path / "a.jsonl"))
    assert sorted(row["index"] for row in rows) == list(range(12))
    answered = [row for row in rows if row["answers"]]
    assert len(answered) > 3
    for row in answered:
        [(begin, _)] = row["answers"]
        asked = target.tokenizer.decode(row["ids"][:begin], skip_special_tokens=True)
        assert asked.startswith(conversations[row["index"]].turns[0].text)
        assert row["ids"][:begin] == render(target, asked)
        assert row["ids"][begin:] == plain_decode(tiny_model(), row["ids"][:begin], Sampling(), 8, ENDS)


def test_sampled_answers_follow_the_targets_distribution() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2)).repeat(20_000, 1)
    temperatures = torch.full((20_000,), 0.7)
    temperatures[10_000:] = 0.0
    tokens = choose(logits, temperatures, torch.Generator().manual_seed(1))
    assert (tokens[10_000:] == logits[0].argmax()).all()
    distribution = torch.softmax(logits[0] / 0.7, -1)
    seen = torch.bincount(tokens[:10_000], minlength=30) / 10_000
    assert ((seen - distribution).abs() < 5 * (distribution * (1 - distribution) / 10_000).sqrt() + 1e-4).all()


# prompts


def test_plans_are_the_same_for_the_same_arguments() -> None:
    prompts = [(f"w{i} w{i + 1}",) for i in range(40)]
    wanted = {"limit": 30, "self_prompts": 8, "sampled": 0.4, "follow_ups": 0.3}
    one, other, third = (plan(prompts, **wanted, seed=seed) for seed in (1, 1, 2))  # type: ignore[arg-type]
    assert one == other != third and len(one) == 30 + 8
    warm = [asked.temperature for asked in one if asked.temperature]
    assert 8 < len(warm) < 28 and all(0.0 < temperature <= 1.0 for temperature in warm)
    assert min(warm) < 0.4 and max(warm) > 0.6  # evenly from 0 to 1
    assert 4 < sum(len(asked.turns) == 2 for asked in one) < 26
    assert sum(asked.turns[0].goes_on for asked in one) == 8


def test_the_default_targets_template_is_cut_where_it_renders() -> None:
    tokenizer = open_target(TargetSource.resolve()).tokenizer
    chat = ChatFormat(tokenizer)
    chats = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    first, so = chat.first(UserTurn("Why?")), tokenizer("So.<|im_end|>")["input_ids"]
    assert first == rendered(chats[:1])
    assert first + so + chat.next(UserTurn("And?"), so[-1]) == rendered([*chats, {"role": "user", "content": "And?"}])
    opening = chat.first(UserTurn("Wh", goes_on=True))
    assert tokenizer.decode(opening).endswith("<|im_start|>user\nWh")
    assert tokenizer.decode([chat.end_of_user]) == "<|im_end|>"


def test_a_template_that_hides_the_user_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "always the same"
    with pytest.raises(ValueError, match="does not contain the turns"):
        ChatFormat(tokenizer)


def test_prompt_formats(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "one"}\n\n{"turns": ["two", "more"], "id": 3}\n{"prompt": "größe ✓"}', "utf-8")
    text = tmp_path / "b.txt"
    text.write_bytes(b"four\r\n \nfive, {not json}\n")
    assert read_prompts([rows, text]) == [("one",), ("two", "more"), ("größe ✓",), ("four",), ("five, {not json}",)]


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
