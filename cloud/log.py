"""The verifier's log: `from cloud import log; log.info("loaded", model=name)`.

Inside another program the verifier prints nothing by itself. Where the program has configured structlog, events go
there; otherwise they go to the standard logger "cloud", which discards them until the program configures `logging`.
`python -m cloud.verifier` and the replicas of `python -m cloud.scale` call `write_to_stderr`.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from cloud.settings import Settings

_standard = logging.getLogger("cloud")
_standard.addHandler(logging.NullHandler())  # else Python would print warnings and errors itself


def info(event: str, **values: object) -> None:
    """Log `event` with its values."""
    if structlog.is_configured():
        structlog.get_logger().info(event, **values)
    else:
        _standard.info("%s %s", event, values)


def error(event: str, **values: object) -> None:
    """Log `event` as an error."""
    if structlog.is_configured():
        structlog.get_logger().error(event, **values)
    else:
        _standard.error("%s %s", event, values)


def exception(event: str, **values: object) -> None:
    """Log `event` as an error, with the traceback of the exception being handled."""
    if structlog.is_configured():
        structlog.get_logger().exception(event, **values)
    else:
        _standard.exception("%s %s", event, values)


def write_to_stderr(settings: Settings) -> None:
    """Configure logging for a process that is a verifier and nothing else."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    level = getattr(logging, settings.log_level.upper())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper("iso"),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # libraries' own warnings come out in the same shape
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
