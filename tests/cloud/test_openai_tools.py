"""OpenAI's own client asks a real verifier for calls of functions, in chat completions and in responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from cloud.server.completion import _engine_error
from cloud.server.service import Verifier
from outrider_core.chat.api.constraints import constraint_of
from outrider_core.chat.api.tools import tool_use_of
from outrider_core.chat.tokenizer import chat_tokenizer_of
from outrider_core.chat.tool_grammar import MAX_TOOLS, TAG
from outrider_core.protocol.constraint import GRAMMAR_JSON_OBJECT, GRAMMAR_TOOLS, Constraint, Rules
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.wire import ERR_BOUNDS, Error
from tests.chat_api.test_tools import NATIVE
from tests.cloud.drive import make_verifier, serve
from tests.cloud.test_openai import assert_freed
from tests.cloud.test_structured import TOKENIZER, VOCAB
from tests.tiny import EOS, json_tokenizer, plain_decode, tiny_model
from tests.waiting import HANG

NAME = "org/tiny"
MODEL = tiny_model(seed=5, vocab=VOCAB, positions=2048)
MESSAGES: Any = [{"role": "user", "content": "weather?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
ADD = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
SCHEMAS = {"weather": WEATHER, "add": ADD}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
ADD_ONLY: Any = {"type": "function", "function": {"name": "add"}}
LONG = {"properties": {"a": {"enum": ["x" * 2000 + str(i) for i in range(17)]}}}
MOST = 400


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Verifier, OpenAI]]:
    verifier = make_verifier(MODEL, max_model_len=1600, kv_tokens=16_000)
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(TOKENIZER), NAME
    with serve(verifier) as address, OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0) as client:
        yield verifier, client
        assert_freed(verifier)


@pytest.fixture
def client(served: tuple[Verifier, OpenAI]) -> OpenAI:
    return served[1]


def assert_calls(calls: Any, most: int = 16) -> None:
    assert 1 <= len(calls) <= most and len({call.id for call in calls}) == len(calls)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", False), ("required", True), (ADD_ONLY, True)], ids=["one", "some", "named"]
)
def test_calls_that_must_be(client: OpenAI, choice: Any, parallel: bool, seed: int) -> None:
    """Whole and in pieces the same calls, each as its schema says."""
    asked: Any = {
        "model": NAME, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel,
        "seed": seed, "max_tokens": MOST, "logit_bias": {str(EOS): 8},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    calls = whole.message.tool_calls
    assert_calls(calls, 16 if parallel and choice == "required" else 1)
    assert choice == "required" or calls[0].function.name == "add"  # type: ignore[index, union-attr]
    pieces: list[list[str]] = []
    for chunk in client.chat.completions.create(stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id:
                assert delta.index == len(pieces)
                pieces.append([delta.function.name, ""])
            pieces[delta.index][1] += delta.function.arguments
    assert pieces == [[call.function.name, call.function.arguments] for call in calls]  # type: ignore[union-attr]
    assert chunk.choices[0].finish_reason == "tool_calls"


def test_the_answer_is_plain_constrained_decodings(served: tuple[Verifier, OpenAI]) -> None:
    """Text or calls, as the model likes: a bias towards the tag's first token has it begin to call at times."""
    verifier, client = served
    assert verifier.tokenizer is not None
    use = tool_use_of(TOOLS)
    assert use is not None
    ids = verifier.tokenizer.encode_chat(MESSAGES, use.prompt)
    head = TOKENIZER.encode("<")[0]
    called = said = 0
    for seed in range(12):
        fields = {"logit_bias": {str(head): 5.0, str(EOS): 3.0}}
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, tools=TOOLS, seed=seed, max_tokens=200, **fields
        ).choices[0]
        constraint = constraint_of(len(ids), VOCAB, tools=use.rules, logit_bias=fields["logit_bias"])
        assert constraint is not None and verifier.constraints._grammars is not None
        matcher = verifier.constraints._grammars.compile_tools(constraint.schema).matcher()
        tokens = plain_decode(MODEL, ids, Sampling(1.0, seed=seed), 200, rules=Rules(constraint, matcher))
        text = TOKENIZER.decode(tokens, skip_special_tokens=True)
        if TAG not in text:
            said += 1
            assert answer.message.content == text and not answer.message.tool_calls
            continue
        called += 1
        assert (answer.message.content or "") == text.partition(TAG)[0].rstrip()
        if answer.finish_reason == "tool_calls":
            assert_calls(answer.message.tool_calls)
    assert said


