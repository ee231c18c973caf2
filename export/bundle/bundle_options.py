"""The options of `export bundle`, `check` and `bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from export.options import argument, check_bounds, commas, option, target_option
from outrider_core.arguments import positive_int, positive_ints
from outrider_core.targets.source import TargetError, TargetSource


def open_understudy(name: str) -> TargetSource:
    """Resolve the model of `--understudy`. Raises TargetError."""
    try:
        return TargetSource.resolve(name)
    except TargetError as error:
        raise TargetError(f"--understudy {error}") from None


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """See `export bundle --help`. Raises OptionsError if a value is not one of its choices."""

    target: TargetSource = target_option("alias, Hugging Face id or folder")
    drafter: Path | None = option(
        None,
        "folder that `train` or `import` wrote; default: the installed one that was trained on the target. Without "
        "one, the understudy drafts",
        parse=Path,
    )
    output_dir: Path = argument("folder to write; replaced if it is a bundle", positional=False)
    format: tuple[str, ...] = option(("onnx",), "engine files, by commas: onnx, executorch", parse=commas, many=False)
    quant: str = option(
        "int8",
        "weights of linear layers (8da8w, 8da4w: ExecuTorch's names of int8, int4)",
        choices=("fp32", "fp16", "int8", "int4", "8da8w", "8da4w", "none"),
    )
    embedding_bits: int | None = option(
        None, "embedding and LM head; default: as --quant, 8 with int4", parse=int, choices=(4, 8, 16, 32)
    )
    understudy: TargetSource | None = option(
        None,
        "a complete small model with the target's vocabulary (alias, Hugging Face id, folder, GGUF file, or what "
        "`export target` wrote), which writes while there is no link; it gets a separate folder, and an app may "
        "fetch it later",
        "MODEL",
        parse=str,
        open=open_understudy,
    )
    understudy_bits: int = option(8, "of its weights; 4 is about half the download", choices=(4, 8))
    max_context: int | None = option(
        None, "longest conversation, at most the drafter's; default: that, or 4,096 without a drafter", parse=int
    )
    backend: str = option("xnnpack", "what ExecuTorch delegates to", choices=("xnnpack", "coreml", "qualcomm"))
    compare: bool = option(True, "do not compare with the eager model, as is done where torch is installed")
    check: bool = option(False, "also measure acceptance length, as `check` does")
    bench: bool = option(False, "also measure step times, as `bench` does")
    dry_run: bool = option(False, "show sizes and memory needed, write nothing")

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """See `export check --help`."""

    bundle: Path = argument("folder that `bundle` wrote")
    drafter: Path | None = option(None, "default: the one under drafters/ with its hash")
    target: TargetSource | None = option(
        None, "default: the name in the manifest", parse=str, open=TargetSource.resolve
    )
    prompts: tuple[Path, ...] = option((), "measure acceptance on these instead of the fixed set", "FILE")
    acceptance: bool = option(True, "hashes, metadata and parity only: no verifier")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """See `export bench --help`."""

    bundle: Path = argument("folder that `bundle` wrote")
    engines: tuple[str, ...] | None = option(None, "by commas; default: all in the bundle that run here", parse=commas)
    threads: tuple[int, ...] | None = option(None, "default: 1 and all cores", "N,N", parse=positive_ints)
    widths: tuple[int, ...] = option(
        (1, 2, 4, 8, 16, 32, 64), "tokens of one step", "N,N", parse=positive_ints, many=False
    )
    contexts: tuple[int, ...] = option(
        (128, 512, 1024, 2048), "cache and feature rows", "N,N", parse=positive_ints, many=False
    )
    repeats: int = option(30, "timed steps for each figure", parse=positive_int)
