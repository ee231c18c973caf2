"""From options to what they name: the verifier, in this process or elsewhere, and the runtime that uses it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from rich.console import Console

from edge_runtime.link.transport import LinkMaker
from edge_runtime.options import Pinned, RuntimeOptions
from edge_runtime.runtime import EdgeRuntime
from outrider.cli.options import CallOptions
from outrider_core.drafting.bundle import Bundle


class CommandError(RuntimeError):
    """The command cannot run as it was asked to. One line that says what to do."""


def open_server(options: CallOptions, bundle: Bundle) -> AbstractContextManager[str | LinkMaker | None]:
    """What --server or --local names; entered, it answers. Raises CommandError."""
    if options.local is None:
        return nullcontext(options.device.server)
    try:
        from cloud.telemetry.progress import Bar
        from outrider.local import LocalVerifier, log_errors_only
        from outrider_core.models.moa_config import DrafterError
        from outrider_core.targets.source import TargetError
    except ImportError as error:
        missing = error.name or error
        raise CommandError(f"--local needs {missing}, which is not here; run: pip install 'outrider[local]'") from None
    log_errors_only()
    local = options.local
    try:
        dtype, threads = local.dtype or "auto", options.device.threads
        with Bar(Console(stderr=True), "loading the target") as bar:
            return LocalVerifier.load(bundle, local.target, local.drafter, dtype=dtype, threads=threads, progress=bar)
    except (TargetError, DrafterError) as error:
        raise CommandError(str(error)) from None


def open_runtime(options: CallOptions, bundle: Bundle, server: str | LinkMaker | None) -> EdgeRuntime:
    device = options.device
    return EdgeRuntime(
        bundle,
        server,
        RuntimeOptions(
            policy=options.policy,
            engine=device.engine,
            threads=device.threads,
            shape=options.shape,
            lookup=options.lookup,
            token=device.token,
            ca_file=device.ca_file,
        ),
        Pinned(mode=options.mode),
    )
