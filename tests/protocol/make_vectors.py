"""Write outrider_core/protocol/vectors/: `python -m tests.protocol.make_vectors`. For ports to other languages, and the
tests.

The noise here is written from the specification in outrider_core/protocol/noise.py with plain Python ints and never
calls that module, so that the two check each other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import outrider_core.protocol
from outrider_core.chat.tool_grammar import ToolFunction, ToolRules, call_text, ends_with_call
from outrider_core.protocol import wire
from outrider_core.protocol.constraint import (
    GRAMMAR_JSON_OBJECT,
    GRAMMAR_JSON_SCHEMA,
    GRAMMAR_TOOLS,
    OBEYS_BIAS,
    OBEYS_JSON,
    Constraint,
    pack_bias,
)
from outrider_core.protocol.costs import CostCurve
from outrider_core.protocol.ending import COMPLETE, FinishReason
from outrider_core.protocol.sampling import Sampling
from outrider_core.protocol.tree import TokenTree
from outrider_core.protocol.wire import ClientMessage, ServerMessage, pack_ids, pack_tree

FOLDER = Path(outrider_core.protocol.__file__).parent / "vectors"
NOISE_FILE, FRAMES_FILE, ENDINGS_FILE = FOLDER / "noise.json", FOLDER / "frames.json", FOLDER / "endings.json"

SEEDS = (0, 1, 7, 2**31, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**63 - 1)
POSITIONS = (0, 1, 17, 2047, 131071, 2**31 - 1)
TOKENS = (0, 1, 2, 255, 49151, 151935)
TOOLS = ToolRules((ToolFunction("add", {"type": "object", "properties": {}}),), required=True)
#: fields that were appended to messages, and that vectors leave out where they say nothing
LATER = {
    "Hello": {"arithmetic"},
    "Welcome": {"constraints", "arithmetic", "stream_tokens", "queue_us"},
    "Open": {"constraint"},
}
STRUCTS: dict[str, type[Any]] = {"sampling": Sampling, "constraint": Constraint}


def fmix32(h: int) -> int:
    """MurmurHash3's finaliser."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def noise_hash(seed: int, position: int, token: int) -> int:
    """`h` of the specification."""
    seed_high, seed_low = divmod(seed, 2**32)
    k = fmix32((seed_low + 0x9E3779B9) % 2**32)
    k = fmix32(k ^ seed_high)
    k = fmix32(k ^ fmix32((position + 0x7F4A7C15) % 2**32))
    return fmix32(k ^ fmix32((token + 0x9E3779B9) % 2**32))


def noise(seed: int, position: int, token: int) -> float:
    """`g` of the specification."""
    u = (noise_hash(seed, position, token) + 0.5) / 2**32
    return -math.log(-math.log(u))


def noise_vectors() -> list[dict[str, Any]]:
    return [
        {"seed": s, "position": p, "token": t, "h": noise_hash(s, p, t), "g": noise(s, p, t)}
        for s in SEEDS
        for p in POSITIONS
        for t in TOKENS
    ]


