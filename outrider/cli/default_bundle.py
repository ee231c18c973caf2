"""The bundle of commands without --bundle: of the default pair, made once and kept in the cache."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError

from outrider import __version__
from outrider.cli.opening import CommandError
from outrider_core.cache import cache_dir, hold, sha256_of, why_inaccessible
from outrider_core.drafting.bundle import FORMAT_VERSION, MANIFEST, Bundle, BundleError, open_bundle
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE
from outrider_core.models.folders import default_drafter
from outrider_core.models.moa_config import DrafterError
from outrider_core.targets.bundle import FORMAT_VERSION as TARGET_VERSION
from outrider_core.targets.bundle import MANIFEST_FILE, TargetBundleError
from outrider_core.targets.source import DEFAULT_TARGET, TargetError, TargetSource

FOLDER = "bundles"
WAITING = "another process makes the default bundle; waiting for it"
#: disk space of the default pair: the target's 8-bit copy, and the rest of the bundle, which links to that
COPY_BYTES, REST_BYTES = 198_000_000, 37_000_000


def open_default_bundle(console: Console) -> Bundle:
    """Open the default bundle, made now if it is missing. Raises CommandError."""
    with _in_one_line():
        source = TargetSource.resolve(DEFAULT_TARGET)
        folder = _place(source)
        if not (folder / MANIFEST).is_file():
            _make(source, folder, console)
        hold(folder)
        try:
            return open_bundle(folder)
        except BundleError as error:
            fault = str(error).partition("; ")[0]
            raise CommandError(f"{fault}; run: outrider models rm {folder.name}, then this again") from None


def find_default_bundle() -> Path | None:
    """Return the default bundle's folder if it has been made. Raises CommandError."""
    with _in_one_line():
        folder = _place(TargetSource.resolve(DEFAULT_TARGET))
        return folder if (folder / MANIFEST).is_file() else None


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Raise errors of target, drafter, bundle or cache as CommandError."""
    try:
        yield
    except (TargetError, TargetBundleError, DrafterError, BundleError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(why_inaccessible(error)) from None


def _place(source: TargetSource) -> Path:
    """Return the folder, which depends on release, target and drafter."""
    drafter = sha256_of([default_drafter() / name for name in (CONFIG_FILE, WEIGHTS_FILE)])
    parts = [__version__, f"{FORMAT_VERSION}.{TARGET_VERSION}", source.identity, *drafter]
    digest = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
    return cache_dir() / FOLDER / f"{source.shown_name}-{digest}"


def _make(source: TargetSource, folder: Path, console: Console) -> None:
    try:
        from cloud.telemetry.progress import Bar
        from export.bundle.bundle import write_bundle
        from export.bundle.bundle_options import BundleOptions
        from outrider_core.targets.cached import cached_target
        from outrider_core.targets.convert import REMEDY, alone
    except ImportError as error:
        raise CommandError(
            f"making the default bundle needs {error.name or error}; run: pip install 'outrider[local]', or name "
            "another bundle with --bundle"
        ) from None
    for place in (folder.parent, source.bundle_folder().parent):
        place.mkdir(parents=True, exist_ok=True)
    with alone(folder.with_name(f".{folder.name}.lock"), lambda: console.print(WAITING)):
        if (folder / MANIFEST).is_file():  # by the other process
            return
        copied = (source.bundle_folder() / MANIFEST_FILE).is_file()
        size = REST_BYTES + (0 if copied else COPY_BYTES)
        needed = 2 * size  # temporary files, before they are moved into place
        if (free := shutil.disk_usage(folder.parent).free) < needed:
            raise CommandError(
                f"{folder.parent} has {free / 1e6:.0f} MB free, and making the default bundle needs {needed / 1e6:.0f} "
                "MB; free some space there, or name another folder for the cache with OUTRIDER_CACHE"
            )
        console.print(f"making the default bundle in {folder}, once: {size / 1e6:.0f} MB", soft_wrap=True)
        options = BundleOptions(
            target=source, drafter=default_drafter(), output_dir=folder, understudy=source, compare=False
        )
        try:
            with Bar(console) as bar:
                cached_target(source, bar.step, bar.waiting)
            write_bundle(options, Console(quiet=True))
        except KeyboardInterrupt:
            console.print("interrupted; the next start continues from here")
            raise
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CommandError(f"{folder} cannot be made: {reason}; {REMEDY}") from None
