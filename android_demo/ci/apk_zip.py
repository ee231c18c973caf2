"""Write the zip of an APK, AAR or jar whose files Android can map in place, and find their offsets."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

#: an extra field that tells apksigner the alignment to keep
ALIGNMENT_FIELD = 0xD935
#: the largest page size of Android devices
PAGE = 16384
#: bytes of a local header before its file name
HEADER = 30


def alignment(name: str) -> int:
    """Return the alignment of `name`'s content; 0: it may be compressed and be anywhere."""
    if name.endswith(".so"):
        return PAGE
    stored = name == "resources.arsc" or name.endswith((".onnx", ".data", ".pte", ".f32", ".u32"))
    return 4 if stored else 0


def write(path: Path | BinaryIO, files: Iterable[tuple[str, bytes]], level: int = 9) -> None:
    """Write a zip of these names and contents, the same bytes every time. level: of compression, 0 to 9."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in sorted(files):
            info = zipfile.ZipInfo(name, (1981, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            if step := alignment(name):
                info.compress_type = zipfile.ZIP_STORED
                assert archive.fp
                begin = archive.fp.tell() + HEADER + len(name.encode()) + 6  # offset where the content would begin
                info.extra = struct.pack("<HHH", ALIGNMENT_FIELD, 2 + -begin % step, step) + bytes(-begin % step)
            archive.writestr(info, content, compresslevel=level)


def offsets(path: Path) -> dict[str, tuple[int, bool]]:
    """Return where each file's content begins, and whether it is uncompressed."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        for info in archive.infolist():
            raw.seek(info.header_offset)
            name, extra = struct.unpack("<26xHH", raw.read(HEADER))
            begin = info.header_offset + HEADER + name + extra
            found[info.filename] = begin, info.compress_type == zipfile.ZIP_STORED
    return found


def misplaced(path: Path) -> list[str]:
    """Return the files that Android could not map: compressed, or not aligned."""
    return [
        name for name, (begin, stored) in offsets(path).items()
        if (step := alignment(name)) and not (stored and begin % step == 0)
    ]  # fmt: skip
