"""The tiny stack's folders, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from export.bundle.verifier_process import PLAIN_STREAMS, VerifierProcess
from outrider_core.drafting.bundle import Bundle, open_bundle
from outrider_core.targets.source import TargetSource
from tests.e2e.endpoints import KINDS, Served, serving
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "build/bundle"
DRAFTER = ROOT / "drafters/smollm2-135m-instruct-moa"
#: what needs the default bundle, which `make test` makes
needs_default_bundle = pytest.mark.skipif(
    not (BUNDLE / "manifest.json").is_file(), reason="no build/bundle; run the tests with: make test"
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierProcess]:
    """A process that serves the default target."""
    process = VerifierProcess(DRAFTER, tmp_path_factory.mktemp("log") / "verifier.log")
    process.start()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def oracle(verifier: VerifierProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierProcess]:
    """Another process that serves the same and decodes plainly, one step a token."""
    process = VerifierProcess(DRAFTER, tmp_path_factory.mktemp("log") / "verifier.log", *PLAIN_STREAMS)
    process.start()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    target, drafter, bundle = root / "target", root / "drafter", root / "bundle"
    model = tiny_model(seed=5, dtype=torch.float32)
    save_tiny_drafter(drafter, model, save_tiny_target(target, model))
    write_bundle(
        BundleOptions(target=TargetSource.resolve(str(target)), drafter=drafter, output_dir=bundle, quant="fp32")
    )
    return target, drafter, bundle


@pytest.fixture(scope="session")
def bundle(folders: tuple[Path, Path, Path]) -> Bundle:
    return open_bundle(folders[2])


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, folders: tuple[Path, Path, Path], bundle: Bundle) -> Iterator[Served]:
    """Each of the two endpoints."""
    with serving(request.param, folders, bundle) as endpoint:
        yield endpoint
