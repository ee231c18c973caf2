"""`outrider models`: list models on this machine with size and hash, and remove them."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from outrider.cli.arguments import Parser
from outrider.cli.default_bundle import FOLDER
from outrider.cli.opening import CommandError
from outrider_core.cache import cache_dir, try_lock, why_inaccessible
from outrider_core.models.drafter_arrays import read_drafter
from outrider_core.models.folders import drafters_folder
from outrider_core.models.moa_config import DrafterError
from outrider_core.targets.identity import converted_from
from outrider_core.targets.source import ALIASES, TargetError, TargetSource

EXAMPLES = ("rm smollm2-135m-instruct", "rm b179c952 --yes", "--json")
#: folders of the cache -> pattern of the names in them: model, hash, format version, bits
CACHED = {
    "targets": re.compile(r"(?P<name>.+)"),
    "target-bundles": re.compile(r"(?P<name>.+)-(?P<hash>[0-9a-f]{16})-v\d+(-(?P<bits>\d+)bit)?"),
    FOLDER: re.compile(r"(?P<name>.+)-(?P<hash>[0-9a-f]{16})"),
}
#: suffix of the temporary folder of a write, whose name begins with a dot
UNFINISHED = re.compile(r"\.(?P<name>.+?)((\.[0-9a-f]{16})?\.(partial|old|removed))+|\.(?P<float>.+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Model:
    """Files of one model. path: a file or a folder. lock: the file that its maker locks, None outside the cache."""

    kind: str
    name: str
    hash: str
    path: Path
    lock: Path | None = None

    def files(self) -> list[os.stat_result]:
        """Return stat results of its files, without those that vanish meanwhile."""
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(self.path) for name in names]
        found = list[os.stat_result]()
        for path in paths or [str(self.path)]:
            with suppress(FileNotFoundError):
                found.append(os.lstat(path))
        return found

    @property
    def bytes(self) -> int:
        """Return the size of its files together."""
        return sum(each.st_size for each in self.files())

    def named(self, word: str) -> bool:
        """Return whether `word` names it: its model's name, its folder's, or the beginning of its hash."""
        return word in (self.name, self.path.name) or (len(word) >= 4 and self.hash.startswith(word))


def frees(models: Iterable[Model]) -> int:
    """Return the bytes that removing all of `models` frees: files without a further hard link elsewhere."""
    links, inodes = Counter[tuple[int, int]](), dict[tuple[int, int], os.stat_result]()
    for model in models:
        for each in model.files():
            links[each.st_dev, each.st_ino] += 1
            inodes[each.st_dev, each.st_ino] = each
    return sum(found.st_size for key, found in inodes.items() if found.st_nlink <= links[key])


def installed() -> Iterator[Model]:
    """Yield weights that came with packages, and drafters, which this command does not remove."""
    for alias in ALIASES:
        with suppress(TargetError):
            source = TargetSource.resolve(alias)
            if source.path.is_file():
                yield Model("target", alias, source.identity, source.path)
    places = dict.fromkeys([Path("drafters").resolve(), drafters_folder().resolve()])
    for folder in (folder for place in places if place.is_dir() for folder in sorted(place.iterdir())):
        with suppress(DrafterError):
            yield Model("drafter", folder.name, read_drafter(folder)[2], folder)


def cached() -> Iterator[Model]:
    """Yield models that commands have made in the cache. Links to elsewhere are left out."""
    cache = cache_dir()
    for place, pattern in CACHED.items():
        folder = cache / place
        for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
            if path.is_symlink() or not path.is_dir():
                continue
            if unfinished := UNFINISHED.fullmatch(path.name):
                made = unfinished["name"] or unfinished["float"]
                kind, found = "unfinished", pattern.fullmatch(made)
            else:
                made, found = path.name, pattern.fullmatch(path.name)
                kind = {"targets": "float copy", FOLDER: "bundle"}.get(place, "8-bit copy")
            if not found:
                continue
            known = found.groupdict()
            if known.get("bits") and kind == "8-bit copy":
                kind = f"{known['bits']}-bit copy"
            digest = known.get("hash") or converted_from(path) or ""
            yield Model(kind, known["name"], digest, path, folder / f".{made}.lock")


def show(models: Sequence[Model], *, as_json: bool) -> None:
    """Print a line for each, and how much removing everything in the cache frees."""
    freed = [frees([model]) if model.lock else None for model in models]
    total = frees(model for model in models if model.lock)
    if as_json:
        entries = [
            {"kind": m.kind, "name": m.name, "hash": m.hash, "bytes": m.bytes, "frees": size or 0, "path": str(m.path)}
            for m, size in zip(models, freed, strict=True)
        ]
        print(json.dumps({"models": entries, "cache": str(cache_dir()), "frees": total}))
        return
    rows = [("NAME", "KIND", "HASH", "SIZE", "FREES", "WHERE")]
    for m, size in zip(models, freed, strict=True):
        removed = "-" if size is None else _megabytes(size)
        rows.append((m.name, m.kind, m.hash, _megabytes(m.bytes), removed, str(m.path)))
    name, kind, digest, taken, gain, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    for row in rows:
        print(f"{row[0]:<{name}}  {row[1]:<{kind}}  {row[2]:<{digest}}  {row[3]:>{taken}}  {row[4]:>{gain}}  {row[5]}")
    print(f"removing everything with a figure under FREES frees {_megabytes(total)}: outrider models rm NAME or HASH")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def remove(words: Sequence[str], *, ask: bool) -> None:
    """Remove the named models from the cache. Raises CommandError, and leaves models that another process uses."""
    models = list(cached())
    chosen = dict[Path, Model]()
    for word in words:
        if not (found := [model for model in models if model.named(word)]):
            elsewhere = next((model for model in installed() if model.named(word)), None)
            raise CommandError(
                f"{elsewhere.path} is not in the cache; remove it the way it was installed"
                if elsewhere
                else f"there is no {word!r} in {cache_dir()}; `outrider models` shows what there is"
            )
        chosen |= {model.path: model for model in found}
    for model in chosen.values():
        print(f"{model.kind} {model.path}: {_megabytes(model.bytes)}")
    size = _megabytes(frees(chosen.values()))
    if ask:
        if not (sys.stdin and sys.stdin.isatty()):
            raise CommandError("no terminal to ask for confirmation; add --yes to remove this")
        try:
            agreed = input(f"remove this and free {size}? [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:  # Ctrl-D
            agreed = False
            print()
        if not agreed:
            raise CommandError("nothing was removed")
    with ExitStack() as locks:
        _lock(chosen.values(), locks)
        for path in chosen:
            aside = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(8)}.removed")
            path.rename(aside)  # in one step: a half removed folder has no name that is opened
            shutil.rmtree(aside)
    print(f"freed {size}")


def _lock(models: Iterable[Model], locks: ExitStack) -> None:
    """Lock out makers and users while `locks` is open. Raises CommandError if there are any, or nothing to lock."""
    paths = {path: model for model in models for path in (model.lock, model.path) if path}
    for path, model in paths.items():
        try:
            if path == model.lock:
                path.touch()
            handle = try_lock(path)
        except FileNotFoundError:
            raise CommandError(f"another process has removed {model.path}; nothing was removed by this one") from None
        if handle is None:
            raise CommandError(f"another process uses {model.path}; end it first. Nothing was removed")
        locks.callback(os.close, handle)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(
        EXAMPLES,
        prog="outrider models",
        description="List the models on this machine; with `rm`, delete cached ones.",
    )
    parser.add_argument("action", nargs="?", choices=["rm"], help="remove from the cache; without it all are listed")
    parser.add_argument(
        "which", nargs="*", metavar="NAME|HASH", help="name of a model or folder, or the first digits of a hash"
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    options = parser.parse_intermixed_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a folder's name may have letters that the terminal lacks
    if bool(options.action) != bool(options.which):
        parser.error("rm takes names or hashes")
    try:
        if options.action:
            remove(options.which, ask=not options.yes)
        else:
            show([*installed(), *cached()], as_json=options.json)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone; Python would complain again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {why_inaccessible(error)}", file=sys.stderr)
        return 1
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
