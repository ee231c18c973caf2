"""A bundle knows which tokens end a sentence, at no cost when an answer begins."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outrider_core.drafting.bundle import SentenceEnds

ENDS = [".", "b!", "c? ", "\n", "e\n\n", "。"]
OTHERS = ["a", ".b", "?!c", " ", "1.5", "…"]


class Counting:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int]) -> Any:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


def test_a_token_is_decoded_when_it_is_asked_for() -> None:
    words = [*ENDS, *OTHERS]
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Counting(Tokenizer(WordLevel(vocabulary, unk_token="a")))
    ends = SentenceEnds(tokenizer)  # type: ignore[arg-type]
    assert tokenizer.decoded == 0
    for asked, (word, token) in enumerate(vocabulary.items()):
        assert (token in ends) == (word in ENDS), word
        assert tokenizer.decoded == asked + 1
    assert len(words) not in ends, "a padded vocabulary has ids without text"
