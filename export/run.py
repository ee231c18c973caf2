"""`python -m export train`: the three stages in order, with progress and resumable state in the work folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from export.answers import Limits, generate_answers, read_answers
from export.batches import draft_vocabulary
from export.features import FeatureCache, OnlineFeatures, Sequence
from export.own_text import write_alone
from export.progress import Meter
from export.prompts import OPENINGS, Conversation, plan, read_prompts
from export.recipe import TrainSettings
from export.share import Share
from export.train import Student, Trainer
from lab.baselines.networks import Baseline, BaselineConfig, save_baseline
from lab.baselines.reused import ReusedLayerMoA
from outrider_core.machine import describe_machine
from outrider_core.models.drafter_files import save_drafter
from outrider_core.models.moa import MoA, MoAConfig
from outrider_core.models.packing import pack_linears
from outrider_core.models.target import Target, load_target

#: decoder layers of the baselines
LAYERS = {"eagle2": 1, "lm": 2}
#: tokens written alone behind every cut, and the learning rate of that stage over the main one's
OWN_TOKENS, OWN_RATE = 32, 0.2


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def train(arguments: argparse.Namespace) -> None:
    """Answer the prompts, train, write the drafter folder. Every stage resumes where it stopped."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    share, device = Share.join(device)
    say: Callable[[str], None] = print if share.first else lambda _: None
    conversations = [] if arguments.answers else _plan(arguments)
    target = load_target(arguments.target, dtype="bfloat16", device=device)
    longest = target.config.max_position_embeddings
    if arguments.max_tokens > longest:
        raise ValueError(f"--max-tokens {arguments.max_tokens} is more than the target's context of {longest}")
    work: Path = arguments.work_dir
    work.mkdir(parents=True, exist_ok=True)
    answers = arguments.answers
    if answers is None:
        limits = Limits(arguments.max_prompt_tokens, arguments.max_new_tokens, arguments.max_tokens)
        answers = work / f"answers-{_key(target.model_hash, conversations, limits)}.jsonl"
        say(f"target {target.name} on {device}; {len(conversations)} conversations; work folder {work}")
        _answer(target, conversations, limits, answers, arguments, share)
        share.wait()
    elif not answers.is_file():
        raise ValueError(f"--answers: {answers} is no file")

    data = TrainingSet(target, read_sequences(answers), arguments.layers, arguments.draft_vocab, arguments.max_context)
    settings = TrainSettings(
        epochs=arguments.epochs, batch_tokens=arguments.batch_tokens, learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )  # fmt: skip
    say(f"{len(data.sequences)} conversations, {data.answered:,} answer tokens, {data.tokens:,} in all")
    student = data.student(arguments.drafter, arguments.seed)
    if not share.first:
        share.wait()  # the first makes the file of features
    features, checkpoint = data.features(arguments.features, work), data.checkpoint(student, settings, work)
    if share.first:
        share.wait()
    trainer = Trainer(student, features, settings, checkpoint, share)
    share.wait()  # before the first writes over the checkpoint that all have read
    started, seen = time.monotonic(), _train(trainer)
    if arguments.own_text and isinstance(student, MoA):
        trainer = learn_alone(student, data, trainer, arguments.own_text, arguments.features, work)
        seen += _train(trainer)
    if not share.first:
        return

    agreement = trainer.evaluate()
    notes = {
        "target": target.name,
        "prompt_files": [path.name for path in arguments.prompts],
        "composed": arguments.composed,
        "self_prompts": arguments.self_prompts,
        "conversations": len(data.sequences),
        "answer_tokens": data.answered,
        "own_text": arguments.own_text,
        "settings": asdict(settings),
        "steps": trainer.steps,
        "held_out_agreement_by_lag": agreement,
        "last_run": {
            "device": device,
            "machine": describe_machine(),
            "tokens": seen,
            "seconds": round(time.monotonic() - started),
        },
    }
    if isinstance(student, MoA):
        save_drafter(arguments.output_dir, student.config, student.trained(), notes)
    else:
        save_baseline(arguments.output_dir, student, notes)
    print(f"held-out agreement by lag 1..6: {agreement}")
    print(f"wrote {arguments.output_dir}; next: python -m export bundle --drafter {arguments.output_dir} ...")


