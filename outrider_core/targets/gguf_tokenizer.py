"""Write the tokenizer and chat template inside a GGUF file as the files of a model folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.targets.config import BrokenTarget, UnsupportedTarget
from outrider_core.targets.pre_tokenizers import PRE_TOKENIZERS

#: metadata of a GGUF file by name
Fields = Mapping[str, Any]

#: token types of GGUF (llama.cpp, `llama_token_type`)
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
#: a space, as SentencePiece writes it
_SPACE = "\u2581"
#: tokens that end a turn if the chat template writes them, beside those that the file names (as in llama.cpp)
_TURN_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<｜end▁of▁sentence｜>", "</s>",
)  # fmt: skip


def turn_ends(template: str, tokens: Mapping[str, int]) -> set[int]:
    """Return the ids of the tokens that end turns in a chat template. tokens: ids of special tokens by their text."""
    return {tokens[text] for text in _TURN_ENDS if text in template and text in tokens}


def gguf_ends(fields: Fields) -> list[int]:
    """Return the ids that end an answer: end of sequence, of turn and of message, and those in the chat template."""
    tokens = _tokens(fields)
    named = {_token_id(fields, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    kinds = zip(tokens, _types(fields), strict=False)
    special = {token: index for index, (token, kind) in enumerate(kinds) if kind == _CONTROL}
    return sorted({each for each in named if each is not None} | turn_ends(gguf_template(fields), special))


def check_tokenizer(fields: Fields) -> None:
    """Raise UnsupportedTarget for a kind of tokenizer not handled here, BrokenTarget for one that makes no sense."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedTarget(f"a GGUF file with a tokenizer of kind {kind!r} is not supported; use the model folder")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        raise UnsupportedTarget(
            f"a GGUF file whose text is split by the rule {pre!r} is not supported; use the model folder"
        )
    tokens = _tokens(fields)
    if len(_types(fields)) != len(tokens):
        raise BrokenTarget("its metadata does not give every token a type in tokenizer.ggml.token_type")
    if len(places := dict(zip(tokens, range(len(tokens)), strict=True))) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if places[token] != index)
        raise BrokenTarget(f"token {twice!r} occurs twice in its tokenizer.ggml.tokens")
    for left, right in _merges(fields) if kind == "gpt2" else ():
        for part in (left, right, left + right):
            if part not in places:
                raise BrokenTarget(f"its merges do not match its tokens: {part!r} is not one of them")
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        _token_id(fields, f"tokenizer.ggml.{name}_token_id")


def write_tokenizer(fields: Fields, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises as `check_tokenizer` does."""
    check_tokenizer(fields)
    tokens, types = _tokens(fields), _types(fields)
    byte_level = fields["tokenizer.ggml.model"] == "gpt2"
    tokenizer, begins = _byte_level(fields, tokens) if byte_level else _sentence_pieces(fields, tokens)
    bos = _token_id(fields, "tokenizer.ggml.bos_token_id")
    begins = bool(fields.get("tokenizer.ggml.add_bos_token", begins)) and bos is not None
    first = [(tokens[bos], bos)] if begins and bos is not None else []
    before = "".join(f"{token} " for token, _ in first)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{before}$A", pair=f"{before}$A $B:1", special_tokens=first
    )
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, each in zip(tokens, types, strict=True)
            if each == kind and token
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # `save` raises no OSError
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named_tokens(fields)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if template := gguf_template(fields):
        (folder / "chat_template.jinja").write_text(template)


def _byte_level(fields: Fields, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Return (the tokenizer, whether a sequence begins with BOS unless the file says otherwise)."""
    rule = PRE_TOKENIZERS[fields.get("tokenizer.ggml.pre", "default")]
    model = _bpe(
        tokens, _merges(fields), continuing_subword_prefix="", end_of_word_suffix="", ignore_merges=rule.whole_words
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = rule.build()  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer, rule.bos


def _sentence_pieces(fields: Fields, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Return the same for a SentencePiece tokenizer, which merges pieces in the order of their scores."""
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise BrokenTarget("its metadata does not give every token a score in tokenizer.ggml.scores")
    known, ranked = {token: index for index, token in enumerate(tokens)}, list[tuple[float, int, int, str, str]]()
    for index, token in enumerate(tokens):
        if _types(fields)[index] in (_CONTROL, _BYTE):
            continue
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in known and right in known:
                ranked.append((-scores[index], known[left], known[right], left, right))
    ranked.sort()
    unknown = _token_id(fields, "tokenizer.ggml.unknown_token_id")
    model = _bpe(
        tokens,
        [(left, right) for *_, left, right in ranked],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces, cut = [normalizers.Replace(" ", _SPACE)], list[Any]()
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))  # type: ignore[arg-type]
        cut = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)  # type: ignore[assignment, arg-type]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *cut]
    )
    return tokenizer, True


def _bpe(tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges), **options)
    except Exception as error:  # tokenizers raises bare Exception
        raise BrokenTarget(f"its merges do not match its tokens: {error}") from None


def _merges(fields: Fields) -> list[tuple[str, str]]:
    """Return the pairs; the file has a space between the two."""
    merges = fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) and " " in merge[1:] for merge in merges):
        raise BrokenTarget("its metadata lacks tokenizer.ggml.merges, or has entries there that are not pairs")
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _tokens(fields: Fields) -> list[str]:
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise BrokenTarget("its metadata lacks tokenizer.ggml.tokens")
    return tokens


def _types(fields: Fields) -> list[int]:
    types = fields.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or not all(isinstance(each, int) for each in types[:1]):
        raise BrokenTarget("its metadata lacks tokenizer.ggml.token_type")
    return types


def named_tokens(fields: Fields) -> dict[str, str]:
    """Return the tokens that chat templates know by name."""
    return {
        f"{name}_token": _tokens(fields)[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := _token_id(fields, f"tokenizer.ggml.{key}_token_id")) is not None
    }


def gguf_chat(fields: Fields) -> ChatTokenizer:
    """Return the chat template on an empty tokenizer, which is made at once: enough to test the template."""
    return ChatTokenizer(Tokenizer(BPE()), gguf_template(fields), named_tokens(fields))


def gguf_template(fields: Fields) -> str:
    """Return the chat template; "" if there is none."""
    template = fields.get("tokenizer.chat_template", "")
    return template if isinstance(template, str) else ""


def _token_id(fields: Fields, name: str) -> int | None:
    """Return a token's id; None if there is none, which some files write as the largest number."""
    value = fields.get(name)
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if not isinstance(value, int) or not 0 <= value < len(_tokens(fields)):
        raise BrokenTarget(f"its metadata has {value!r} for {name}, which is not one of its tokens")
    return value
