"""A bundle without a drafter: its understudy drafts chains and writes offline, and nothing had to be trained."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from benchmarks.links import EmulatedLink
from cloud.server.service import Verifier
from cloud.settings import Settings
from cloud.torch_engine.loading import torch_model
from edge_runtime.events import Finished, Provisional
from edge_runtime.options import FIXED_TREES, Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from edge_runtime.session.policy import Policy
from edge_runtime.session.states import Writer
from export.bundle.bundle import write_bundle
from export.bundle.bundle_options import BundleOptions, CheckOptions
from export.bundle.check import check_bundle
from outrider.cli import main
from outrider.cli.doctor import look_at_bundle, look_at_engine
from outrider_core.drafting.bundle import MANIFEST, Bundle, BundleError, open_bundle
from outrider_core.drafting.drafter import Drafter, TreeShape
from outrider_core.drafting.engines import open_engine
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.target import load_target
from outrider_core.protocol.sampling import Sampling
from outrider_core.targets.source import TargetSource
from tests.cloud.drive import in_chunks, serve
from tests.e2e.stack import MAX_NEW, PATIENCE, Screen, oracle
from tests.tiny import save_tiny_drafter, save_tiny_target, tiny_model, tiny_tokenizer

PROMPTS = [[4, 17, 44], [30, 31, 90, 12, 7], [101]]
pytestmark = pytest.mark.usefixtures("throwaway_cache")


def model_in(folder: Path, vocab: int = 199, named: int | None = None, **renamed: str) -> TargetSource:
    """A small model of `vocab` rows, whose tokenizer has `named` tokens (None: all). renamed: other texts of tokens."""
    model = tiny_model(seed=5, vocab=vocab, hidden=64, dtype=torch.float32)
    save_tiny_target(folder, model, tiny_tokenizer(named or vocab))
    path = folder / "tokenizer.json"
    state = json.loads(path.read_bytes())
    words = state["model"]["vocab"].items()
    state["model"]["vocab"] = {renamed.get(text, text): index for text, index in words}
    path.write_text(json.dumps(state))
    return TargetSource.resolve(str(folder))


def exported(target: TargetSource, understudy: TargetSource | None, folder: Path, **more: Any) -> Bundle:
    options = BundleOptions(target=target, understudy=understudy, output_dir=folder, **more)
    write_bundle(options, Console(quiet=True))
    return open_bundle(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Of a target, a drafter that is not installed, and a bundle without it."""
    root = tmp_path_factory.mktemp("undrafted")
    target = model_in(root / "target")
    save_tiny_drafter(root / "drafter", load_target(target).model, target.identity)
    exported(target, target, root / "bundle")
    return root / "target", root / "drafter", root / "bundle"


@pytest.fixture(scope="module")
def bundle(folders: tuple[Path, Path, Path]) -> Bundle:
    return open_bundle(folders[2])


def verifier_of(folders: tuple[Path, Path, Path], drafter: bool) -> Verifier:
    """One that has the drafter, or none."""
    settings = Settings(max_model_len=120, max_nodes=16, kv_tokens=600, max_sessions=8)
    target = load_target(TargetSource.resolve(str(folders[0])), "float64")
    model = torch_model(target, load_drafter(folders[1]) if drafter else None, settings)
    return in_chunks(Verifier(model, settings), 16)


