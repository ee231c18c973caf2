"""A target's answers as one compact file, so that a drafter can be trained without writing them again.

    python -m export.train.corpus pack build/train/answers-*.jsonl --output answers.corpus --note sources="GSM8K (MIT)"
    python -m export.train.corpus unpack answers.corpus --output answers.jsonl
    python -m export.train.corpus show answers.corpus

The file is an xz stream of one MessagePack map: a manifest (what wrote the answers, sources, licences, settings), then
columns over all conversations: index, length and answer spans as LEB128 varints, and all token ids in one array
of 16 or 32 bits. Ten million tokens take some 15 MB.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from export.quiet import quiet

FORMAT = 1
#: most bytes that a corpus may unpack to, so that a hostile file cannot fill the memory
LARGEST = 1 << 32
#: most bytes of a number in it
MOST_BITS = 63


#: the first bytes of an xz stream
XZ = b"\xfd7zXZ"


class CorpusError(ValueError):
    """The file is not a corpus; one line."""


class _Stored(msgspec.Struct):
    """The file's content; columns in the order of the conversations."""

    format: int
    manifest: dict[str, Any]
    numbers: bytes  # varints, a conversation: index step, token count, answer count, (gap, length) of each answer
    ids: bytes  # little endian, `width` bytes each
    width: int


def is_corpus(path: Path) -> bool:
    """Return whether a file begins as a corpus does."""
    with path.open("rb") as file:
        return file.read(len(XZ)) == XZ


def pack(rows: Iterable[dict[str, Any]], manifest: dict[str, Any]) -> bytes:
    """Pack rows of an answers file (`export.train.answers`) into a corpus.

    Of rows with the same index the last counts; rows without an answer are kept, as they mark their prompt as done.
    """
    unique = {row["index"]: row for row in rows}
    numbers, ids, previous, tokens = list[int](), list[int](), -1, 0
    for index in sorted(unique):
        row, at = unique[index], 0
        numbers += [index - previous - 1, len(row["ids"]), len(row["answers"])]
        for begin, end in row["answers"]:
            numbers += [begin - at, end - begin]
            tokens, at = tokens + end - begin, end
        ids += row["ids"]
        previous = index
    width = 2 if max(ids, default=0) < 1 << 16 else 4
    counts = {"conversations": len(unique), "tokens": len(ids), "answer_tokens": tokens}
    data = np.asarray(ids, np.int64).astype(f"<u{width}").tobytes()
    stored = _Stored(FORMAT, {**manifest, **counts}, _varints(numbers), data, width)
    return lzma.compress(msgspec.msgpack.encode(stored), preset=9 | lzma.PRESET_EXTREME)


def unpack(data: bytes) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return (manifest, rows as in an answers file). Raises CorpusError."""
    stored = _open(data)
    return stored.manifest, _rows(stored)


def _open(data: bytes) -> _Stored:
    try:
        decompressor = lzma.LZMADecompressor()
        plain = decompressor.decompress(data, LARGEST)
        if not decompressor.eof:
            raise EOFError("it ends too early")
        stored = msgspec.msgpack.decode(plain, type=_Stored)
    except (lzma.LZMAError, EOFError, msgspec.MsgspecError) as error:
        raise CorpusError(f"not a corpus, or cut short: {error}") from None
    if stored.format != FORMAT:
        raise CorpusError(f"format {stored.format} of a corpus is not known here; this version reads {FORMAT}")
    if stored.width not in (2, 4) or len(stored.ids) % stored.width:
        raise CorpusError("the corpus's token ids are damaged")
    return stored


def _rows(stored: _Stored) -> Iterator[dict[str, Any]]:
    numbers = iter(_read_varints(stored.numbers))
    ids = np.frombuffer(stored.ids, f"<u{stored.width}")
    index, start = -1, 0
    for step in numbers:
        try:
            count, answers, at = next(numbers), list[list[int]](), 0
            for _ in range(next(numbers)):
                begin = at + next(numbers)
                at = begin + next(numbers)
                answers.append([begin, at])
        except StopIteration:
            raise CorpusError("the corpus's conversations are damaged") from None
        index += 1 + step
        if start + count > len(ids) or at > count:
            raise CorpusError("the corpus holds fewer tokens than its conversations have")
        yield {"index": index, "ids": ids[start : start + count].tolist(), "answers": answers}
        start += count


def _varints(values: list[int]) -> bytes:
    """Encode non-negative integers, seven bits a byte, the lowest first; the highest bit marks that more follow."""
    out = bytearray()
    for value in values:
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def _read_varints(data: bytes) -> list[int]:
    values, value, shift = list[int](), 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > MOST_BITS:
            break
        if byte < 0x80:
            values.append(value)
            value, shift = 0, 0
    if shift:
        raise CorpusError("the corpus's conversations are damaged")
    return values


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export.train.corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    packing = commands.add_parser("pack", help="answers files into one corpus")
    packing.add_argument("answers", type=Path, nargs="+", help="JSONL files of one run of `export train`")
    packing.add_argument("--output", type=Path, required=True, help="the corpus to write")
    packing.add_argument(
        "--note", action="append", default=[], metavar="NAME=TEXT", help="into the manifest; repeat it"
    )
    unpacking = commands.add_parser("unpack", help="a corpus into an answers file, for `export train --answers`")
    unpacking.add_argument("corpus", type=Path)
    unpacking.add_argument("--output", type=Path, required=True, help="the JSONL file to write")
    showing = commands.add_parser("show", help="print the manifest")
    showing.add_argument("corpus", type=Path)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        if options.command == "pack":
            with quiet():
                from export.train.answers import read_answers

            notes = dict(note.split("=", 1) for note in options.note if "=" in note)
            data = pack((row for path in options.answers for row in read_answers(path)), notes)
            options.output.write_bytes(data)
            print(f"wrote {options.output}: {len(data) / 1e6:.1f} MB, {_open(data).manifest}")
            return 0
        manifest, rows = unpack(options.corpus.read_bytes())
        if options.command == "show":
            print(msgspec.json.format(msgspec.json.encode(manifest)).decode())
            return 0
        with options.output.open("wb") as file:
            for row in rows:
                file.write(msgspec.json.encode(row) + b"\n")
    except (OSError, CorpusError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
