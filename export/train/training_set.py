"""A target and its answers, from which all drafters are trained, and the names of files in a work folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from export.train.answers import read_answers
from export.train.batches import draft_vocabulary
from export.train.corpus import CorpusError, is_corpus, unpack
from export.train.features import FeatureCache, OnlineFeatures, Sequence
from export.train.recipe import TrainSettings
from export.train.trainer import Student
from outrider_core.models.drafter_arrays import check_target
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.moa import MoA
from outrider_core.models.moa_config import DrafterError, MoAConfig
from outrider_core.models.target import Target


@dataclass(frozen=True)
class Kind:
    """A kind of drafter. name: its `type` in a drafter's config.json. make: builds one for shapes like MoA's.

    feature_loss: it also learns the target's last hidden states.
    """

    name: str
    make: Callable[[MoAConfig], Student]
    feature_loss: bool = True

    def taught(self, settings: TrainSettings) -> TrainSettings:
        """Return `settings` adapted to drafters of this kind."""
        return settings if self.feature_loss else replace(settings, feature_weight=0.0)


#: the drafter that devices run
MOA = Kind("moa", MoA)


@dataclass
class TrainingSet:
    """A target and its answers. layers, draft_vocab, max_context: see MoAConfig.for_target.

    start_from: folders of MoA drafters that students start from, of several from the mean of their weights; their
    shapes replace those. Raises ValueError if there is no answer, and DrafterError if one of the folders cannot be
    read, is another target's or differs in shape from the first.
    """

    target: Target
    sequences: Seq[Sequence]
    layers: int = 6
    draft_vocab: int = 12288
    max_context: int = 2048
    start_from: Seq[Path] = ()

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("there is no answer to learn from; raise --max-prompt-tokens if prompts are too long")
        vocab = self.target.config.vocab_size
        for number, sequence in enumerate(self.sequences):
            if not _fits(sequence, vocab):
                raise ValueError(
                    f"conversation {number} is not of {self.target.name}, whose vocabulary is {vocab} tokens"
                )
        self._start: dict[str, Tensor] = {}
        self.start_hash = ""
        if self.start_from:
            self.config, self._start, self.start_hash = self._mean_of(self.start_from)
            return
        self.config = MoAConfig.for_target(
            self.target.config,
            self.target.model_hash,
            layers=self.layers,
            draft_vocab=self.draft_vocab,
            max_context=self.max_context,
        )

    def _mean_of(self, folders: Seq[Path]) -> tuple[MoAConfig, dict[str, Tensor], str]:
        """Return shapes, mean weights and hashes of drafters. Raises DrafterError."""
        drafters = [load_drafter(folder) for folder in folders]
        first, its, _ = drafters[0]
        for folder, (config, tensors, _) in zip(folders, drafters, strict=True):
            check_target(config.target_hash, self.target.name, self.target.model_hash, folder)
            if not config.null_row:
                raise DrafterError(f"{folder} was imported and has no null row, so it cannot be trained further")
            alike = replace(config, confidence_temperature=first.confidence_temperature) == first
            if not alike or _shapes(tensors) != _shapes(its):
                raise DrafterError(f"{folder} has other shapes than {folders[0]}, so they cannot be averaged")
            if not torch.equal(tensors["draft_ids"], its["draft_ids"]):
                raise DrafterError(
                    f"{folder} has another draft vocabulary than {folders[0]}, so they cannot be averaged"
                )
        mean = {name: torch.stack([tensors[name].float() for _, tensors, _ in drafters]).mean(0) for name in its}
        return first, {**mean, "draft_ids": its["draft_ids"]}, "+".join(drafter_hash for *_, drafter_hash in drafters)

    @property
    def tokens(self) -> int:
        """Number of tokens of all conversations."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def answered(self) -> int:
        """Number of tokens of the target's answers."""
        return sum(sequence.answered for sequence in self.sequences)

    def student(self, kind: Kind = MOA, seed: int = 0) -> Student:
        """Return a drafter with the target's tables, on the target's device: new, or from `start_from`."""
        torch.manual_seed(seed)
        student = kind.make(self.config)
        if self._start:
            if not isinstance(student, MoA):
                raise ValueError("only a MoA drafter can start from an earlier one; leave out --start-from")
            student.adopt(self.target.model, self._start["draft_ids"])
            student.restore(self._start)
        else:
            size, vocab = self.config.draft_vocab_size, self.config.vocab_size
            student.adopt(self.target.model, draft_vocabulary(self.sequences, size, vocab, self.target.eos_ids))
        student.to(self.target.model.device)
        return student

    def features(self, where: str, work: Path) -> OnlineFeatures:
        """Return the target's features of the texts. where: "online", "cache" or "auto" (online on a GPU)."""
        if where == "online" or (where == "auto" and self.target.model.device.type == "cuda"):
            return OnlineFeatures(self.target, self.config, self.sequences)
        folder = f"features-{key_of(self.target.model_hash, self.config.target_layers, self.target.model.dtype)}"
        return FeatureCache(self.target, self.config, self.sequences, work / folder)

    def checkpoint(self, student: Student, settings: TrainSettings, work: Path) -> Path:
        """Return the file of a training run with these settings."""
        shapes = {k: v for k, v in asdict(student.config).items() if k != "confidence_temperature"}
        parts = [self._key(), type(student).__name__, shapes, asdict(settings)]
        parts += [self.start_hash] if self.start_hash else []
        return work / f"checkpoint-{key_of(*parts)}.safetensors"

    def _key(self) -> str:
        texts = hashlib.sha256(json.dumps([(s.ids, s.answers, s.alone) for s in self.sequences]).encode()).hexdigest()
        return key_of(self.target.model_hash, texts, self.config.target_layers)


def _fits(sequence: Sequence, vocab: int) -> bool:
    ids, size = sequence.ids, len(sequence.ids)
    return size > 0 and min(ids) >= 0 and max(ids) < vocab and all(1 <= b <= e <= size for b, e in sequence.answers)


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def key_of(*parts: object) -> str:
    """Return 12 hex digits that name a file of the work folder by what it was made from."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def read_sequences(path: Path) -> list[Sequence]:
    """Read the answered conversations of an answers file and of other ranks' files beside it, in their order.

    Or those of a corpus. Raises CorpusError.
    """
    if is_corpus(path):
        try:
            rows = {row["index"]: row for row in unpack(path.read_bytes())[1]}
        except CorpusError as error:
            raise CorpusError(f"{path}: {error}") from None
    else:
        rows = {row["index"]: row for part in answer_files(path) for row in read_answers(part)}
    sequences = (Sequence(rows[i]["ids"], tuple(map(tuple, rows[i]["answers"]))) for i in sorted(rows))
    return [sequence for sequence in sequences if sequence.answers]


def answer_files(path: Path) -> list[Path]:
    """Return the answers file of the first rank and those of other ranks beside it."""
    return [path, *sorted(path.parent.glob(f"{path.stem}.rank*.jsonl"))]