def test_history_none_and_what_is_refused(client: OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": true}'}}
    history: Any = [
        *MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3</tool_response>"},
    ]  # fmt: skip
    asked: Any = {"model": NAME, "max_tokens": 4, "seed": 1}
    answer = client.chat.completions.create(messages=history, tools=TOOLS, tool_choice="none", **asked)
    without = client.chat.completions.create(messages=history, **asked)
    assert answer.choices[0].message.content == without.choices[0].message.content
    assert client.chat.completions.create(messages=history, tools=TOOLS, **asked).usage.prompt_tokens > 300  # type: ignore[union-attr]
    strange: Any = [*TOOLS[:1], {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    harmless = client.chat.completions.create(messages=MESSAGES, tools=strange, **asked)
    assert harmless.choices[0].finish_reason == "length"
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": strange[1:], "tool_choice": "required"}, "tools", "cannot be obeyed"),
        ({"tools": TOOLS * (MAX_TOOLS // 2 + 1)}, "tools", "at most"),
        ({"tools": TOOLS * 2}, "tools[2].function.name", "two tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not among"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": LONG}}]}, "tools", "characters"),
    ]  # fmt: skip
    for more, param, text in cases:
        with pytest.raises(BadRequestError, match=text) as refused:
            client.chat.completions.create(messages=MESSAGES, **more, **asked)
        assert refused.value.param == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_responses_call(client: OpenAI, choice: Any) -> None:
    asked: Any = {
        "model": NAME, "input": "weather?", "tools": FLAT, "tool_choice": choice, "parallel_tool_calls": False,
        "max_output_tokens": MOST, "extra_body": {"seed": 5, "logit_bias": {str(EOS): 8}},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    [call] = whole.output
    assert call.type == "function_call" and whole.status == call.status == "completed"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        [same] = stream.get_final_response().output
    assert (same.name, same.arguments) == (call.name, call.arguments)  # type: ignore[union-attr]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    result: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}, call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]  # fmt: skip
    again = client.responses.create(
        model=NAME, input=result, instructions="Be brief.", max_output_tokens=4, tool_choice="none", tools=FLAT,
        extra_body={"logit_bias": {str(EOS): -100}},
    )  # fmt: skip
    assert again.status == "incomplete" and again.output[0].type == "message"


def test_the_clients_own_stream_reads_strict_calls(client: OpenAI) -> None:
    """It parses the arguments of a strict function after every chunk."""
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked: Any = {"tools": strict, "tool_choice": "required", "max_tokens": MOST, "logit_bias": {str(EOS): 8}}
    for seed in range(3):
        with client.chat.completions.stream(model=NAME, messages=MESSAGES, seed=seed, **asked) as stream:
            kinds = {event.type for event in stream}
            [choice] = stream.get_final_completion().choices
        assert choice.finish_reason == "tool_calls" and "tool_calls.function.arguments.done" in kinds
        assert_calls(choice.message.tool_calls)


def test_a_refusal_names_the_field_of_its_own_call(client: OpenAI) -> None:
    """Also where the model had to be asked: what fits, and which schema can be obeyed."""
    wrong: Any = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
    large: Any = {**wrong, "schema": {"description": "x" * 40_000}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("input", {"input": "x " * 5000}),
        ("text.format", {"text": {"format": wrong}}),
        ("text.format.schema", {"text": {"format": large}}),
        ("tools[0].name", {"tools": [{"type": "function", "name": "f f"}]}),
        ("top_logprobs", {"top_logprobs": 99}),
    ]
    for param, more in cases:
        with pytest.raises(BadRequestError) as refused:
            client.responses.create(**{"model": NAME, "input": "x", "max_output_tokens": 2, **more})
        assert refused.value.param == param
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="x " * 5000, max_tokens=2)
    assert refused.value.param == "prompt"


def deep(levels: int) -> str:
    return '{"a": ' * levels + "{}" + "}" * levels


@pytest.mark.parametrize("levels", [100, 470, 900, 4000])
def test_arguments_that_no_template_can_write_are_refused(levels: int) -> None:
    """A template that writes calls itself walks through them."""
    verifier = make_verifier(MODEL, max_model_len=1600, kv_tokens=4000)
    tokenizer = json_tokenizer()
    tokenizer.chat_template = NATIVE
    verifier.tokenizer, verifier.model_name = chat_tokenizer_of(tokenizer), NAME
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep(levels)}}
    body = {"model": NAME, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 2}
    with serve(verifier) as address:
        reply = httpx.post(f"http://{address}/v1/chat/completions", json=body, timeout=HANG)
    assert reply.status_code == (200 if levels == 100 else 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["param"].startswith("messages")


def test_what_the_engine_refuses_names_the_field_that_asked_for_it() -> None:
    class Stuck:
        """A grammar that nothing obeys."""

        error = "too large"

    error = Error(ERR_BOUNDS, "too large")
    for fields, param in (
        ({"grammar": GRAMMAR_TOOLS, "schema": "[]"}, "tools"),
        ({"grammar": GRAMMAR_JSON_OBJECT}, "response_format"),
    ):
        rules = Rules(Constraint(0, **fields), Stuck())  # type: ignore[arg-type]
        refused = _engine_error(error, rules)
        assert (refused.status, refused.param, refused.code) == (400, param, "invalid_schema")
    assert _engine_error(error, Rules(Constraint(0, 1.0))).param == "frequency_penalty"
    assert _engine_error(error, None).param is None
