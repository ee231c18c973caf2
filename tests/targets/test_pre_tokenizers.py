"""Text is split as the families' own tokenizers split it, for every rule that a GGUF file may name."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer, pre_tokenizers

from outrider_core.targets.config import UnsupportedTarget
from outrider_core.targets.gguf_tokenizer import check_tokenizer, write_tokenizer
from outrider_core.targets.pre_tokenizers import PRE_TOKENIZERS
from tests.targets.gguf_files import tokenizer_fields

PIECES = (
    "I'M HERE", "it's", "don't", "'re", "'LL", "self.append(x)", "a = 12345", "x;\n\ny", "  12 3",
    "\n\n1. one", "\n", "\r\n", "\t", " ", "    ", "3.14", "20,000", "١٢٣", "Ⅷ", "½", "Grüße", "naïve", "ΑΒΓ",
    "здравствуй", "你好世界", "こんにちは", "한국어", "مرحبا", "हिन्दी", "e\u0301", "🚀🎉",
    "👩\u200d👩\u200d👧", "camelCase", "HTTPServer", "XMLHttp", "://", "/*", "*/", "->", "$x^2", "<tag>",
    "#!/bin/sh", "_", "\u00a0", "\u200b", "\u3000", ":\n\n1.", "…", "—", "a\n\n\nb", "if x:\n    y", "A", "b",
    "Ǆ", "ﬁ",
)  # fmt: skip


def characters() -> list[str]:
    """ASCII and as many others, of which every version of Unicode since 3.2 says the same."""
    old = unicodedata.ucd_3_2_0
    others = (chr(code) for code in range(0xA0, 0x3000))
    known = [each for each in others if old.category(each) == unicodedata.category(each) != "Cn"]
    ascii_ = [chr(code) for code in range(32, 127)]
    return known + ascii_ * (len(known) // len(ascii_))


@cache
def strings(count: int = 2000) -> list[str]:
    chance, known = random.Random(1), characters()
    return [
        *PIECES,
        *("".join(chance.choices(PIECES, k=chance.randint(2, 8))) for _ in range(count * 3 // 4)),
        *("".join(chance.choices(known, k=12)) for _ in range(count // 4)),
    ]


def isolated(pattern: str, pieces: Sequence[str]) -> Iterator[str]:
    """What matches, and what lies between."""
    for piece in pieces:
        at = 0
        for match in regex.finditer(pattern, piece):
            if match.end() == match.start():
                continue
            yield from filter(None, (piece[at : match.start()], match.group()))
            at = match.end()
        yield from filter(None, (piece[at:],))


def pieces_of(rule: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in rule.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted({rule.patterns: name for name, rule in PRE_TOKENIZERS.items()}.values()))
def test_a_rule_is_its_regular_expression(name: str) -> None:
    """By another engine of regular expressions than the tokenizer's own, one name for each rule."""
    rule = PRE_TOKENIZERS[name]
    built = rule.build()
    for text in strings():
        expected = [text]
        for pattern in rule.patterns:
            expected = list(isolated(pattern, expected))
        # a character of several bytes is cut by no rule
        assert pieces_of(built, text) == expected, text


def test_rules_are_those_that_transformers_knows() -> None:
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS

    shared = sorted(theirs.keys() & PRE_TOKENIZERS.keys())
    assert len(shared) >= 18
    assert {name: PRE_TOKENIZERS[name].patterns for name in shared} == {name: (theirs[name],) for name in shared}


def test_the_default_target_splits_as_its_own_tokenizer() -> None:
    """SmolLM2's published tokenizer.json writes its rule so."""
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built = PRE_TOKENIZERS["smollm"].build()
    assert [pieces_of(built, text) for text in strings()] == [pieces_of(published, text) for text in strings()]


#: as llama.cpp's own tests have them for these names
PROBES = {
    "llama-bpe": ("a = 12345", ["a", " =", " ", "123", "45"]),
    "qwen2": ("a = 123", ["a", " =", " ", "1", "2", "3"]),
    "tekken": ("HTTPServer/\n", ["HTTPServer", "/\n"]),
    "gpt-4o": ("camelCase I'M", ["camel", "Case", " I'M"]),
    "command-r": ("x12 3", ["x", "1", "2", " ", "3"]),
    "gpt-2": ("x12\n\ny", ["x", "12", "\n", "\n", "y"]),
    "falcon": ("a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    "deepseek-v3": ("1234 你好!x", ["123", "4", " ", "你好", "!x"]),
    "default": ("end. x", ["end", ".", " x"]),
}


@pytest.mark.parametrize("name", PROBES)
def test_known_texts_are_split_as_known(name: str) -> None:
    text, expected = PROBES[name]
    assert pieces_of(PRE_TOKENIZERS[name].build(), text) == expected


@pytest.mark.parametrize("name", ["kimi-k2", "afmoe", "deepseek-llm", "of tomorrow"])
def test_another_rule_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedTarget, match=f"split by the rule '{name}'"):
        check_tokenizer(tokenizer_fields(pre=name))


def written(folder: Path, **changes: object) -> Tokenizer:
    write_tokenizer(tokenizer_fields(**changes), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_lines_between_words_are_one_token_only_where_the_rule_says_so(tmp_path: Path) -> None:
    """`Ċ Ċ` is a merge of this vocabulary; the rule of GPT-2 cuts between the two."""
    tokens = {pre: written(tmp_path, pre=pre).encode("a\n\n1").tokens for pre in ("qwen2", "gpt-2")}
    assert tokens == {"qwen2": ["a", "ĊĊ", "1"], "gpt-2": ["a", "Ċ", "Ċ", "1"]}


def test_a_piece_that_is_a_token_is_that_token(tmp_path: Path) -> None:
    """Where the rule comes with that, whatever merges could make of it."""
    fields = tokenizer_fields(merges=["a b"])
    tokens = {
        pre: written(tmp_path, pre=pre, tokens=fields["tokenizer.ggml.tokens"], merges=["a b"]).encode("self").tokens
        for pre in ("llama-bpe", "qwen2")
    }
    assert tokens == {"llama-bpe": ["self"], "qwen2": ["s", "e", "l", "f"]}


def test_user_defined_tokens_are_one_token_and_stay_in_the_text(tmp_path: Path) -> None:
    tokenizer = written(tmp_path)
    encoding = tokenizer.encode("a<tool_call>b<|im_end|>")
    assert encoding.tokens == ["a", "<tool_call>", "b", "<|im_end|>"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "a<tool_call>b"


@pytest.mark.parametrize(
    ("pre", "add", "begins"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_begins_a_prompt_as_the_file_says(tmp_path: Path, pre: str, add: bool | None, begins: bool) -> None:
    tokenizer = written(tmp_path, pre=pre, bos_token_id=266, add_bos_token=add)
    assert tokenizer.encode("ab").tokens == (["<|endoftext|>"] if begins else []) + ["ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_sentence_pieces_merge_by_score(tmp_path: Path) -> None:
    """A byte for what is no piece, and a space before the first word if the file says so."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc"]
    scores = [0.0] * len(pieces) + [-9, -8, -7, -6, -2, -1, -3, -4, -5]
    fields = {
        "model": "llama",
        "tokens": [*pieces, *words],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "scores": scores,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    write_tokenizer(fields, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("abc ab é").tokens == [
        "<s>", "▁a", "bc", "▁ab", "▁", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("abc ab é").ids) == "abc ab é"
    write_tokenizer({**fields, "tokenizer.ggml.add_space_prefix": False}, tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("ab").tokens == ["<s>", "ab"]
