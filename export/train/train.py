"""Train a drafter, stage by stage: the target answers, the drafter learns. Every stage resumes where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from export.progress import Meter
from export.train.answers import AnswerLimits, generate_answers, read_answers
from export.train.forecast import forecast, forecast_training
from export.train.ngrams import count_ngrams
from export.train.on_policy import own_text_rounds, some_of
from export.train.precision import training_dtype
from export.train.prompts import Conversation, plan, read_prompts
from export.train.share import Share
from export.train.train_options import TrainOptions
from export.train.trainer import Point, Trainer
from export.train.training_set import MOA, Kind, TrainingSet, answer_files, key_of, read_sequences
from export.train.writer import WORTH_A_COPY, writing_copy
from outrider_core.machine import describe_machine
from outrider_core.models.drafter_files import write_drafter
from outrider_core.models.packing import pack_linears
from outrider_core.models.target import Target, load_target, longest_text

#: seconds between reports of progress
SHOWN_EVERY = 1.0
#: most points of a curve
POINTS = 50
Notes = dict[str, Any]


def train(options: TrainOptions, kind: Kind = MOA) -> Notes | None:
    """Answer the prompts, train, and write the drafter folder.

    Returns the notes of its config.json; None on all ranks but the first. Raises ValueError, TargetError and OSError
    with one clear line.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    share, device = Share.join(options.torch_device())
    say: Callable[[str], None] = print if share.first else lambda _: None
    conversations = [] if options.answers else plan_conversations(options)
    dtype = share.agreed(training_dtype(device), device)
    target = load_target(options.target, dtype=dtype, device=device)
    longest = longest_text(target.config)
    if options.max_tokens > longest:
        raise ValueError(f"--max-tokens {options.max_tokens} is more than the target's context of {longest}")
    options.work_dir.mkdir(parents=True, exist_ok=True)
    if not options.answers:
        where = f"target {target.name} on {device}"
        say(f"{where}; {len(conversations)} conversations; work folder {options.work_dir}")
    answers = options.answers or answer(target, kind, conversations, options, share)

    with share.first_then_all():
        sequences = read_sequences(answers)
    shapes = (options.layers, options.draft_vocab, options.max_context)
    settings = kind.taught(options.settings(sum(len(sequence.ids) for sequence in sequences)))
    if not options.epochs:  # only the texts of the last stage, or those held out, are read
        own, few = options.own_text * options.on_policy, 10 * settings.held_out
        sequences = some_of(sequences, own, settings) if own else sequences[:few]
    elif options.answers and len(sequences) >= WORTH_A_COPY and share.first:
        print(forecast_training(target, kind, sequences, options), flush=True)
    data = TrainingSet(target, sequences, *shapes, start_from=options.start_from)
    say(f"{len(data.sequences)} conversations, {data.answered:,} answer tokens, {data.tokens:,} in all")
    student = data.student(kind, options.seed)
    with share.first_then_all():  # the first makes the file of features, and all read the checkpoint before it changes
        features = data.features(options.features, options.work_dir)
        checkpoint = data.checkpoint(student, settings, options.work_dir)
        main_stage = Trainer(student, features, settings, checkpoint, share)
    started, seen, steps, curves = time.monotonic(), 0, 0, list[list[Point]]()
    rounds = own_text_rounds(main_stage, data, options.own_text, options.on_policy, options.features)
    for trainer in chain([main_stage], rounds):
        seen += run_trainer(trainer)
        steps += trainer.steps
        curves += [trainer.curve] if trainer.curve else []
    if not share.first:
        return None

    agreement, calibration = main_stage.evaluate()  # it has the most held-out text
    config = student.config
    if calibration:
        config = replace(config, confidence_temperature=calibration.temperature)
    notes = {
        "target": target.name,
        "prompt_files": [path.name for path in options.prompts],
        "self_prompts": options.self_prompts,
        "conversations": len(data.sequences),
        "answer_tokens": data.answered,
        "own_text": options.own_text,
        "on_policy": options.on_policy if options.own_text else 0,
        **({"start_from": data.start_hash} if data.start_hash else {}),
        "settings": asdict(settings),
        "steps": steps,
        "curves": curves,
        "held_out_agreement_by_lag": agreement,
        "calibration": calibration._asdict() if calibration else None,
        "last_run": {
            "device": device,
            "machine": describe_machine(),
            "dtype": str(target.model.dtype).removeprefix("torch."),
            "tokens": seen,
            "seconds": round(time.monotonic() - started),
        },
    }
    write_drafter(options.output_dir, kind.name, asdict(config), student.trained(), notes)
    if options.epochs:  # else few of the answers were read
        count_ngrams((sequence.ids, sequence.answers) for sequence in data.sequences).save(options.output_dir)
    return notes


