"""Sign a bundle: list its files with their hashes in the manifest."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
from pathlib import Path

import msgspec

from outrider_core.drafting.bundle import MANIFEST, SERVER_HALF_FILE, FileEntry, Manifest

PACKAGES = ("outrider", "torch", "onnx", "onnxruntime", "executorch", "torchao")


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that write bundles."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def sign(manifest: Manifest, folder: Path) -> None:
    """List every shipped file with its sha256, and write the manifest."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in (MANIFEST, SERVER_HALF_FILE, "report.json", "report.md"):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            manifest.files[path.name] = FileEntry(digest, path.stat().st_size)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")
