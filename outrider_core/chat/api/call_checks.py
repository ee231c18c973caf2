"""Check a call's arguments against the schema of their function, which a grammar may not have enforced.

Both schema and arguments may come from strangers, so the work is bounded. Regular expressions are skipped, as Python's
can take hours, and references are only followed within the schema itself: jsonschema's own registry would fetch others
from the network and from this machine's files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry

#: keywords and values checked before a check is abandoned
STEPS = 20_000
UNCHECKED = ("pattern", "patternProperties", "format")


class _TooMuch(Exception):
    """The check takes too many steps."""


def fault_of(arguments: str, schema: Mapping[str, Any]) -> str:
    """Return in one line why `arguments`, JSON text, violate `schema`; "" if they do not, or if that is undecided."""
    left = STEPS

    def bounded(rule: Callable[..., Iterator[ValidationError] | None]) -> Callable[..., Iterator[ValidationError]]:
        def run(validator: Any, value: Any, instance: Any, within: Any) -> Iterator[ValidationError]:
            nonlocal left
            size = len(instance) if isinstance(instance, Sized) else 1
            left -= 1 + (len(value) if isinstance(value, list) else 1) + (size * size if rule is unique else 0)
            if left < 0:
                raise _TooMuch
            yield from rule(validator, value, instance, within) or ()

        return run

    try:
        kind = validator_for(schema, default=Draft202012Validator)
        unique = kind.VALIDATORS.get("uniqueItems")
        rules = {name: bounded(rule) for name, rule in kind.VALIDATORS.items()}
        open_names = "patternProperties" in json.dumps(schema)
        rules |= dict.fromkeys([*UNCHECKED, *["additionalProperties"] * open_names], _unchecked)
        checked = extend(kind, rules)
        checked.check_schema(schema)
        found = best_match(checked(schema, registry=Registry()).iter_errors(json.loads(arguments)))
    except (_TooMuch, SchemaError, RecursionError):
        return ""
    except Exception as error:  # a dangling reference, or any error that a strange schema causes in the library
        return "" if not isinstance(error, ValueError) else f"no JSON: {error}"
    return "" if found is None else f"{found.json_path}: {found.message}"[:300]


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    yield from ()
