"""The verifier's log: `from cloud import log; log.info("loaded", model=name)`.

Inside another program the verifier prints nothing by itself. If the program has configured structlog, events go there;
otherwise they go to the standard logger "cloud", which discards them until the program configures `logging`. `python -m
cloud.verifier` and the replicas of `python -m cloud.scale` call `write_to_stderr`.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

from cloud.settings import Settings
from cloud.telemetry.log_sink import LogSink

_sink: LogSink | None = None
_failed = 0
_standard = logging.getLogger("cloud")
_standard.addHandler(logging.NullHandler())  # else Python would print warnings and errors itself


def info(event: str, **values: object) -> None:
    """Log `event` with its values."""
    _log("info", event, values)


def warning(event: str, **values: object) -> None:
    """Log `event` as a warning."""
    _log("warning", event, values)


def error(event: str, **values: object) -> None:
    """Log `event` as an error."""
    _log("error", event, values)


def exception(event: str, **values: object) -> None:
    """Log `event` as an error, with the traceback of the exception being handled."""
    _log("exception", event, values)


def _log(method: str, event: str, values: dict[str, object]) -> None:
    """Log an event. Never raises: values that cannot be logged are dropped and counted."""
    global _failed
    try:
        if structlog.is_configured():
            getattr(structlog.get_logger(), method)(event, **values)
        else:
            getattr(_standard, method)("%s %s", event, values)
    except Exception:
        _failed += 1


def dropped() -> int:
    """Return how many lines of this process could not be logged: disk full, reader gone or stalled."""
    return _failed + (_sink.dropped if _sink is not None else 0)


def settle() -> None:
    """Wait, for at most a second, until all logged lines are written."""
    if _sink is not None:
        _sink.settle()


def write_to_stderr(settings: Settings) -> None:
    """Configure logging for a process that is a verifier and nothing else: it never blocks and never raises."""
    global _sink
    _sink = _sink or LogSink(sys.stderr.fileno())
    stream = cast(TextIO, _sink)
    console = sys.stderr.isatty()
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
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    # libraries' own warnings get the same form
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
