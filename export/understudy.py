"""Put an understudy into a bundle: a complete model with the target's vocabulary, for writing without a link."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from outrider_core.drafting.bundle import UNDERSTUDY_FOLDER, BundleError, UnderstudyEntry
from outrider_core.models.identity import model_identity
from outrider_core.models.target import eos_ids_of, find_source
from outrider_core.targets.bundle import MANIFEST_FILE, TargetBundleError, open_target_bundle
from outrider_core.targets.convert import make_target_bundle

#: bits of its linear layers
BITS = 8


def write_understudy(
    name: str, bundle: Path, max_context: int, done: Callable[[int, int], None] = lambda layer, layers: None
) -> UnderstudyEntry:
    """Lower the model `name` (alias, Hugging Face id or folder) into the bundle's folder for it.

    An interrupted call goes on where it stopped. done(layer, layers): after every layer. Raises BundleError and
    TargetError.
    """
    source = find_source(name)
    identity = model_identity(source)
    eos_ids = eos_ids_of(source) if source.is_dir() else ()
    folder = bundle / UNDERSTUDY_FOLDER
    shown = Path(name).name if Path(name).is_dir() else name
    _clear(folder, identity)
    try:
        model = make_target_bundle(shown, source, identity, folder, max_context, eos_ids, done)
    except TargetBundleError as error:
        raise BundleError(f"--understudy {name}: {error}") from None
    if model.max_positions < max_context:
        raise BundleError(
            f"--understudy {name} reads {model.max_positions} tokens at most, and the bundle is for {max_context}; "
            f"export with --max-context {model.max_positions}, or choose another understudy"
        )
    if _vocabulary(folder) != _vocabulary(bundle):
        raise BundleError(f"--understudy {name} has another vocabulary than the target; an understudy needs the same")
    (bundle / f".{UNDERSTUDY_FOLDER}.lock").unlink(missing_ok=True)
    manifest = (folder / MANIFEST_FILE).read_bytes()
    return UnderstudyEntry(
        folder=UNDERSTUDY_FOLDER,
        name=shown,
        source_hash=identity,
        format="onnx",
        bits=BITS,
        bytes=sum(path.stat().st_size for path in folder.iterdir()),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
    )


def _clear(folder: Path, identity: str) -> None:
    """Remove what an interrupted export with another understudy left."""
    for aside in folder.parent.glob(f".{folder.name}.*.partial"):
        if aside.name != f".{folder.name}.{identity}.partial":
            shutil.rmtree(aside)
    if folder.is_dir():
        try:
            kept = open_target_bundle(folder).source_hash == identity
        except TargetBundleError:
            kept = False
        if not kept:
            shutil.rmtree(folder)


def _vocabulary(folder: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return vocabulary
