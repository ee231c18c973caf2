"""`python -m export train`: the three stages in order, with progress and resumable state in the work folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch

from cloud.packing import pack_linears
from export.answers import Limits, generate_answers, read_answers
from export.features import FeatureCache, Sequence
from export.progress import Meter
from export.prompts import OPENINGS, Conversation, plan, read_prompts
from export.train import Trainer, TrainSettings, draft_vocabulary
from models.moa import MoA, MoAConfig, save_drafter
from models.target import Target, load_target


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def train(arguments: argparse.Namespace) -> None:
    """Answer the prompts, train, write the drafter folder. Every stage resumes where it stopped."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    conversations = _plan(arguments)
    target = load_target(arguments.target, dtype="bfloat16", device=device)
    work: Path = arguments.work_dir
    work.mkdir(parents=True, exist_ok=True)
    limits = Limits(arguments.max_prompt_tokens, arguments.max_new_tokens, arguments.max_tokens)
    answers = work / f"answers-{_key(target.model_hash, conversations, limits)}.jsonl"
    print(f"target {target.name} on {device}; {len(conversations)} conversations; work folder {work}")

    _answer(target, conversations, limits, answers, arguments)
    sequences = [Sequence(row["ids"], tuple(map(tuple, row["answers"]))) for row in read_answers(answers)]
    sequences = [sequence for sequence in sequences if sequence.answers]
    if not sequences:
        raise ValueError("no prompt is short enough to be answered; raise --max-prompt-tokens")
    tokens, answered = sum(len(s.ids) for s in sequences), sum(s.answered for s in sequences)
    print(f"{len(sequences)} answers, {answered:,} answer tokens, {tokens:,} in all")

    config = MoAConfig.for_target(
        target.config, target.model_hash, layers=arguments.layers, draft_vocab=arguments.draft_vocab,
        max_context=arguments.max_context,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    moa = MoA(config)
    moa.adopt(target.model, draft_vocabulary(sequences, config.draft_vocab_size, config.vocab_size, target.eos_ids))
    moa.to(device)
    settings = TrainSettings(
        epochs=arguments.epochs, batch_size=arguments.batch_size, learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )  # fmt: skip
    key = _key(answers.name, len(sequences), config.target_layers)
    cache = FeatureCache(target, config, sequences, work / f"features-{key}.f16")
    checkpoint = work / f"checkpoint-{_key(key, asdict(config), asdict(settings))}.safetensors"
    trainer = Trainer(moa, cache, settings, checkpoint)
    started, seen = time.monotonic(), _train(trainer)

    agreement = trainer.evaluate()
    notes = {
        "target": target.name,
        "prompt_files": [path.name for path in arguments.prompts],
        "self_prompts": arguments.self_prompts,
        "conversations": len(sequences),
        "answer_tokens": answered,
        "settings": asdict(settings),
        "steps": trainer.steps,
        "held_out_agreement_by_lag": agreement,
        "last_run": {
            "device": device,
            "machine": platform.processor() or platform.machine(),
            "tokens": seen,
            "seconds": round(time.monotonic() - started),
        },
    }
    save_drafter(arguments.output_dir, config, moa.trained(), notes)
    print(f"held-out agreement by lag 1..6: {agreement}")
    print(f"wrote {arguments.output_dir}; next: python -m export bundle --drafter {arguments.output_dir} ...")


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
    target: Target, conversations: list[Conversation], limits: Limits, path: Path, arguments: argparse.Namespace
) -> None:
    if sum(1 for _ in read_answers(path)) >= len(conversations):
        return
    pack_linears(target.model)
    with Meter("conversations", len(conversations)) as meter:
        began, total, done = 0.0, 0, 0

        def on_tokens(tokens: int, count: int) -> None:
            nonlocal began, total, done
            done += count
            if began == 0.0:  # the first call counts an earlier run's work
                began = time.monotonic()
            else:
                total += tokens
            meter.update(done, f"{total / max(1e-9, time.monotonic() - began):,.0f} tokens/s")

        generate_answers(
            target, conversations, path, limits=limits, slots=min(arguments.slots, len(conversations)),
            seed=arguments.seed, on_tokens=on_tokens,
        )  # fmt: skip


def _train(trainer: Trainer) -> int:
    """Run the trainer under a progress bar; return the tokens trained on in this run."""
    total = 0
    with Meter("train", trainer.steps) as meter:
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
