"""Compose training prompts of the kinds that real use has, from a target's own answers and from questions.

    python -m export.train.tasks --texts corpora/smollm2-135m-instruct.corpus --count 4000 --output build/tasks.jsonl
    python -m export train --prompts build/tasks.jsonl --max-prompt-tokens 1400 --max-tokens 1600 --output-dir DRAFTER

A drafter predicts answers better to kinds of prompts that it was trained on. The kinds: rewriting, edits of code,
extraction, lists, JSON, other languages, and questions behind long contexts. Each line holds `kind` and `prompt`; the
counts that are printed belong in the manifest of a corpus (`export.train.corpus pack --note kinds=...`). Nothing else
is read, so no evaluation prompt gets in unless `--texts` or `--prompts` hold it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from export.quiet import quiet
from export.train.prompts import read_prompts

#: characters of a passage, and of all passages of a long context
PASSAGE, LONG = (200, 1200), 4000
CODE = re.compile(r"```\w*\n(.{40,1200}?)```", re.DOTALL)
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch")
#: kind -> what is asked; {passage}, {code}, {question}, {long}, {sentence} and {language} are filled in
KINDS: dict[str, tuple[str, ...]] = {
    "rewriting": (
        "Rewrite the following text in a formal tone:\n\n{passage}",
        "Rewrite this so that a child understands it:\n\n{passage}",
        "Correct the grammar and keep everything else as it is:\n\n{passage}",
        "Make this text half as long:\n\n{passage}",
        "{passage}\n\nRewrite the text above as an email.",
    ),
    "code edits": (
        "Add comments to this code and change nothing else:\n\n```\n{code}```",
        "Add error handling to this code:\n\n```\n{code}```",
        "Rename the variables in this code so that they say what they hold:\n\n```\n{code}```",
        "```\n{code}```\n\nWrite a test for the code above.",
        "Rewrite this code in Python:\n\n```\n{code}```",
    ),
    "extraction": (
        "List all names of people and places in this text:\n\n{passage}",
        "Copy every sentence of this text that holds a number:\n\n{passage}",
        "{passage}\n\nQuote the most important sentence of the text above.",
        "Which words in this text are verbs?\n\n{passage}",
    ),
    "lists": (
        "Turn this text into a bulleted list:\n\n{passage}",
        "Give the steps in this text as a numbered list:\n\n{passage}",
        "{question}\n\nAnswer with a list of five points.",
        "Write a Markdown table with two columns, term and meaning, from this text:\n\n{passage}",
    ),
    "JSON": (
        'Return a JSON object with the keys "title", "summary" and "keywords" for this text:\n\n{passage}',
        'Extract the facts of this text as a JSON array of objects with "subject" and "fact":\n\n{passage}',
        '{question}\n\nReply with JSON: {{"answer": ..., "reason": ...}}',
    ),
    "other languages": (
        "Translate into {language}: {sentence}",
        "{question}\n\nAnswer in {language}.",
        "Say this in {language}, then explain it in English: {sentence}",
    ),
    "long contexts": (
        "{long}\n\nSummarize the texts above.",
        "Read these texts.\n\n{long}\n\nBy these texts: {question}",
        "{long}\n\nWhich of the texts above are about the same thing?",
        "{long}\n\nRepeat the second text word for word.",
    ),
}


@dataclass(frozen=True)
class TaskTexts:
    """What tasks are composed of: passages, pieces of code, and questions."""

    passages: list[str]
    codes: list[str]
    questions: list[str]

    @classmethod
    def of(cls, answers: Iterable[str], questions: Iterable[str]) -> TaskTexts:
        """Sort `answers` into passages and code, keep short questions. Raises ValueError if there are none of one."""
        passages, codes = [], []
        for answer in answers:
            codes += CODE.findall(answer)
            if PASSAGE[0] <= len(answer) <= PASSAGE[1] and "```" not in answer:
                passages.append(answer.strip())
        short = [question for question in questions if "\n" not in question and 10 < len(question) < PASSAGE[0]]
        if not (passages and codes and short):
            raise ValueError("the texts hold no passage, no code or no question to compose tasks of")
        return cls(passages, codes, short)

    def fill(self, template: str, rng: random.Random) -> str:
        """Put texts into a template of KINDS."""
        long = ""
        if "{long}" in template:
            while len(long) < LONG:
                long += f"\n\n{rng.choice(self.passages)}"
        passage = rng.choice(self.passages)
        return template.format(
            passage=passage,
            sentence=re.split(r"(?<=[.!?])\s", passage)[0],
            code=rng.choice(self.codes),
            question=rng.choice(self.questions),
            long=long.strip(),
            language=rng.choice(LANGUAGES),
        )


def compose(texts: TaskTexts, count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield `count` tasks `{"kind", "prompt"}`, equally many of each kind, the same for the same arguments."""
    rng = random.Random(seed)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        yield {"kind": kind, "prompt": texts.fill(rng.choice(KINDS[kind]), rng)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m export.train.tasks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True, help="corpus, or answers file of `export train`")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], help="further questions, as `export train` reads"
    )
    parser.add_argument("--target", default="", help="target that wrote the texts; default: the installed one")
    parser.add_argument("--count", type=int, default=4000, help="tasks to compose (default: 4000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    options = parser.parse_args(argv)
    with quiet():
        from export.train.training_set import read_sequences
        from outrider_core.models.target import open_target
        from outrider_core.targets.source import DEFAULT_TARGET, TargetError, TargetSource
    try:
        tokenizer = open_target(TargetSource.resolve(options.target or DEFAULT_TARGET)).tokenizer
        rng, sequences = random.Random(options.seed), read_sequences(options.texts)
        some = rng.sample(sequences, min(len(sequences), 2 * options.count))
        answers = [tokenizer.decode(s.ids[b:e], skip_special_tokens=True) for s in some for b, e in s.answers]
        asked = [turns[0] for turns in read_prompts(options.prompts)]
        asked += [sentence for answer in answers for sentence in re.findall(r"[A-Z][^.!?\n]{20,150}\?", answer)]
        rows = list(compose(TaskTexts.of(answers, asked), options.count, options.seed))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except (OSError, ValueError, TargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}: {json.dumps(Counter(row['kind'] for row in rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
