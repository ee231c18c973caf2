"""Open a bundle: the folder that `python -m export bundle` writes and an app ships."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2
import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider_core.chat.tokenizer import ChatTokenizer, open_chat_tokenizer
from outrider_core.protocol.rows import NO_ROWS, RowShape

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
#: folder of a bundle's understudy, which may be fetched later than the bundle
UNDERSTUDY_FOLDER = "understudy"

#: the server half, for a verifier; the manifest does not list it, so an app may leave it out
SERVER_HALF_FILE = "encoder.safetensors"

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class BundleError(RuntimeError):
    """The folder is not a usable bundle. The message is one line that says what to do."""


class FileEntry(Struct):
    sha256: str
    bytes: int


class Bounds(Struct, kw_only=True):
    """Limits of how closely an engine file must agree with the eager model for `export check` to pass (shares of 1)."""

    top1_agreement: float
    top4_agreement: float
    acceptance_ratio: float


class EngineEntry(Struct, kw_only=True):
    """An exported device half.

    quant: "fp32", "fp16", "int8" or "int4" (linears); embedding_bits: 32, 16, 8 or 4. step_bytes: weights that one
    draft step reads (linears and LM head). max_width: most tokens of one step. data: the file beside `file` with its
    weights, if they are separate.
    """

    file: str
    data: str | None = None
    quant: str
    embedding_bits: int
    step_bytes: int
    max_width: int
    bounds: Bounds


class UnderstudyEntry(Struct, kw_only=True):
    """A complete model in its own folder, which may arrive later than the bundle, or never.

    format: "onnx", a target bundle (`outrider_core.targets.bundle`). bits: of its linear layers. bytes: of all its
    files. source_hash: identity of the model it was made from. manifest_sha256: of its manifest, which has the hashes
    of its other files. barred: ids with a meaning only to this model, which it must not write.
    """

    folder: str
    name: str
    source_hash: str
    format: str
    bits: int
    bytes: int
    manifest_sha256: str
    barred: list[Natural] = []


class Manifest(Struct, kw_only=True):
    """manifest.json. Widths in values; hashes as outrider_core.models.target and outrider_core.models.moa define them.

    tokenizer_hash: sha256 of tokenizer.json. null_row_file: float32 [2 (K, V), ca_kv_heads, head_dim], the row that
    cross-attention always sees, or null for a drafter without one. confidence_temperature: see MoAConfig. versions: of
    the software that wrote the bundle. engines: of the drafter; if there are none, the bundle has no drafter, the
    fields that describe one have the defaults 0, "" and null, and the understudy drafts.
    """

    format_version: int
    target: str
    target_hash: str
    drafter_hash: str = ""
    vocab_size: Positive
    eos_ids: Annotated[list[int], Meta(min_length=1)]
    max_context: Positive
    hidden_size: Natural = 0
    sa_kv_heads: Natural = 0
    ca_kv_heads: Natural = 0
    head_dim: Natural = 0
    draft_vocab_size: Natural = 0
    draft_ids_file: str | None = None
    null_row_file: str | None = None
    confidence_temperature: Annotated[float, Meta(ge=0.05, le=20)] = 1.0  # the range that a drafter may have
    tokenizer_hash: str
    versions: dict[str, str]
    engines: dict[str, EngineEntry]
    files: dict[str, FileEntry]
    understudy: UnderstudyEntry | None = None

    @property
    def has_drafter(self) -> bool:
        return bool(self.engines)


@dataclass(frozen=True)
class SentenceEnds:
    """Tests whether a token ends a sentence or a line. Each is decoded on demand: a vocabulary would take long."""

    tokenizer: Tokenizer

    def __contains__(self, token: object) -> bool:
        text: str = self.tokenizer.decode([token]) if isinstance(token, int) else ""
        return "\n" in text or text.rstrip().endswith((".", "!", "?", "。"))


@dataclass(frozen=True)
class Bundle:
    """A checked bundle.

    draft_ids [draft_vocab] int64 maps the LM head's rows to target token ids, `NoDrafter`'s in a bundle without a
    drafter; null_row [2, kv_heads, head_dim].
    """

    folder: Path
    manifest: Manifest
    chat: ChatTokenizer
    draft_ids: NDArray[np.int64]
    null_row: NDArray[np.float32] | None

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.chat.tokenizer

    @property
    def row_shape(self) -> RowShape:
        manifest = self.manifest
        return RowShape(manifest.ca_kv_heads, manifest.head_dim) if manifest.has_drafter else NO_ROWS

    @property
    def has_understudy(self) -> bool:
        """Return whether there is an understudy that runs here. Nothing of it has been checked."""
        entry = self.manifest.understudy
        return entry is not None and entry.format == "onnx" and (self.folder / entry.folder / MANIFEST).is_file()

    @property
    def sentence_ends(self) -> SentenceEnds:
        """Tokens that end a sentence or a line."""
        return SentenceEnds(self.tokenizer)

    def path(self, name: str) -> Path:
        return self.folder / name

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def render_chat(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return token ids of a conversation (`role`, `content`) up to where the assistant's next turn begins.

        tools, `tool_calls` of assistants and role `tool`: see `ChatTokenizer.encode_chat`. Content is text: what looks
        like a special token in it is not one. Raises ValueError on a role that is not a plain name, BundleError if the
        template fails.
        """
        try:
            return self.chat.encode_chat(messages, tools)
        except jinja2.TemplateError as error:
            raise BundleError(f"{self.folder}: chat template failed: {error}") from None


