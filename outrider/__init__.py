"""Outrider: a device drafts, the cloud verifies, and the answer never stops.

    from outrider import EdgeRuntime

    async with EdgeRuntime.from_bundle("build/bundle", server="ws://127.0.0.1:8765") as runtime:
        async for event in runtime.generate("Why is the sky blue?"):
            print(event.verified, event.provisional)

Names are imported on first use: `import outrider` loads no engine, no torch and no network module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.hidden import hidden_package

if TYPE_CHECKING:
    from edge_runtime.answer.threads import DrafterFailed
    from edge_runtime.blocking import BlockingRuntime
    from edge_runtime.context import ConversationTooLong, FittedMessages
    from edge_runtime.events import (
        Adopted,
        AnswerStats,
        Event,
        Finished,
        HandedOver,
        LinkState,
        Provisional,
        RolledBack,
        Verified,
    )
    from edge_runtime.link.events import EngineFailed, LinkRefused
    from edge_runtime.options import Pinned, RuntimeOptions
    from edge_runtime.runtime import EdgeRuntime
    from edge_runtime.session.policy import Policy
    from edge_runtime.session.timeouts import Patience
    from outrider.local import LocalVerifier
    from outrider_core.drafting.bundle import Bundle, BundleError, open_bundle
    from outrider_core.drafting.drafter import TreeShape

__version__ = "0.3.0"

#: public name -> the module it comes from
_HOMES = {
    "Adopted": "edge_runtime.events",
    "AnswerStats": "edge_runtime.events",
    "BlockingRuntime": "edge_runtime.blocking",
    "Bundle": "outrider_core.drafting.bundle",
    "BundleError": "outrider_core.drafting.bundle",
    "ConversationTooLong": "edge_runtime.context",
    "DrafterFailed": "edge_runtime.answer.threads",
    "EdgeRuntime": "edge_runtime.runtime",
    "EngineFailed": "edge_runtime.link.events",
    "Event": "edge_runtime.events",
    "Finished": "edge_runtime.events",
    "HandedOver": "edge_runtime.events",
    "FittedMessages": "edge_runtime.context",
    "LinkRefused": "edge_runtime.link.events",
    "LinkState": "edge_runtime.events",
    "LocalVerifier": "outrider.local",
    "Patience": "edge_runtime.session.timeouts",
    "Pinned": "edge_runtime.options",
    "Policy": "edge_runtime.session.policy",
    "Provisional": "edge_runtime.events",
    "RolledBack": "edge_runtime.events",
    "RuntimeOptions": "edge_runtime.options",
    "TreeShape": "outrider_core.drafting.drafter",
    "Verified": "edge_runtime.events",
    "open_bundle": "outrider_core.drafting.bundle",
}

__all__ = [
    "Adopted",
    "AnswerStats",
    "BlockingRuntime",
    "Bundle",
    "BundleError",
    "ConversationTooLong",
    "DrafterFailed",
    "EdgeRuntime",
    "EngineFailed",
    "Event",
    "Finished",
    "FittedMessages",
    "HandedOver",
    "LinkRefused",
    "LinkState",
    "LocalVerifier",
    "Patience",
    "Pinned",
    "Policy",
    "Provisional",
    "RolledBack",
    "RuntimeOptions",
    "TreeShape",
    "Verified",
    "__version__",
    "open_bundle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ImportError as error:
        if reason := hidden_package(error):
            raise ImportError(reason) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
