"""HTTP client of a vLLM or SGLang server: returns the likeliest tokens after each token of a text."""

from __future__ import annotations

import http.client
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from outrider_core.targets.source import TargetError

#: ids and log probabilities of a row's likeliest tokens
TopRow = dict[int, float]
#: likeliest tokens of a row to ask for: the most that the server allows. vLLM's own limit is 20.
TOPS = (64, 20, 1)
#: largest sum of a row's probabilities, as rounded; uninitialised memory exceeds it
MOST_MASS = 1.01
#: time limit for the server's answer, in seconds
TIMEOUT = 60.0
#: environment variable with the server's key
KEY_VARIABLE = "UPSTREAM_API_KEY"


class UpstreamError(RuntimeError):
    """The server does not answer, or refuses. status: HTTP's, 0 without an answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Scored(NamedTuple):
    """rows: after the wanted tokens of a text, then after each of `written` but the last. written: greedily."""

    rows: list[TopRow]
    written: list[int]


class Upstream(ABC):
    """A server at `url`. top: likeliest tokens that it returns per row. positions: tokens of its longest text.

    vocab_size: of the target that it should serve. release: its version.
    """

    name: str
    version_path: str
    release: str

    def __init__(self, url: str, positions: int, vocab_size: int) -> None:
        self.url, self.positions, self.vocab_size, self.top = url, positions, vocab_size, 1

    def score(self, text: Sequence[int], wanted: int, ahead: int) -> Scored:
        """Return rows after the last `wanted` tokens of `text`, and the server's continuation, at most `ahead` tokens.

        Raises UpstreamError, also if the reply has another shape: a missing row would shift the others.
        """
        try:
            scored = rows, written = self._score(text, wanted, ahead)
            last, least = max(max(row) for row in rows), min(map(len, rows))
            mass = max(sum(map(math.exp, row.values())) for row in rows)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UpstreamError(f"its reply is not understood: {error!r}") from error
        if least < min(self.top, self.vocab_size) or not 0 < len(written) <= ahead:
            raise UpstreamError(f"its reply is incomplete: {len(written)} tokens, and rows of {least}")
        if len(rows) != wanted + len(written) - 1:
            raise UpstreamError(f"its reply has {len(rows)} rows for {wanted} tokens and {len(written)} written ones")
        if last >= self.vocab_size:
            raise UpstreamError(f"it knows token {last}, the target has {self.vocab_size}: it serves another model")
        if mass > MOST_MASS:
            raise UpstreamError("what it returns are not log probabilities; vLLM needs --logprobs-mode raw_logprobs")
        return scored

    @abstractmethod
    def _score(self, text: Sequence[int], wanted: int, ahead: int) -> Scored:
        """Implement score. Raises UpstreamError, or any exception if the reply is not understood."""


class Vllm(Upstream):
    """`vllm serve MODEL --enable-scale-out --enable-prompt-tokens-details`."""

    name, version_path = "vllm", "/version"

    def _score(self, text: Sequence[int], wanted: int, ahead: int) -> Scored:
        """See Upstream.

        The server does not compute rows of tokens whose keys and values are in its prefix cache, and returns
        uninitialised memory for them, or status 400 if that holds no numbers. They are requested one by one.
        """
        sampling = {"max_tokens": ahead, "temperature": 0, "logprobs": self.top, "detokenize": False}
        if wanted > 1:
            sampling |= {"prompt_logprobs": self.top, "skip_reading_prefix_cache": False}
        try:
            said = call(self.url, "/inference/v1/generate", {"token_ids": text, "sampling_params": sampling})
        except UpstreamError as error:
            if error.status != 400 or wanted == 1:
                raise
            last = self.score(text, 1, ahead)
            return Scored([*self._one_by_one(text, wanted, wanted - 1), *last.rows], last.written)
        choice, details = said["choices"][0], said["usage"]["prompt_tokens_details"]
        if details is None:
            raise UpstreamError(
                "it does not report what its prefix cache held: --enable-prompt-tokens-details is missing"
            )
        begin = len(text) - wanted
        lacking = min(max(0, details["cached_tokens"] - begin), wanted - 1)
        rows = self._one_by_one(text, wanted, lacking)
        computed = (said["prompt_logprobs"] or [])[begin + 1 + lacking :] if wanted > 1 else []
        rows += [{int(token): each["logprob"] for token, each in row.items()} for row in computed]
        content = choice["logprobs"]["content"]
        rows += [{each["token_id"]: each["logprob"] for each in row["top_logprobs"]} for row in content]
        return Scored(rows, choice["token_ids"])

    def _one_by_one(self, text: Sequence[int], wanted: int, count: int) -> list[TopRow]:
        """Return the first `count` of the wanted rows."""
        begin = len(text) - wanted + 1
        return [self.score(text[:end], 1, 1).rows[0] for end in range(begin, begin + count)]


class Sglang(Upstream):
    """`python -m sglang.launch_server --model-path MODEL`."""

    name, version_path = "sglang", "/get_server_info"

    def _score(self, text: Sequence[int], wanted: int, ahead: int) -> Scored:
        """See Upstream. Its prefix cache is read up to `logprob_start_len`, so all rows after that are computed."""
        said = call(
            self.url,
            "/generate",
            {
                "input_ids": text,
                "sampling_params": {"max_new_tokens": ahead, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": len(text) - wanted,
                "top_logprobs_num": self.top,
            },
        )
        told = said["meta_info"]
        read = told["input_top_logprobs"][1 - wanted :] if wanted > 1 else []
        rows = [{token: logprob for logprob, token, *_ in row} for row in [*read, *told["output_top_logprobs"]]]
        return Scored(rows, said["output_ids"])


def connect(url: str, vocab_size: int) -> Upstream:
    """Identify the server at `url`, and test it. Raises TargetError with one line that says what to change."""
    try:
        (model, *_) = call(url, "/v1/models")["data"]
        kinds: dict[str, type[Upstream]] = {kind.name: kind for kind in (Vllm, Sglang)}
        if model["owned_by"] not in kinds:
            raise TargetError(f"--upstream {url}: {model['owned_by']!r} serves there; vLLM and SGLang are supported")
        server = kinds[model["owned_by"]](url, int(model["max_model_len"]), vocab_size)
        server.release = str(call(url, server.version_path)["version"])
        for server.top in TOPS:
            try:
                server.score([0, 0], 2, 1)
                return server
            except UpstreamError as error:
                if server.top == TOPS[-1] or error.status != 400:
                    raise
        raise AssertionError
    except UpstreamError as error:
        hint = {401: f"; its key is read from {KEY_VARIABLE}", 404: "; start vLLM with --enable-scale-out"}
        raise TargetError(f"--upstream {url}: {error}{hint.get(error.status, '')}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise TargetError(f"--upstream {url}: what answers there is neither vLLM nor SGLang ({error!r})") from None


_kept = threading.local()


def call(url: str, path: str, body: object = None) -> Any:
    """Return the JSON reply to a POST of `body`, or to a GET. Each thread keeps its connection.

    Raises UpstreamError, or ValueError if it is not JSON.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    parts, data = urlsplit(url), None if body is None else msgspec.json.encode(body)
    while True:
        kept: http.client.HTTPConnection | None = getattr(_kept, "connection", None)
        if fresh := kept is None or _kept.url != url:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            kept = kind(parts.hostname or "", parts.port, timeout=TIMEOUT)
        assert kept is not None
        try:
            kept.request("GET" if data is None else "POST", parts.path.rstrip("/") + path, data, headers)
            reply = kept.getresponse()
            said = reply.read()
        except (OSError, http.client.HTTPException) as error:
            kept.close()
            _kept.connection = None
            if not fresh and not isinstance(error, TimeoutError):
                continue  # the server has closed an idle connection
            raise UpstreamError(f"no answer: {str(error) or type(error).__name__}") from None
        _kept.connection, _kept.url = kept, url
        if reply.status != 200:
            text = " ".join(said.decode(errors="replace").split())[:200]
            raise UpstreamError(f"{path} is refused with {reply.status}: {text}", reply.status)
        return msgspec.json.decode(said)
