"""The bundle that commands use without --bundle: of the default pair, made once and kept in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rich.console import Console

from outrider import __version__
from outrider.cli.opening import CommandError
from outrider_core.cache import cache_dir, sha256_of, why_inaccessible
from outrider_core.drafting.bundle import FORMAT_VERSION, MANIFEST, BundleError
from outrider_core.models.drafter_arrays import CONFIG_FILE, WEIGHTS_FILE
from outrider_core.models.folders import default_drafter
from outrider_core.models.moa_config import DrafterError
from outrider_core.targets.bundle import TargetBundleError
from outrider_core.targets.source import DEFAULT_TARGET, TargetError, TargetSource

FOLDER = "bundles"
WAITING = "another process makes the default bundle; waiting for it"


def default_bundle(console: Console) -> Path:
    """The folder of the default bundle, which is made now unless it is there. Raises CommandError."""
    try:
        source = TargetSource.resolve(DEFAULT_TARGET)
        folder = _place(source)
        if not (folder / MANIFEST).is_file():
            _make(source, folder, console)
        return folder
    except (TargetError, TargetBundleError, DrafterError, BundleError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(why_inaccessible(error)) from None


def _place(source: TargetSource) -> Path:
    """Another release, target or drafter has another folder."""
    drafter = sha256_of([default_drafter() / name for name in (CONFIG_FILE, WEIGHTS_FILE)])
    parts = [__version__, str(FORMAT_VERSION), source.identity, *drafter]
    return cache_dir() / FOLDER / f"{source.name}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


def _make(source: TargetSource, folder: Path, console: Console) -> None:
    try:
        from cloud.telemetry.progress import Bar
        from export.bundle.bundle import write_bundle
        from export.bundle.bundle_options import BundleOptions
        from outrider_core.targets.cached import cached_target
        from outrider_core.targets.convert import alone
    except ImportError as error:
        raise CommandError(
            f"making the default bundle needs {error.name or error}; run: pip install 'outrider[local]', or name "
            "another bundle with --bundle"
        ) from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.with_name(f".{folder.name}.lock"), lambda: console.print(WAITING)):
        if (folder / MANIFEST).is_file():  # by the other process
            return
        with Bar(console) as bar:
            cached_target(source, bar.step, bar.waiting)
        console.print(f"making the default bundle in {folder}, once", soft_wrap=True)
        options = BundleOptions(target=source, output_dir=folder, understudy=source, compare=False)
        write_bundle(options, Console(quiet=True))