@pytest.mark.parametrize(
    ("drafter", "pinned"),
    [
        pytest.param(False, FIXED_TREES, id="none there, fixed"),
        pytest.param(True, Pinned(), id="one at the verifier, free"),
        pytest.param(True, FIXED_TREES, id="one at the verifier, fixed", marks=pytest.mark.slow),
        pytest.param(False, Pinned(), id="none there, free", marks=pytest.mark.slow),
    ],
)
def test_answers_over_a_link_with_a_cut_equal_plain_decoding(
    folders: tuple[Path, Path, Path], bundle: Bundle, drafter: bool, pinned: Pinned
) -> None:
    writers = set[str]()

    async def run(address: str) -> list[tuple[Finished, list[int]]]:
        ends = []
        async with EmulatedLink(int(address.rsplit(":", 1)[1])) as link:
            options = RuntimeOptions(patience=PATIENCE, threads=1, policy=Policy(offline_rate=1000))
            async with EdgeRuntime(bundle, link.address, options, pinned) as runtime:
                for number, prompt in enumerate(PROMPTS):
                    screen, cut = Screen(), number != 1
                    async for event in runtime.generate(prompt, max_new_tokens=MAX_NEW):
                        screen.show(event)
                        if isinstance(event, Provisional):
                            writers.add(event.writer)
                            link.silent = screen.verified + 4 > len(screen.tokens)
                        elif cut and screen.verified >= 8:
                            link.silent, cut = True, False
                    assert isinstance(event, Finished)
                    ends.append((event, screen.tokens))
        return ends

    with serve(verifier_of(folders, drafter)) as address:
        ends = asyncio.run(run(address))
    for prompt, (end, shown) in zip(PROMPTS, ends, strict=True):
        assert end.token_ids == shown == oracle(folders, prompt, Sampling())
        assert end.stats.chains > 0 or pinned is not FIXED_TREES
    assert sum(end.stats.kept for end, _ in ends) > 0 and writers == {Writer.UNDERSTUDY}
    if pinned is FIXED_TREES:
        chains = sum(end.stats.chains for end, _ in ends)
        assert sum(end.stats.chained for end, _ in ends) > chains, "its chains are the target's own weights in 8 bits"


@pytest.mark.parametrize("writer", ["device-only", "prefer-device"])
def test_the_device_writes_first(folders: tuple[Path, Path, Path], bundle: Bundle, writer: str) -> None:
    async def run(address: str | None) -> Finished:
        async with EdgeRuntime(bundle, address, RuntimeOptions(policy=Policy(writer=writer), threads=1)) as runtime:
            *_, end = [event async for event in runtime.generate(PROMPTS[0], max_new_tokens=12)]
        assert isinstance(end, Finished)
        return end

    with serve(verifier_of(folders, False)) as address:
        end = asyncio.run(run(address))
    assert end.stats.understudy == end.stats.provisional > 0
    if writer == "prefer-device":
        assert end.token_ids == oracle(folders, PROMPTS[0], Sampling())[:12]


@pytest.mark.parametrize("broken", ["gone", "off"])
def test_without_its_understudy_the_target_alone_writes(
    folders: tuple[Path, Path, Path], tmp_path: Path, broken: str
) -> None:
    bundle = open_bundle(shutil.copytree(folders[2], tmp_path / "bundle"))
    if broken == "gone":
        shutil.rmtree(bundle.folder / "understudy")
    policy = Policy(understudy="off" if broken == "off" else "cold")

    async def run(address: str | None, policy: Policy) -> Finished:
        async with EdgeRuntime(bundle, address, RuntimeOptions(policy=policy, threads=1)) as runtime:
            *_, end = [event async for event in runtime.generate(PROMPTS[0], max_new_tokens=12)]
        assert isinstance(end, Finished)
        return end

    with serve(verifier_of(folders, False)) as address:
        end = asyncio.run(run(address, policy))
        first = asyncio.run(run(address, dataclasses.replace(policy, writer="prefer-device")))
    assert end.token_ids == first.token_ids == oracle(folders, PROMPTS[0], Sampling())[:12]
    assert end.stats.provisional == 0
    assert asyncio.run(run(None, policy)).reason == "unreachable"


def test_lookup_alone_makes_trees(bundle: Bundle) -> None:
    drafter = Drafter.of(bundle, open_engine(bundle))
    text = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        assert drafter.draft(text, sampling, TreeShape(nodes=3)).tree.tokens == (9, 10, 11)
        assert not drafter.draft([5, 6, 7], sampling, TreeShape()).tree


