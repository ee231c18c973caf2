"""Settings of every test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.waiting import HANG

# What runs the tests in the background may let them ignore Ctrl-C and hang-ups; commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# a busy machine may take its time
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")


#: what torch brings, or only a developer's installation
BROUGHT = ("torch", "torchao", "transformers", "executorch", "optimum", "accelerate", "matplotlib", "PIL")


class _WithoutTorch:
    """Skips the files of tests that import what torch brings, where it is not installed. Ends with collection."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Asked when nobody else finds `name`."""
        if name in BROUGHT:
            pytest.skip(f"needs {name}", allow_module_level=True)


WITHOUT_TORCH = _WithoutTorch()
#: tests of what no user runs; they are slow ones
RESEARCH = Path(__file__).parent / "lab"
#: folders of many short tests. They come last, so that no process is left alone with a long file.
LIGHT = ("chat_api", "drafting", "protocol")
collect_ignore: list[str] = []
if find_spec("torch") is None:
    sys.meta_path.append(WITHOUT_TORCH)
    collect_ignore += ["android", "e2e", "export", "lab", "models"]


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Leave structlog unconfigured after each test: `capture_logs` alone leaves it printing to stdout."""
    yield
    structlog.reset_defaults()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.relative_to(RESEARCH.parent).parts[0] in LIGHT)
    for item in items:
        if RESEARCH in item.path.parents:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1500))
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))
    device = sys.modules.get("tests.device")  # imported by every test that runs a model there
    if device and device.MISSING:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=device.MISSING))


def pytest_collection_finish() -> None:
    """Settings of libraries that only some tests import."""
    if WITHOUT_TORCH in sys.meta_path:
        sys.meta_path.remove(WITHOUT_TORCH)
    if torch := sys.modules.get("torch"):
        # Tiny models gain nothing from a second thread, and on a busy machine they wait for it at every operator.
        torch.set_num_threads(1)
    if httpx := sys.modules.get("httpx"):
        default = httpx._config.DEFAULT_TIMEOUT_CONFIG  # five seconds
        default.connect = default.read = default.write = default.pool = HANG


@pytest.fixture(scope="module")
def throwaway_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copies of tiny models are nothing to keep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
