"""schemathesis on the description at /openapi.json, on a tiny target: no failure, and no status that is not in it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from outrider_core.drafting.bundle import Bundle
from tests.conformance.conftest import BASE_URL, KEY, KINDS
from tests.e2e.endpoints import serving

pytestmark = pytest.mark.slow
needs_schemathesis = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="run it with: make test-conformance"
)
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def examined(url: str, folder: Path) -> None:
    description = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert description["openapi"] == "3.1.0" and len(description["paths"]) == 4
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    command += [
        f"{url}/openapi.json",
        "--checks",
        CHECKS,
        "--max-examples",
        "25",
        "--seed",
        "1",
        "--request-timeout",
        "300",
    ]
    command += ["--phases", "examples,coverage,fuzzing", "--header", f"Authorization: Bearer {KEY}", "--no-color"]
    command += ["--suppress-health-check", "all", "--request-timeout", "300"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


@needs_schemathesis
@pytest.mark.parametrize("kind", KINDS)
def test_the_description_holds(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if BASE_URL:
        examined(BASE_URL.removesuffix("/v1"), tmp_path)
        return
    folders: tuple[Path, Path, Path] = request.getfixturevalue("folders")
    bundle: Bundle = request.getfixturevalue("bundle")
    with serving(kind, folders, bundle) as served:
        examined(served.root, tmp_path)