def plan_conversations(options: TrainOptions) -> list[Conversation]:
    """Return the conversations to answer. Raises ValueError if there is no prompt."""
    conversations = plan(
        read_prompts(options.prompts),
        limit=options.max_prompts,
        self_prompts=options.self_prompts,
        sampled=options.sampled,
        follow_ups=options.follow_ups,
        seed=options.seed,
    )
    if not conversations:
        raise ValueError("there is no prompt; give --prompts with files that hold some, or --self-prompts")
    return conversations


def answer(target: Target, kind: Kind, conversations: list[Conversation], options: TrainOptions, share: Share) -> Path:
    """Let the target answer; return the answers file. Before a long run, log how long that and training will take.

    Each rank answers its share of the conversations that no rank has answered yet, and writes its own file.
    """
    limits = AnswerLimits(options.max_prompt_tokens, options.max_new_tokens, options.max_tokens)
    path = options.work_dir / f"answers-{key_of(target.model_hash, conversations, astuple(limits))}.jsonl"
    with share.first_then_all():  # before any rank writes more
        done = {row["index"] for part in answer_files(path) for row in read_answers(part)}
    open_ones = [index for index in range(len(conversations)) if index not in done]
    with share.first_then_all():  # by all ranks, also by those with nothing to write
        bundle = writing_copy(options, len(open_ones)) if open_ones else None
    left = open_ones[share.rank :: share.size]
    if not left:
        return path
    if bundle is None:
        pack_linears(target.model.model)  # not the LM head, whose rows drafters copy
    if share.first and len(open_ones) >= WORTH_A_COPY:
        print(forecast(target, kind, bundle, conversations, len(open_ones), options), flush=True)
    own = path if share.first else path.with_name(f"{path.stem}.rank{share.rank}.jsonl")
    with Meter("conversations", len(left), quiet=not share.first) as meter:
        began, tokens = time.monotonic(), 0

        def on_end(answered: int) -> None:
            nonlocal tokens
            tokens += answered
            meter.update(meter.done + 1, f"{tokens / max(1e-9, time.monotonic() - began):,.0f} tokens/s")

        generate_answers(
            target,
            {index: conversations[index] for index in left},
            own,
            limits=limits,
            slots=min(options.slots, len(left)),
            seed=options.seed + len(done) + share.rank,
            bundle=bundle,
            on_end=on_end,
        )
    return path


def run_trainer(trainer: Trainer) -> int:
    """Run the trainer under a progress bar and draw its curve; return the tokens trained on in this run."""
    total, shown = 0, 0.0
    with Meter("train", trainer.steps, quiet=not trainer.share.first) as meter:
        began, loss, agreement = time.monotonic(), 0.0, 0.0
        for progress in trainer.run():
            total += progress.tokens
            now = time.monotonic()
            due = progress.step * POINTS // progress.steps > (progress.step - 1) * POINTS // progress.steps
            if now - shown < SHOWN_EVERY and not due:
                continue  # do not wait for the GPU
            blend = 0.2 if shown else 1.0
            shown = now
            loss += blend * (progress.loss.item() - loss)
            agreement += blend * (progress.agreement.item() - agreement)
            rate = total / (time.monotonic() - began)
            meter.update(progress.step, f"{rate:,.0f} tokens/s  loss {loss:.3f}  agreement {agreement:.3f}")
            if due:
                trainer.curve.append((progress.step, round(loss, 3), round(agreement, 4)))
    return total
