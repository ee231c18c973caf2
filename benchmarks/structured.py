"""JSON answers under schemas: draft trees beside plain constrained decoding, in turns, through one verifier.

    python -m benchmarks.structured --json structured.json

Every schema is answered once by trees and once by a stream, which the target writes under the same constraint.
Both texts must be the same. Calls per token: messages to the verifier for each token of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import common_arguments, conclude
from edge_runtime.events import Finished
from edge_runtime.options import Pinned
from edge_runtime.runtime import EdgeRuntime
from export.bundle.verifier_process import VerifierProcess
from outrider_core.drafting.bundle import open_bundle
from outrider_core.machine import describe_machine

TEXT, WHOLE, YES = {"type": "string", "maxLength": 60}, {"type": "integer"}, {"type": "boolean"}


def of(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with all of these properties and no others."""
    fields = {"properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "object", **fields}


#: the question, and the form of the answer
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Describe the city of Paris.", of(city_name=TEXT, country=TEXT, population=WHOLE, is_capital=YES)),
    ("Who was Ada Lovelace?", of(full_name=TEXT, year_of_birth=WHOLE, occupation=TEXT, known_for=TEXT)),
    ("Suggest a recipe for pancakes.", of(recipe_name=TEXT, preparation_minutes=WHOLE, ingredients={
        "type": "array", "items": of(ingredient=TEXT, amount=TEXT), "minItems": 2, "maxItems": 4})),
    ("Is water wet? Explain.", of(answer={"enum": ["yes", "no", "undecided"]}, explanation=TEXT, confidence=WHOLE)),
    ("Plan a day in Rome.", of(morning_activity=TEXT, afternoon_activity=TEXT, evening_activity=TEXT)),
    ("Review the book Moby Dick.", of(title=TEXT, author=of(first_name=TEXT, last_name=TEXT), rating_out_of_ten=WHOLE)),
    ("Write a bug report about a crash.", of(
        summary=TEXT, severity={"enum": ["low", "medium", "high"]}, steps_to_reproduce={
            "type": "array", "items": TEXT, "minItems": 2, "maxItems": 3}, reproducible=YES)),
    ("Compare cats and dogs.", of(
        cats=of(advantage=TEXT, disadvantage=TEXT), dogs=of(advantage=TEXT, disadvantage=TEXT))),
    ("Extract: Anna, 34, lives in Berlin and likes chess.", of(name=TEXT, age=WHOLE, home_town=TEXT, hobbies={
        "type": "array", "items": TEXT, "minItems": 1, "maxItems": 2})),
    ("Give the weather for tomorrow.", of(
        temperature_celsius=WHOLE, chance_of_rain_percent=WHOLE, short_description=TEXT,
        wind_direction={"enum": ["north", "east", "south", "west"]})),
)  # fmt: skip


async def answered(runtime: EdgeRuntime, number: int, options: argparse.Namespace) -> Finished:
    question, schema = ASKED[number]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    said = [{"role": "user", "content": f"{question} Answer in JSON."}]
    runtime.forget()  # so that no answer is drafted from another
    async for event in runtime.generate(
        said,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        response_format=form,
    ):
        last = event
    assert isinstance(last, Finished)
    return last


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    bundle, rows = open_bundle(options.bundle), list[dict[str, Any]]()
    verifier = VerifierProcess(options.drafter, Path("build/verifier.log"))
    try:
        with console.status("starting the verifier"):
            verifier.start()
            await asyncio.to_thread(verifier.wait_ready)
        async with (
            EdgeRuntime(bundle, verifier.address, pinned=Pinned(mode="tree")) as trees,
            EdgeRuntime(bundle, verifier.address, pinned=Pinned(mode="stream")) as stream,
        ):
            await answered(trees, 0, options)  # starts engine and grammar
            for number in track(range(len(ASKED)), "schemas", console=console):
                turns = (trees, stream) if number % 2 else (stream, trees)
                ends = {runtime: await answered(runtime, number, options) for runtime in turns}
                by_tree, plain = ends[trees], ends[stream]
                rows.append(
                    {
                        "question": ASKED[number][0],
                        "tokens": len(plain.token_ids),
                        "same": by_tree.token_ids == plain.token_ids,
                        "ended": plain.reason == "stop",
                        "calls_per_token": by_tree.stats.calls / max(1, by_tree.stats.tokens),
                        "tau": by_tree.stats.tau,
                        "speedup": by_tree.stats.tokens_per_second / plain.stats.tokens_per_second,
                    }
                )
    finally:
        verifier.stop()
    tokens = sum(row["tokens"] for row in rows)
    return {
        "machine": describe_machine(),
        "temperature": options.temperature,
        "answers": rows,
        "same": sum(row["same"] for row in rows),
        "calls_per_token": sum(row["calls_per_token"] * row["tokens"] for row in rows) / tokens,
        "speedup": statistics.geometric_mean(row["speedup"] for row in rows),
    }


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table("question", "tokens", "same", "calls per token", "tau", "speed over plain")
    for row in figures["answers"]:
        numbers = (f"{row[name]:.2f}" for name in ("calls_per_token", "tau", "speedup"))
        table.add_row(row["question"], str(row["tokens"]), "yes" if row["same"] else "NO", *numbers)
    console.print(table)
    console.print(
        f"{figures['same']} of {len(figures['answers'])} the same; {figures['calls_per_token']:.3f} calls per token; "
        f"{figures['speedup']:.2f} times plain constrained decoding"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common_arguments(parser, "bundle", "drafter", "seed", max_new_tokens=160, json=Path("build/structured.json"))
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    options, console = parser.parse_args(argv), Console()
    figures = lambda: asyncio.run(measure(options, console))  # noqa: E731
    return conclude(figures, lambda found: show(found, console), options.json, console)


if __name__ == "__main__":
    sys.exit(main())
