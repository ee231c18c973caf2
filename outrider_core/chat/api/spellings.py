"""Other servers' names of fields (vLLM, SGLang, llama.cpp, Ollama): known ones are translated, others refused by name,
and unknown ones reported to the client.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

from outrider_core.chat.api.errors import ApiError

#: names of a schema's field, as an object or as text
SCHEMAS = ("guided_json", "json_schema", "format")
#: members of `response_format` that are read
FORM = ("type", "json_schema", "schema")
#: unsupported fields that would change the answer -> the values with which they have no effect
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "grammar": ("",),
    "structural_tag": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "repetition_penalty": (1, 1.0),
    "repeat_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "n_probs": (0,),
    "lora": ([],),
    "options": ({},),
    "images": ([],),
    "web_search_options": ({},),
}
#: how to ask for it here
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("guided_regex", "regex"), "response_format with a pattern in a JSON schema"),
    "guided_choice": "response_format with an enum in a JSON schema",
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf", "structural_tag"), "response_format with a JSON schema"),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), "frequency_penalty"),
    "n_probs": "logprobs",
    "bad_words": "logit_bias",
    "allowed_token_ids": "logit_bias",
    "stop_token_ids": "stop",
}
#: fields that change no text, and members of messages and items that mean nothing to the target
HARMLESS = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prediction"),
        *("prompt_cache_retention", "cache_prompt", "cache_salt", "id_slot", "request_id", "priority", "keep_alive"),
    )
)
HARMLESS_INSIDE = frozenset(("id", "status", "annotations", "logprobs", "refusal", "index", "include_obfuscation"))
#: most names that a reply lists, and the form of such a name
MOST_NAMES, NAME = 20, re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)
#: most values searched for ignored names or found to be empty; the rest is not looked at
MOST_VALUES = 10_000


def is_empty(value: Any) -> bool:
    """Return whether a value is empty: null, or an object whose values are all empty."""
    left, seen = [value], 0
    while left:
        one = left.pop()
        seen += 1
        if seen > MOST_VALUES or not (one is None or isinstance(one, dict)):
            return False
        left += (one or {}).values()
    return True


def take_spellings(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Translate names in `fields`, and return the `response_format` that other names ask for, or None.

    Raises ApiError if several ask for one, or one is unreadable.
    """
    if fields.get("max_tokens") is None and fields.get("n_predict") is not None:
        fields["max_tokens"] = fields["n_predict"]
    fields.pop("n_predict", None)
    found = dict[str, Any]()
    for name in SCHEMAS:
        if not is_empty(value := fields.pop(name, None)) and value != "":
            found[name] = _any_object() if name == "format" and value == "json" else _form(value, name)
    outputs = fields.pop("structured_outputs", None)
    if not is_empty(outputs):
        found["structured_outputs"] = _structured(outputs)
    form = fields.get("response_format")
    if isinstance(form, dict):
        if (
            form.get("schema") is not None
            and form.get("type") in ("json_object", "json_schema")
            and not form.get("json_schema")
        ):
            form = fields["response_format"] = _form(form["schema"], "response_format.schema")
        if form.get("type") != "text":
            found["response_format"] = form
    if len(found) > 1:
        raise ApiError(
            400, f"{' and '.join(found)} ask for different things: send one", next(iter(found)), "invalid_value"
        )
    return None if "response_format" in found else next(iter(found.values()), None)


def _any_object() -> dict[str, Any]:
    return {"type": "json_object"}


def _form(schema: Any, name: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"{name} is not JSON: {error}", name, "invalid_value") from None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{name} takes a JSON schema, which is an object", name, "invalid_value")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _structured(outputs: Any) -> dict[str, Any]:
    """Read vLLM's object of several kinds of output, of which only JSON is supported."""
    asked = {} if not isinstance(outputs, dict) else {name: value for name, value in outputs.items() if value}
    if list(asked) == ["json"]:
        return _form(asked["json"], "structured_outputs.json")
    if asked == {"json_object": True}:
        return _any_object()
    text = "structured_outputs takes json (a schema) or json_object: true here"
    raise ApiError(400, text, "structured_outputs", "unsupported_parameter")


def check_supported(fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError on an unsupported field.

    neutral: unsupported fields of one call, beside REFUSED -> the values with which they have no effect; null always
    has none.
    """
    for name, harmless in {**REFUSED, **neutral}.items():
        value = fields.get(name)
        if not is_empty(value) and not any(type(value) is type(each) and value == each for each in harmless):
            way = " or ".join(["leave it out", *(f"send {msgspec.json.encode(v).decode()}" for v in harmless)])
            instead = f"; {INSTEAD[name]} does something like it" if name in INSTEAD else ""
            raise ApiError(400, f"{name} is not supported: {way}{instead}", name, "unsupported_parameter")


def ignored_names(fields: dict[str, Any], kind: type[msgspec.Struct], known: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of ignored fields, for a header. known: further fields that are read."""
    names = list[str]()
    form = fields.get("response_format")
    inside = [f"response_format.{name}" for name in form if name not in FORM] if isinstance(form, dict) else []
    read = islice(_values(fields, inspect.type_info(kind), ""), MOST_VALUES)
    for name in (*(name for name in read if name), *inside):
        if name not in known and name not in REFUSED:
            names.append(name if NAME.fullmatch(name) else "?")
        if len(names) == MOST_NAMES:
            break
    return tuple(dict.fromkeys(names))


def _values(value: Any, type_: inspect.Type, path: str) -> Iterator[str]:
    """Yield the path of each value if it is ignored, else ""."""
    match type_:
        case inspect.UnionType(types=types):
            for each in types:
                yield from _values(value, each, path)
        case inspect.ListType(item_type=item) if isinstance(value, list) and _holds_fields(item):
            for index, one in enumerate(value):
                yield ""
                yield from _values(one, item, f"{path}[{index}]")
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            known = {each.encode_name: each.type for each in fields}
            for name, one in value.items():
                where = f"{path}.{name}" if path else name
                if name in known:
                    yield ""
                    yield from _values(one, known[name], where)
                elif not is_empty(one) and one != [] and name not in (HARMLESS_INSIDE if path else HARMLESS):
                    yield where
                else:
                    yield ""


def _holds_fields(type_: inspect.Type) -> bool:
    """Return whether a value of this type may have fields that are read."""
    match type_:
        case inspect.UnionType(types=types):
            return any(map(_holds_fields, types))
        case inspect.ListType(item_type=item):
            return _holds_fields(item)
    return isinstance(type_, inspect.StructType)
