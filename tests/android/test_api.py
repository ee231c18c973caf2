"""The Kotlin library's public API is the recorded one, documented, and not too large."""

from __future__ import annotations

from tests.android import api

#: types that an app may have to learn
MOST_TYPES = 40


def test_the_api_is_the_recorded_one() -> None:
    """A change to it is a change to this file, for all to see."""
    assert api.DUMP.read_text(encoding="utf-8") == api.dump(), "run: python -m tests.android.api"


def test_an_app_has_few_types_to_learn() -> None:
    types = [one.type for one in api.everything() if one.type and not one.engine and not one.for_tests]
    assert {"EdgeRuntime", "Bundle", "Verified", "Finished", "AnswerRecord", "LinkRefused", "Transport"} <= set(types)
    assert len(types) <= MOST_TYPES, types


def test_everything_public_is_documented() -> None:
    assert [f"{one.file.name}: {one.text}" for one in api.everything() if not one.documented] == []
