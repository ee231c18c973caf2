"""Bundles that the reader refuses, in one line that says what is wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.runtime import EdgeRuntime
from export.bundle.bundle import DRAFT_IDS_FILE, NULL_ROW_FILE
from outrider_core.drafting.bundle import FORMAT_VERSION, MANIFEST, BundleError, open_bundle
from outrider_core.drafting.engines.onnx import OnnxEngine
from outrider_core.protocol.sampling import Sampling
from tests.export.conftest import ENGINE_FILE, edit_manifest, open_error
from tests.tiny import TEMPERATURE

FILES = [
    ENGINE_FILE, DRAFT_IDS_FILE, NULL_ROW_FILE, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(copied: Path, name: str) -> None:
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(data[:-1])
    assert open_error(copied) == f"{copied / name} has {len(data) - 1} bytes instead of {len(data)}; copy it again"


@pytest.mark.parametrize("name", FILES)
def test_changed_byte(copied: Path, name: str) -> None:
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    assert open_error(copied) == f"{copied / name} differs from its sha256 in the manifest; copy it again"


@pytest.mark.parametrize("name", FILES)
def test_missing_file(copied: Path, name: str) -> None:
    (copied / name).unlink()
    assert open_error(copied) == f"{copied / name} is missing; copy the whole folder or export again"


@pytest.mark.parametrize("name", FILES)
def test_file_that_the_manifest_does_not_list(copied: Path, name: str) -> None:
    edit_manifest(copied, lambda m: m["files"].pop(name))
    assert open_error(copied) == f"{copied}/{MANIFEST} does not list {name}; export the bundle again"


def test_folder_without_a_manifest(copied: Path) -> None:
    (copied / MANIFEST).unlink()
    assert open_error(copied).endswith("write a bundle with: python -m export bundle")


@pytest.mark.parametrize("version", [1, 3, 0, None, "2"])
def test_other_format_version(copied: Path, version: object) -> None:
    edit_manifest(copied, lambda m: m.update(format_version=version))
    assert open_error(copied).endswith(f"format {version}, this runtime reads {FORMAT_VERSION}; export again or update")


@pytest.mark.parametrize("name", ["../outside", "sub/file", "/etc/hostname", ".", "", ".."])
def test_file_names_that_lead_elsewhere(copied: Path, name: str) -> None:
    (copied.parent / "outside").write_bytes(b"secret")
    entry = {"sha256": hashlib.sha256(b"secret").hexdigest(), "bytes": 6}
    edit_manifest(copied, lambda m: m["files"].update({name: entry}))
    assert open_error(copied) == f"{copied}/{MANIFEST} names {name!r}, which is not a plain file name"


@pytest.mark.parametrize("field", ["draft_ids_file", "null_row_file", "engine"])
def test_named_files_that_lead_elsewhere(copied: Path, field: str) -> None:
    outside = copied.parent / "outside"
    outside.write_bytes((copied / DRAFT_IDS_FILE).read_bytes())
    entry = {"sha256": hashlib.sha256(outside.read_bytes()).hexdigest(), "bytes": outside.stat().st_size}

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["../outside"] = entry
        if field == "engine":
            manifest["engines"]["onnx"]["file"] = "../outside"
        else:
            manifest[field] = "../outside"

    edit_manifest(copied, change)
    assert "'../outside', which is not a plain file name" in open_error(copied)


@pytest.mark.parametrize(
    "change",
    [
        {"eos_ids": []}, {"vocab_size": 0}, {"hidden_size": "wide"}, {"files": None},
        {"eos_ids": 2}, {"max_context": -1},
    ],
    ids=str,
)  # fmt: skip
def test_manifest_out_of_bounds(copied: Path, change: dict[str, Any]) -> None:
    edit_manifest(copied, lambda m: m.update(change))
    assert "is broken: " in open_error(copied) and next(iter(change)) in open_error(copied)


def test_manifest_of_nothing_that_drafts(copied: Path) -> None:
    edit_manifest(copied, lambda m: m.update(engines={}, understudy=None))
    assert "describes neither a drafter nor an understudy" in open_error(copied)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_manifest_that_is_none(copied: Path, text: str) -> None:
    (copied / MANIFEST).write_text(text)
    assert MANIFEST in open_error(copied)


def rewrite(folder: Path, name: str, data: bytes) -> None:
    """Put `data` into a file, and its hash into the manifest."""
    (folder / name).write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    edit_manifest(folder, lambda m: m["files"].update({name: entry}))


def test_the_confidence_temperature_reaches_the_device(copied: Path) -> None:
    manifest = json.loads((copied / MANIFEST).read_text())
    assert manifest["confidence_temperature"] == TEMPERATURE
    for given, wanted in ((TEMPERATURE, TEMPERATURE), (2, 2.0), (None, 1.0)):
        edit_manifest(copied, lambda m, given=given: m.update(confidence_temperature=given))
        if given is None:  # a bundle of before
            edit_manifest(copied, lambda m: m.pop("confidence_temperature"))
        drafter = EdgeRuntime(open_bundle(copied), None).drafter
        assert drafter._candidates.temperature(Sampling()) == wanted
        assert drafter._candidates.temperature(Sampling(temperature=0.3)) == 0.3


@pytest.mark.parametrize("given", [0, -1, 0.01, 1e9, "0.8", None, True])
def test_confidence_temperatures_that_are_none(copied: Path, given: object) -> None:
    edit_manifest(copied, lambda m: m.update(confidence_temperature=given))
    assert "confidence_temperature" in open_error(copied)


@pytest.mark.parametrize("name", [DRAFT_IDS_FILE, NULL_ROW_FILE])
@pytest.mark.parametrize("cut", ["empty", "short", "odd", "long"])
def test_tables_of_wrong_size(copied: Path, name: str, cut: str) -> None:
    data = (copied / name).read_bytes()
    rewrite(copied, name, {"empty": b"", "short": data[:-4], "odd": data[:-1], "long": data + data[-4:]}[cut])
    assert open_error(copied) == f"{copied / name} does not fit the manifest; export the bundle again"


def test_draft_ids_outside_the_vocabulary(copied: Path) -> None:
    edit_manifest(copied, lambda m: m.update(vocab_size=63))
    assert open_error(copied).endswith("does not fit the manifest; export the bundle again")


def test_bundle_without_a_null_row(copied: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["null_row_file"] = manifest["files"].pop(NULL_ROW_FILE) and None

    edit_manifest(copied, change)
    (copied / NULL_ROW_FILE).unlink()
    assert open_bundle(copied).null_row is None


def test_engine_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / ENGINE_FILE).write_bytes(b"no model")
    with pytest.raises(BundleError, match=r"drafter\.onnx does not load"):
        OnnxEngine(tmp_path / ENGINE_FILE)