def golden_messages() -> dict[str, ClientMessage | ServerMessage]:
    """One message or more of every type, with values at the edges of the encoding."""
    session = bytes(range(16))
    tree = TokenTree((11, 12, 300, 11, 49151), (-1, -1, 0, 1, 3))
    tokens, parents = pack_tree(tree)
    large = pack_tree(TokenTree((65535, 65536, 151_935, 262_143), (-1, 0, 0, 2)))
    curve = CostCurve((1, 32, 128), (0.011, 0.0205, 0.07))
    schema = {"type": "object", "properties": {"größe": {"enum": ["✓", None, 1.5]}}, "required": ["größe"]}
    return {
        "hello": wire.Hello(1, "0123456789abcdef", "fedcba9876543210", "outrider 0.1.0"),
        "hello_defaults": wire.Hello(1, "0123456789abcdef", "fedcba9876543210"),
        "welcome": wire.Welcome(1, "0123456789abcdef", "fedcba9876543210", 49152, 2048, 64, 32, "verifier"),
        "welcome_costs": wire.Welcome(1, "a" * 16, "b" * 16, 49152, 2048, 64, 32, "verifier", curve.pack()),
        "open_greedy": wire.Open(0, session, 0, pack_ids([1, 4093, 198, 49151]), 0, Sampling()),
        "open_sampling": wire.Open(
            65535, session, 2**32 - 1, pack_ids(range(100)), 99, Sampling(0.7, 40, 0.95, 0.05, 2**63 - 1)
        ),
        "welcome_constraints": wire.Welcome(
            1, "a" * 16, "b" * 16, 49152, 2048, 64, 32, "verifier", b"", OBEYS_BIAS | OBEYS_JSON
        ),
        "hello_arithmetic": wire.Hello(1, "a" * 16, "b" * 16, "outrider", "onnx-8-v6"),
        "welcome_arithmetic": wire.Welcome(
            1, "a" * 16, "b" * 16, 49152, 2048, 64, 32, "verifier", b"", OBEYS_BIAS, "torch-bfloat16"
        ),
        "welcome_told": wire.Welcome(
            1, "a" * 16, "b" * 16, 49152, 2048, 64, 32, "verifier", curve.pack(), 0, "", 9_999, 2**31 - 1
        ),
        "open_bias": wire.Open(
            3,
            session,
            7,
            pack_ids([1, 2, 3]),
            2,
            Sampling(),
            Constraint(2, 0.5, -2.0, *pack_bias({49151: -100.0, 0: 0.1, 300: 2.5})),
        ),
        "open_json_object": wire.Open(
            3, session, 0, pack_ids([1, 2]), 0, Sampling(), Constraint(2, grammar=GRAMMAR_JSON_OBJECT)
        ),
        "open_json_schema": wire.Open(
            3,
            session,
            0,
            pack_ids([1, 2]),
            0,
            Sampling(1.0, seed=2**40),
            Constraint(131_071, 1.0, grammar=GRAMMAR_JSON_SCHEMA, schema=json.dumps(schema, ensure_ascii=False)),
        ),
        "open_tools": wire.Open(
            3, session, 0, pack_ids([1, 2]), 0, Sampling(), Constraint(2, grammar=GRAMMAR_TOOLS, schema=TOOLS.as_text())
        ),
        "opened": wire.Opened(3, 4, 0),
        "features": wire.Features(3, 2, bytes(range(40))),
        "verify": wire.Verify(3, 1, 4, tokens, parents),
        "verify_empty": wire.Verify(3, 2, 2**31 - 1, b"", b""),
        "verdict": wire.Verdict(3, 1, 4, bytes([1, 3, 4]), 17, wire.FINISH_NONE, bytes(range(64)), 32, 1500, 20000),
        "verdict_eos": wire.Verdict(3, 2, 8, b"", 2, wire.FINISH_EOS, b""),
        "resync": wire.Resync(3, 70000),
        "generate": wire.Generate(3, 3, 8, 256),
        "generate_rows": wire.Generate(3, 3, 8, 256, True),
        "cancel": wire.Cancel(3),
        "close": wire.Close(3),
        "welcome_large_vocabulary": wire.Welcome(1, "a" * 16, "b" * 16, 262_144, 2048, 64, 32, "verifier"),
        "open_large_vocabulary": wire.Open(
            3,
            session,
            0,
            pack_ids([2, 65535, 65536, 151_935, 262_143]),
            0,
            Sampling(1.0, seed=5),
            Constraint(5, 0.0, 0.0, *pack_bias({65536: 1.5, 262_143: -100.0})),
        ),
        "verify_large_vocabulary": wire.Verify(3, 1, 5, *large),
        "verdict_large_vocabulary": wire.Verdict(3, 1, 5, bytes([0, 2, 3]), 262_143, 0, bytes(8), 1, 9, 9),
        "error": wire.Error(wire.ERR_BUSY, "no room; größe ✓", 3, 250),
        "error_connection": wire.Error(wire.ERR_MALFORMED, "not a client message"),
    }


def plain(value: Any) -> Any:
    """JSON form of a field: bytes as {"hex": ...}, sampling and constraint as objects."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, Sampling | Constraint):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


def fields_of(message: ClientMessage | ServerMessage) -> dict[str, Any]:
    """Its fields by name; those of LATER only where they say something."""
    fields = {name: plain(getattr(message, name)) for name in message.__struct_fields__}
    name = type(message).__name__
    return {"type": name, **{n: v for n, v in fields.items() if v or n not in LATER.get(name, ())}}


def decoded(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a struct within a message."""
    return {name: bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for name, v in fields.items()}


def message_of(fields: dict[str, Any]) -> ClientMessage | ServerMessage:
    """The inverse of `fields_of`."""
    values = {name: value for name, value in fields.items() if name != "type"}
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = bytes.fromhex(value["hex"]) if "hex" in value else STRUCTS[name](**decoded(value))
    message: ClientMessage | ServerMessage = getattr(wire, fields["type"])(**values)
    return message


def frame_vectors() -> list[dict[str, Any]]:
    return [
        {"name": name, "hex": wire.encode(message).hex(), "fields": fields_of(message)}
        for name, message in golden_messages().items()
    ]


def ending_vectors() -> list[dict[str, Any]]:
    """Every reason for the end of an answer; then texts that may call functions, and whether they end with a call."""
    call = call_text("add", {"terms": [1, "\n}"]})
    texts = ["", "Hello.", call, f"One moment.\n{call}", f"{call}\n{call}"]
    texts += [call[:-1], call + "\n", call + " Done.", call.replace("\n</", "</"), "}\n</tool_call>", "]\n</tool_call>"]
    reasons = [{"reason": each.value, "complete": each in COMPLETE} for each in FinishReason]
    return [*reasons, *({"text": each, "calls": ends_with_call(each)} for each in texts)]


def text(rows: list[dict[str, Any]]) -> str:
    """A JSON array with one vector a line."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    NOISE_FILE.write_text(text(noise_vectors()), encoding="utf-8")
    FRAMES_FILE.write_text(text(frame_vectors()), encoding="utf-8")
    ENDINGS_FILE.write_text(text(ending_vectors()), encoding="utf-8")


if __name__ == "__main__":
    main()