def test_commands_open_it(folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    finding, bundle = look_at_bundle(folders[2])
    assert finding.level == "good" and "an understudy of" in finding.text and bundle
    finding, step = look_at_engine(bundle, None, 1)
    assert finding.level == "good" and "the understudy drafts" in finding.text and step > 0
    assert not check_bundle(CheckOptions(bundle=folders[2], target=TargetSource.resolve(str(folders[0]))))
    assert "its understudy drafts, and loads" in capsys.readouterr().err


def test_the_command_generate_asks_and_writes_alone(
    folders: tuple[Path, Path, Path], bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--bundle", str(folders[2]), "--json", "--max-tokens", "12"]
    with serve(verifier_of(folders, False)) as address:
        assert main([*command, "--server", address, "w4 w17 w44"]) == 0
    asked = json.loads(capsys.readouterr().out)
    ids = bundle.render_chat([{"role": "user", "content": "w4 w17 w44"}])
    assert asked["token_ids"] == oracle(folders, ids, Sampling())[:12]
    assert main([*command, "--policy", "device-only", "w4 w17 w44"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert {span["writer"] for span in alone["spans"]} == {"understudy"} and not alone["verified_text"]


def test_the_export_says_what_a_drafter_would_add(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    console = Console(record=True, width=400)
    target = TargetSource.resolve(str(folders[0]))
    write_bundle(BundleOptions(target=target, understudy=target, output_dir=tmp_path / "bundle"), console)
    assert "a trained drafter would add trees" in console.export_text()
    with pytest.raises(BundleError, match=r"no drafter here was trained on .*--understudy MODEL"):
        exported(target, None, tmp_path / "none")
    with pytest.raises(BundleError, match="measure a drafter"):
        exported(target, target, tmp_path / "none", bench=True)
    assert not (tmp_path / "none").exists()


def test_a_damaged_manifest_is_refused(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[2], tmp_path / "bundle")
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(msgspec.json.encode({**manifest, "understudy": None}))
    with pytest.raises(BundleError, match="neither a drafter nor an understudy"):
        open_bundle(folder)


Made = Callable[[Path], TargetSource]


@pytest.mark.parametrize(
    ("make", "barred"),
    [
        (lambda folder: model_in(folder, 256, 199), []),  # padded
        (lambda folder: model_in(folder, 256, 201), [199, 200]),  # two tokens more
        (lambda folder: model_in(folder, 256, 198), []),  # one token fewer, a row for it
    ],
    ids=["padded", "more", "fewer"],
)
def test_tokenizers_that_are_alike_are_mapped(
    folders: tuple[Path, Path, Path], tmp_path: Path, make: Made, barred: list[int]
) -> None:
    bundle = exported(TargetSource.resolve(str(folders[0])), make(tmp_path / "understudy"), tmp_path / "bundle")
    assert bundle.manifest.understudy and bundle.manifest.understudy.barred == barred


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: model_in(folder, w198="other"), "token 198 is 'other', and 'w198' there"),
        (lambda folder: model_in(folder, w5="w6", w6="w5"), "'w5' is 6, and 5 there"),
        (lambda folder: model_in(folder, 198), "it has 198 tokens, and the target has one of id 198"),
        (lambda folder: model_in(folder, 199, 150), "it has 150 of the 199 tokens there"),
    ],
    ids=["other", "moved", "no row", "half"],
)
def test_tokenizers_that_differ_are_refused(
    folders: tuple[Path, Path, Path], tmp_path: Path, make: Made, why: str
) -> None:
    with pytest.raises(BundleError) as error:
        exported(TargetSource.resolve(str(folders[0])), make(tmp_path / "understudy"), tmp_path / "bundle")
    assert str(error.value).endswith(f"has another vocabulary than the target: {why}")