@dataclass
class TrainingSet:
    """A target and its answers: whatever is trained on them, and how it is named in a work folder.

    final_norm: see MoAConfig.
    """

    target: Target
    sequences: Seq[Sequence]
    layers: int = 6
    draft_vocab: int = 12288
    max_context: int = 2048
    final_norm: bool = True

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("there is no answer to learn from; raise --max-prompt-tokens if prompts are too long")
        self.config = MoAConfig.for_target(
            self.target.config, self.target.model_hash, layers=self.layers, draft_vocab=self.draft_vocab,
            max_context=self.max_context, final_norm=self.final_norm,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def answered(self) -> int:
        return sum(sequence.answered for sequence in self.sequences)

    def student(self, kind: str, seed: int = 0) -> Student:
        """A fresh drafter of one kind ("moa", "tli1", "eagle2", "lm"), all of as many trained parameters as MoA."""
        torch.manual_seed(seed)
        student: Student = ReusedLayerMoA(self.config) if kind == "tli1" else MoA(self.config)
        if kind in LAYERS:
            budget = sum(p.numel() for p in student.parameters() if p.requires_grad)
            student = Baseline(BaselineConfig.like(kind, self.config, budget, LAYERS[kind]))
        vocabulary = draft_vocabulary(
            self.sequences, self.config.draft_vocab_size, self.config.vocab_size, self.target.eos_ids
        )
        student.adopt(self.target.model, vocabulary)
        return student.to(self.target.model.device)

    def features(self, where: str, work: Path) -> OnlineFeatures:
        """where: "online", "cache" or "auto": online on a GPU."""
        if where == "online" or (where == "auto" and self.target.model.device.type == "cuda"):
            return OnlineFeatures(self.target, self.config, self.sequences)
        return FeatureCache(self.target, self.config, self.sequences, work / f"features-{self._key()}.u8")

    def checkpoint(self, student: Student, settings: TrainSettings, work: Path) -> Path:
        kind = type(student).__name__
        return work / f"checkpoint-{_key(self._key(), kind, asdict(student.config), asdict(settings))}.safetensors"

    def _key(self) -> str:
        texts = hashlib.sha256(json.dumps([(s.ids, s.answers, s.alone) for s in self.sequences]).encode()).hexdigest()
        return _key(self.target.model_hash, texts, self.config.target_layers)


def read_sequences(path: Path) -> list[Sequence]:
    """The answered conversations of an answers file and of what further ranks have put beside it, in their order."""
    rows = {row["index"]: row for part in _parts(path) for row in read_answers(part)}
    sequences = (Sequence(rows[i]["ids"], tuple(map(tuple, rows[i]["answers"]))) for i in sorted(rows))
    return [sequence for sequence in sequences if sequence.answers]


def _parts(path: Path) -> list[Path]:
    return [path, *sorted(path.parent.glob(f"{path.stem}.rank*.jsonl"))]


def _plan(arguments: argparse.Namespace) -> list[Conversation]:
    openings = [turns[0] for turns in read_prompts([arguments.openings])] if arguments.openings else OPENINGS
    conversations = plan(
        read_prompts(arguments.prompts), limit=arguments.max_prompts, composed=arguments.composed,
        self_prompts=arguments.self_prompts, openings=openings, sampled=arguments.sampled,
        follow_ups=arguments.follow_ups, seed=arguments.seed,
    )  # fmt: skip
    if not conversations:
        raise ValueError("there is no prompt; give --prompts with files that hold some, or --self-prompts")
    return conversations


def _answer(
    target: Target, conversations: list[Conversation], limits: Limits, path: Path, arguments: argparse.Namespace,
    share: Share,
) -> None:  # fmt: skip
    """Each rank holds its share of the conversations that no rank has held yet, and writes a file of its own."""
    done = {row["index"]: row for part in _parts(path) for row in read_answers(part)}
    share.wait()
    left = [index for index in range(len(conversations)) if index not in done][share.rank :: share.size]
    if not left:
        return
    pack_linears(target.model.model)  # not the LM head, whose rows drafters adopt
    own = path if share.first else path.with_name(f"{path.stem}.rank{share.rank}.jsonl")
    with Meter("conversations", len(left), quiet=not share.first) as meter:
        began, tokens, held = time.monotonic(), 0, 0

        def on_end(answered: int) -> None:
            nonlocal tokens, held
            tokens, held = tokens + answered, held + 1
            meter.update(held, f"{tokens / max(1e-9, time.monotonic() - began):,.0f} tokens/s")

        generate_answers(
            target, {index: conversations[index] for index in left}, own, limits=limits,
            slots=min(arguments.slots, len(left)), seed=arguments.seed + len(done) + share.rank, on_end=on_end,
        )  # fmt: skip


def learn_alone(student: MoA, data: TrainingSet, trainer: Trainer, count: int, where: str, work: Path) -> Trainer:
    """The last stage, to be run: what the drafter writes alone, `count` texts, and as much of the rest beside it."""
    share, learnt = trainer.share, len(trainer.features.sequences) - len(trainer.held_out)
    some = [len(trainer.held_out) + i for i in range(min(count, learnt))]
    path = trainer.checkpoint.with_suffix(".alone.jsonl")
    if share.first:
        with Meter("own text", len(some)) as meter:
            write_alone(
                student, trainer.features, some, OWN_TOKENS, path, lambda _: meter.update(meter.done + 1, "")
            )  # fmt: skip
    share.wait()
    own = write_alone(student, trainer.features, some, OWN_TOKENS, path, lambda _: None)
    held_out = [
        data.sequences[i] for i in trainer.held_out[: 2 * len(some) // 9]
    ]  # a trainer holds out a tenth at most
    mixed = replace(data, sequences=[*held_out, *own, *(data.sequences[i] for i in some)])
    settings = replace(
        trainer.settings, epochs=1, learning_rate=OWN_RATE * trainer.settings.learning_rate, held_out=len(held_out)
    )
    if not share.first:
        share.wait()
    features = mixed.features(where, work)
    if share.first:
        share.wait()
    return Trainer(student, features, settings, mixed.checkpoint(student, settings, work), share)


def _train(trainer: Trainer) -> int:
    """Run the trainer under a progress bar; return the tokens trained on in this run."""
    total = 0
    with Meter("train", trainer.steps, quiet=not trainer.share.first) as meter:
        began, loss, agreement = time.monotonic(), 0.0, 0.0
        for progress in trainer.run():
            total += progress.tokens
            blend = 0.02 if loss else 1.0
            loss += blend * (progress.loss - loss)
            agreement += blend * (progress.agreement - agreement)
            rate = total / (time.monotonic() - began)
            note = f"{rate:,.0f} tokens/s  loss {loss:.3f}  agreement {agreement:.3f}"
            meter.update(progress.step, note)
    return total
