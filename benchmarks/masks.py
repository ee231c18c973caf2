"""Cost of structured output for the verifier: the grammar's mask and the changed logits of each drawn token.

    python -m benchmarks.masks --bundle build/bundle

Random logits over the bundle's vocabulary, an answer of some sixty tokens, one core. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from outrider_core.chat.grammar import ANY_OBJECT, Grammar, GrammarsUnavailable, open_grammars
from outrider_core.drafting.bundle import BundleError, open_bundle
from outrider_core.protocol.constraint import GRAMMAR_JSON_OBJECT, Constraint, Rules, adjusted

REPEATS = 20
#: milliseconds of a step to compare with: about that of the default target on a small machine
STEP_MS = 15.0
ANSWER = (
    '{"name": "Ada Lovelace, a mathematician of the first rank", "age": 36, "tags": ["poetical science", "engines"], '
    '"address": {"street": "12 St James\'s Square", "zip": "10115"}}'
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


def token_seconds(grammar: Grammar, tokens: Sequence[int], vocab_size: int) -> list[tuple[float, float]]:
    """Return seconds per drawn token for the mask (and following the token before), and for changing the logits."""
    logits = np.random.default_rng(0).normal(0, 3, vocab_size).astype(np.float32)
    taken = []
    for _ in range(REPEATS):
        rules = Rules(Constraint(0, grammar=GRAMMAR_JSON_OBJECT), grammar.matcher())
        for token in tokens:
            begun = time.perf_counter()
            adjustment = rules.adjustment()
            masked = time.perf_counter()
            changed = adjusted(logits, adjustment)
            done = time.perf_counter()
            assert np.isfinite(changed[token]), rules.broken
            rules.advance(token)
            taken.append((masked - begun + time.perf_counter() - done, done - masked))
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.masks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle", default="build/bundle", help="whose tokenizer and vocabulary (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    try:
        bundle = open_bundle(options.bundle)
        manifest = bundle.manifest
        grammars = open_grammars(bundle.tokenizer, manifest.vocab_size, manifest.eos_ids)
    except (BundleError, GrammarsUnavailable) as error:
        print(f"masks: {error}", file=sys.stderr)
        return 2
    tokens = bundle.tokenizer.encode(ANSWER, add_special_tokens=False).ids
    table = Table("grammar", "compile, ms", "mask, µs", "logits, µs", f"% of {STEP_MS:g} ms", "99th percentile, %")
    for name, schema in (("any object", ANY_OBJECT), ("a schema", json.dumps(SCHEMA))):
        begun = time.perf_counter()
        grammar = grammars.compile(schema)
        compiled = time.perf_counter() - begun
        taken = np.array(token_seconds(grammar, tokens, manifest.vocab_size))
        mask, logits = 1e6 * np.median(taken, 0)
        share = 1e5 * taken.sum(1) / STEP_MS
        figures = (1000 * compiled, mask, logits, np.median(share), np.percentile(share, 99))
        table.add_row(name, *(f"{figure:.2f}" if figure < 10 else f"{figure:.0f}" for figure in figures))
    console = Console()
    console.print(f"{manifest.vocab_size} tokens, an answer of {len(tokens)}, {REPEATS} times")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
