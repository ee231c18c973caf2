"""A conversation that is too long loses its oldest turns, never its instructions or its last turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.context import ConversationTooLong, Message, fit_messages


def encode(messages: list[Message]) -> list[int]:
    """A token for each word, one before each message and one for the answer's beginning."""
    return [0] * (1 + sum(1 + len(message["content"].split()) for message in messages))


def conversation(*contents: str, system: str = "") -> list[Message]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def test_what_fits_is_left_alone() -> None:
    messages = conversation("a b", "c", "d", system="s")
    fitted = fit_messages(messages, encode, max_context=100, reserve=20)
    assert fitted.messages == messages and fitted.dropped == [] and fitted.ids == encode(messages)


def test_the_oldest_turns_go_and_the_instructions_stay() -> None:
    messages = conversation("a " * 10, "b " * 10, "c " * 10, "d " * 10, "e", system="be brief")
    fitted = fit_messages(messages, encode, max_context=40, reserve=10)
    assert fitted.messages == [messages[0], *messages[3:]] and fitted.dropped == messages[1:3]
    fitted = fit_messages(messages, encode, max_context=30, reserve=10)
    assert fitted.messages == [messages[0], messages[5]] and fitted.dropped == messages[1:5]


def test_room_for_the_answer_is_given_up_before_the_last_turn() -> None:
    messages = conversation("a", "b", "c " * 30)
    fitted = fit_messages(messages, encode, max_context=40, reserve=20)
    assert fitted.messages == messages[2:] and len(fitted.ids) == 32


def test_a_last_turn_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConversationTooLong, match="the last message has 42 tokens with its instructions; 39 fit"):
        fit_messages(conversation("c " * 40), encode, max_context=40, reserve=1)
    with pytest.raises(ValueError, match="no message"):
        fit_messages([], encode, 40, 1)


def long_conversation(tokens: int) -> list[Message]:
    """61 short messages, with a last one that makes it so long."""
    messages = conversation(*(["w " * 30] * 60), "w")
    messages[-1]["content"] = "w " * (1 + tokens - len(encode(messages)))
    assert len(encode(messages)) == tokens
    return messages


@pytest.mark.parametrize("tokens", [1900, 1948, 1984])
@pytest.mark.parametrize(
    ("reserve", "least"), [(4096, None), (2048, None), (100, 64), (1024, 64), (1025, 64), (4096, 64)]
)
def test_room_that_the_context_cannot_hold_costs_no_turn(tokens: int, reserve: int, least: int | None) -> None:
    messages = long_conversation(tokens)
    fitted = fit_messages(messages, encode, 2048, reserve, least)
    assert fitted.messages == messages and fitted.dropped == [] and fitted.ids == encode(messages)


@pytest.mark.parametrize(
    ("reserve", "least", "left"), [(4096, None, 256), (4096, 64, 256), (100, 64, 100), (100, None, 100)]
)
def test_what_must_go_goes_and_no_more(reserve: int, least: int | None, left: int) -> None:
    messages = long_conversation(2040)
    fitted = fit_messages(messages, encode, 2048, reserve, least)
    assert fitted.dropped == messages[: len(fitted.dropped)] != []
    assert 2048 - left - 62 < len(fitted.ids) <= 2048 - left


@pytest.mark.parametrize("reserve", [1024, 1025, 1500, 2047])
def test_more_than_half_of_the_context_gives_half_of_it(reserve: int) -> None:
    fitted = fit_messages(long_conversation(1900), encode, 2048, reserve)
    assert 1024 - 62 < len(fitted.ids) <= 1024


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.integers(8, 120),
    st.integers(1, 119),
    st.integers(1, 119),
    st.none() | st.integers(1, 119),
)
def test_asking_for_more_room_never_gives_less(
    lengths: list[int], context: int, one: int, other: int, least: int | None
) -> None:
    less, more = sorted(min(reserve, context - 1) for reserve in (one, other))
    messages = conversation(*("w " * length for length in lengths))
    try:
        fitted = fit_messages(messages, encode, context, less, least)
    except ConversationTooLong:
        with pytest.raises(ConversationTooLong):
            fit_messages(messages, encode, context, more, least)
        return
    assert len(fit_messages(messages, encode, context, more, least).ids) <= len(fitted.ids)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(8, 120), st.integers(1, 200), st.booleans())
def test_nothing_is_lost_and_no_turn_is_dropped_in_vain(
    lengths: list[int], context: int, reserve: int, system: bool
) -> None:
    messages = conversation(*("w " * length for length in lengths), system="s" if system else "")
    try:
        fitted = fit_messages(messages, encode, context, reserve)
    except ConversationTooLong:
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        assert len(encode([*messages[: int(system)], *messages[last:]])) >= context
        return
    assert fitted.messages == [*messages[: int(system)], *messages[int(system) + len(fitted.dropped) :]]
    assert len(fitted.ids) < context and fitted.messages[int(system)]["role"] == "user"
    if fitted.dropped:  # one turn more would not have left room for the answer
        again = [*messages[: int(system)], *messages[int(system) + len(fitted.dropped) - 2 :]]
        assert len(encode(again)) > context - min(reserve, context // 2)
