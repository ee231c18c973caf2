"""Rules by which byte-level tokenizers split text before they merge bytes, with their names in GGUF files.

The names, and the rule of each, are llama.cpp's (src/llama-vocab.cpp). The rules are written as in the models'
own tokenizer.json files. A name whose rule is not a regular expression (kimi-k2, afmoe, ...) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(numbers: str, letters: str = r"\p{L}", marks: str = r"\r\n", english: str = f"{_ENGLISH}|") -> str:
    """Match words with one sign before them, numbers, and signs with a space before and some of `marks` after."""
    others = letters.strip("[]")
    return rf"{english}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}| ?[^\s{others}\p{{N}}]+[{marks}]*|{_SPACES}"


def _cased(numbers: str, english: str = "") -> str:
    """Match words that begin at a capital letter after small ones."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{english}|{before}{upper}+{lower}*{english}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """A splitting rule. patterns: each splits the pieces of the one before it into matches and the text between.

    whole_words: a piece that is a token becomes that token, whatever merges say. bos: begins a sequence unless the file
    otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the rule for `tokenizers`, with bytes written as characters."""
        known = self.patterns[-1] == _GPT2  # ByteLevel's own rule
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns[: -known or None]]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=known)
        return pre_tokenizers.Sequence([*splits, last]) if splits else last


def _all(names: str, rule: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), rule)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_all("llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0", PreTokenizer(_LLAMA3, whole_words=True, bos=True)),
    **_all("dbrx smaug-bpe chatglm-bpe", PreTokenizer(_LLAMA3)),
    **_all("glm4 glm5", PreTokenizer(_LLAMA3, whole_words=True)),
    **_all("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True)),
    **_all("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer(_QWEN2)),
    **_all("qwen35", PreTokenizer((_words(r"\p{N}", r"[\p{L}\p{M}]"),))),
    **_all("ufakzeka", PreTokenizer((_words(r"\p{N}", english=""),))),
    **_all("tekken", PreTokenizer((_cased(r"\p{N}"),), whole_words=True, bos=True)),
    **_all("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_cased(r"\p{N}{1,3}", f"{_ENGLISH}?"),))),
    **_all("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    **_all("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"))),
    **_all("bailingmoe bailingmoe2 llada-moe", PreTokenizer(_BAILING)),
    **_all(
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", PreTokenizer((_GPT2,))
    ),
    **_all("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer(_DIGITS)),
    **_all("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    **_all("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
}
