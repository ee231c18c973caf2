"""Open the verifier that options name, in this process or elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from rich.console import Console

from edge_runtime.link.transport import LinkMaker
from outrider.cli.options import WritingOptions
from outrider_core.drafting.bundle import Bundle


class CommandError(RuntimeError):
    """The command cannot run as requested. One line that says what to do."""


def open_server(options: WritingOptions, bundle: Bundle) -> AbstractContextManager[str | LinkMaker | None]:
    """Return the verifier of --server or --local, as a context. Raises CommandError."""
    if not options.in_process:
        return nullcontext(options.server)
    try:
        from cloud.telemetry.progress import Bar
        from outrider.local import LocalVerifier, log_errors_only
        from outrider_core.models.moa_config import DrafterError
        from outrider_core.targets.source import TargetError
    except ImportError as error:
        missing = error.name or error
        raise CommandError(
            f"the full model in this process needs {missing}; run: pip install 'outrider[local]', or name a --server"
        ) from None
    log_errors_only()
    try:
        dtype, threads = options.dtype or "auto", options.threads
        with Bar(Console(stderr=True), "loading the target") as bar:
            return LocalVerifier.load(
                bundle, options.model, options.drafter, dtype=dtype, threads=threads, progress=bar
            )
    except (TargetError, DrafterError) as error:
        raise CommandError(str(error)) from None
