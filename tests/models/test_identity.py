"""The identity of a model covers every byte of it, and is cheap from the second time on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider_core import cache
from outrider_core.cache import REMEMBERED_BYTES, sha256_of
from outrider_core.targets.identity import model_identity
from outrider_core.targets.source import DEFAULT_TARGET, TargetSource


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# what counts


def test_an_identity_is_sixteen_digits_and_moves_with_the_files(saved: Path, tiny: Path) -> None:
    assert model_identity(saved) == model_identity(saved) == model_identity(tiny)
    assert len(model_identity(saved)) == 16 and int(model_identity(saved), 16) >= 0


def test_touching_changes_nothing(saved: Path, tiny: Path) -> None:
    for path in tiny.iterdir():
        os.utime(path, (1, 1))
    assert model_identity(tiny) == model_identity(saved)


def test_other_files_do_not_count(saved: Path, tiny: Path) -> None:
    (tiny / "README.md").write_text("hello")
    assert model_identity(tiny) == model_identity(saved)


def test_noise_on_any_single_tensor_counts(saved: Path, tiny: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    seen = {model_identity(saved)}
    for name in weights:
        changed = {**weights, name: weights[name] + 1e-3 * torch.ones_like(weights[name])}
        save_file(changed, tiny / "model.safetensors", metadata={"format": "pt"})
        seen.add(model_identity(tiny))
    assert len(seen) == 1 + len(weights)


def test_noise_in_the_middle_of_a_large_file_counts(tmp_path: Path) -> None:
    """An MLP weight far from both ends of its file, as a merged LoRA changes it."""
    found: list[str] = []
    for noise in (0.0, 1e-3):
        mlp = torch.ones(256, 256) + noise
        tensors = {"a": torch.zeros(128, 256), "mlp": mlp, "z": torch.zeros(128, 256)}
        save_file(tensors, tmp_path / "model.safetensors")
        found.append(model_identity(tmp_path))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_every_byte_of_small_files_counts(saved: Path, tiny: Path, name: str) -> None:
    data = bytearray((tiny / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tiny / name).write_bytes(data)
    assert model_identity(tiny) != model_identity(saved)


def test_the_names_of_weight_files_count(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"12345678")
    first = model_identity(tmp_path)
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    assert model_identity(tmp_path) != first


def test_weights_in_pytorch_s_own_format_count_where_there_are_no_others(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"first")
    first = model_identity(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"other")
    assert model_identity(tmp_path) != first
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    both = model_identity(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert model_identity(tmp_path) == both


def test_every_byte_of_a_gguf_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    seen = set()
    for at in (0, 50_000, 99_999):
        data = bytearray(100_000)
        data[at] = 1
        path.write_bytes(data)
        seen.add(model_identity(path))
    assert len(seen) == 3
    assert model_identity(path.rename(tmp_path / "renamed.gguf")) in seen


# what is remembered


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file worth remembering, written a while ago."""
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(REMEMBERED_BYTES)
    return path


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as written a while ago at once."""
    monkeypatch.setattr(cache, "SETTLED_NS", 0)


def bytes_read(run: Callable[[], object]) -> int:
    """Bytes that this process asks the kernel for during `run`."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    run()
    return count() - before


def test_a_large_file_is_read_once(large: Path, tmp_path: Path) -> None:
    first = sha256_of([large])
    assert bytes_read(lambda: sha256_of([large])) < 100_000
    assert sha256_of([large]) == first
    (tmp_path / "link").symlink_to(large)
    assert bytes_read(lambda: sha256_of([tmp_path / "link"])) < 100_000


@pytest.mark.parametrize("keep_mtime", [False, True], ids=["new mtime", "mtime put back"])
def test_an_entry_does_not_outlive_a_changed_file_of_the_same_size(large: Path, keep_mtime: bool) -> None:
    first, before = sha256_of([large]), large.stat()
    with large.open("r+b") as file:
        file.seek(REMEMBERED_BYTES // 2)
        file.write(b"\1")
    os.utime(large, ns=(before.st_mtime_ns, before.st_mtime_ns + (0 if keep_mtime else 1)))
    assert sha256_of([large]) != first


def test_a_file_written_a_moment_ago_is_not_remembered(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_NS", 3_600_000_000_000)
    sha256_of([large])
    assert bytes_read(lambda: sha256_of([large])) >= REMEMBERED_BYTES


def test_small_files_leave_nothing_behind(saved: Path, own_cache: Path) -> None:
    model_identity(saved)
    assert not own_cache.exists()


@pytest.mark.parametrize("text", ["", "no json", "[1]", '{"PATH": 3}', '{"PATH": [1, 2, 3, 4]}', "\\udcff"])
def test_a_broken_cache_is_passed_over_and_replaced(large: Path, own_cache: Path, text: str) -> None:
    first = sha256_of([large])
    (own_cache / "hashes.json").write_text(text.replace("PATH", str(large)))
    assert sha256_of([large]) == first
    assert bytes_read(lambda: sha256_of([large])) < 100_000


def test_a_cache_that_cannot_be_written_is_passed_over(large: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    assert sha256_of([large]) == sha256_of([large])


def test_entries_of_files_that_are_gone_are_dropped(large: Path, own_cache: Path) -> None:
    sha256_of([large])
    other = large.rename(large.with_name("other.safetensors"))
    sha256_of([other])
    assert list(json.loads((own_cache / "hashes.json").read_text())) == [str(other)]
    assert [path.name for path in own_cache.iterdir()] == ["hashes.json"]


def test_hashing_that_takes_long_says_so_once(
    large: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "SLOW_SECONDS", 0.0)
    sha256_of([large, large])
    assert [record.message for record in caplog.records] == [f"hashing {large.parent} (0.0 GB), once until it changes"]
    sha256_of([large])
    assert len(caplog.records) == 1


def test_an_alias_stays_one_beside_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEFAULT_TARGET).mkdir()
    monkeypatch.chdir(tmp_path)
    assert TargetSource(DEFAULT_TARGET, tmp_path / "weights.gguf").shown_name == DEFAULT_TARGET
