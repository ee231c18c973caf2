"""The options of `export target`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from export.options import argument, option
from outrider_core.arguments import positive_int
from outrider_core.targets.source import TargetSource


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """See `export target --help`."""

    target: TargetSource = argument("alias, Hugging Face id, folder or GGUF file", parse=str, open=TargetSource.resolve)
    output_dir: Path = argument("folder to write; replaced if it is such a bundle", positional=False)
    bits: int = option(8, "of the weights; 32 is float32", choices=(4, 8, 32))
    calibrate: bool = option(
        False, "calibrate 8-bit weights on the target's own answers (GPTQ); 4-bit weights always are"
    )
    prompts: tuple[Path, ...] = option((), "prompts for the comparison with float32; default: a fixed set", "FILE")
    answer_tokens: int = option(64, "most tokens of each of its answers", parse=positive_int)
    compare: bool = option(True, "skip the comparison: report no quality")
    dry_run: bool = option(False, "show sizes, memory and time needed, write nothing")

    @property
    def calibrated(self) -> bool:
        """Return whether weights are rounded by their layers' inputs."""
        return self.bits == 4 or (self.calibrate and self.bits == 8)
