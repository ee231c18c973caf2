"""The parts of a target that a bundle needs: tokenizer, chat template, embedding and LM head. No torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from outrider_core.chat.tokenizer import ChatTokenizer
from outrider_core.drafting.bundle import BundleError
from outrider_core.targets.config import BrokenTarget, TargetConfig, UnsupportedTarget
from outrider_core.targets.gguf_tokenizer import gguf_chat, write_tokenizer
from outrider_core.targets.source import TargetError, TargetSource, chat_tokenizer_in
from outrider_core.targets.weights import Floats, GgufWeights, Weights, folder_weights

TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
#: files that some tokenizers have beside these two
_MORE_FILES = ("special_tokens_map.json",)


@dataclass(frozen=True)
class ExportTarget:
    """A target's files; nothing large is in memory."""

    source: TargetSource
    config: TargetConfig

    @classmethod
    def open(cls, source: TargetSource) -> ExportTarget:
        """Open a target. Raises TargetError with one clear line on anything missing, broken or unsupported."""
        if source.prepared:
            raise TargetError(f"{source.name} is a target bundle, which holds no embedding in float; give its model")
        try:
            return cls(source, source.shape())
        except UnsupportedTarget as error:
            raise TargetError(f"{source.name}: {error}") from None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def model_hash(self) -> str:
        return self.source.identity

    @cached_property
    def _weights(self) -> Weights:
        path = self.source.path
        try:
            return GgufWeights(path) if path.is_file() else folder_weights(path)[0]
        except BrokenTarget as error:
            raise TargetError(f"{self.name}: {error}") from None

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        if isinstance(self._weights, GgufWeights):
            return tuple(self._weights.eos_ids)
        return self.source.eos_ids

    @cached_property
    def chat(self) -> ChatTokenizer:
        """Return its chat template; for a GGUF file without tokens. Raises TargetError."""
        if isinstance(self._weights, GgufWeights):
            return gguf_chat(self._weights.fields)
        try:
            return chat_tokenizer_in(self.source.path)
        except BrokenTarget as error:
            raise TargetError(f"{self.name}: {error}") from None

    def tables(self) -> tuple[Floats, Floats]:
        """Return (token embedding, LM head), each float32 [vocab, hidden_size]; the same array if they are tied."""
        try:
            embedding = self._weights.read("embed_tokens")
            return embedding, embedding if self.config.tie_word_embeddings else self._weights.read("lm_head")
        except (BrokenTarget, UnsupportedTarget) as error:
            raise TargetError(f"{self.name}: {error}") from None

    def write_tokenizer(self, folder: Path) -> None:
        """Put tokenizer and chat template into `folder`. Raises BundleError if there is no fast tokenizer."""
        path = self.source.path
        if isinstance(self._weights, GgufWeights):
            write_tokenizer(self._weights.fields, folder)
        else:
            for name in (TOKENIZER, TOKENIZER_CONFIG, *_MORE_FILES):
                if (path / name).is_file():
                    shutil.copyfile(path / name, folder / name)
            if template := self.chat.template:
                (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        for name in (TOKENIZER, TOKENIZER_CONFIG):
            if not (folder / name).is_file():
                raise BundleError(f"{self.name}: there is no {name}; a fast tokenizer is needed")