def open_bundle(folder: str | Path, *, verify: bool = True) -> Bundle:
    """Open `folder`, checking format, completeness and (unless `verify` is False) every sha256.

    Raises BundleError with one clear line.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    named = {manifest.draft_ids_file} if manifest.draft_ids_file else set[str]()
    for engine in manifest.engines.values():
        named |= {engine.file, engine.data or engine.file}
    needed = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} | named
    if manifest.null_row_file:
        needed.add(manifest.null_row_file)
    if missing := sorted(needed - manifest.files.keys()):
        raise BundleError(f"{folder}/{MANIFEST} does not list {missing[0]}; export the bundle again")
    if manifest.understudy:
        _check_name(folder, manifest.understudy.folder)
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry, verify)
    draft_ids = _read_draft_ids(folder, manifest)
    null_row = _read_null_row(folder, manifest)
    try:
        chat = open_chat_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise BundleError(f"{error}; export the bundle again") from None
    return Bundle(folder, manifest, chat, draft_ids, null_row)


def _read_draft_ids(folder: Path, manifest: Manifest) -> NDArray[np.int64]:
    if not manifest.has_drafter and manifest.understudy:
        return np.zeros(1, np.int64)
    widths = manifest.hidden_size, manifest.sa_kv_heads, manifest.ca_kv_heads, manifest.head_dim
    if not (manifest.has_drafter and manifest.drafter_hash and all(widths) and manifest.draft_ids_file):
        raise BundleError(f"{folder}/{MANIFEST} describes neither a drafter nor an understudy; export the bundle again")
    draft_ids = np.fromfile(folder / manifest.draft_ids_file, "<u4").astype(np.int64)
    if len(draft_ids) != manifest.draft_vocab_size or draft_ids.max(initial=0) >= manifest.vocab_size:
        raise BundleError(f"{folder}/{manifest.draft_ids_file} does not fit the manifest; export the bundle again")
    return draft_ids


def _read_null_row(folder: Path, manifest: Manifest) -> NDArray[np.float32] | None:
    if manifest.null_row_file is None:
        return None
    values = np.fromfile(folder / manifest.null_row_file, "<f4")
    shape = (2, manifest.ca_kv_heads, manifest.head_dim)
    if values.size != np.prod(shape):
        raise BundleError(f"{folder}/{manifest.null_row_file} does not fit the manifest; export the bundle again")
    return values.reshape(shape)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(f"{folder}: no {MANIFEST} there; write a bundle with: python -m export bundle")
    try:
        raw: Any = msgspec.json.decode(path.read_bytes())
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if version != FORMAT_VERSION:
            raise BundleError(f"{path}: format {version}, this runtime reads {FORMAT_VERSION}; export again or update")
        return msgspec.convert(raw, Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{path} is broken: {error}; export the bundle again") from None


def _check_name(folder: Path, name: str) -> None:
    """Raise BundleError if the manifest names a file outside its folder."""
    if name in ("", "..") or Path(name).name != name:
        raise BundleError(f"{folder}/{MANIFEST} names {name!r}, which is not a plain file name")


def _check_file(folder: Path, name: str, entry: FileEntry, verify: bool) -> None:
    path = folder / name
    _check_name(folder, name)
    if not path.is_file():
        raise BundleError(f"{path} is missing; copy the whole folder or export again")
    if path.stat().st_size != entry.bytes:
        raise BundleError(f"{path} has {path.stat().st_size} bytes instead of {entry.bytes}; copy it again")
    if verify:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise BundleError(f"{path} differs from its sha256 in the manifest; copy it again")
