"""Tell the user in time that the server is unreachable, and why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from edge_runtime.runtime import EdgeRuntime

#: seconds without a first connection after which the reason is shown
NOTICE_SECONDS = 3.0
LOOK_SECONDS = 0.1


class Reach:
    """Watches the link of a runtime for a user. server: as the user wrote it; None: there is nothing to watch.

    give_up: seconds without a connection after which an answer ends; None: the runtime's patience decides.
    flag: the one that sets it, for the notice; "" if the command has none.
    """

    def __init__(
        self,
        runtime: EdgeRuntime,
        server: str | None,
        tell: Callable[[str], None],
        give_up: float | None = None,
        flag: str = "",
    ) -> None:
        self._runtime, self._server, self._tell, self._give_up = runtime, server, tell, give_up
        self._hint = f" ({flag})" if flag else ""
        self._told = False
        self.gave_up = False

    @property
    def advice(self) -> str:
        """Return address, reason and what to do, in one line."""
        reason = self._runtime.link_error or "it does not answer"
        return f"no verdict from {self._server}: {reason}; run: outrider doctor --server {self._server}"

    @property
    def _patience(self) -> str:
        seconds = self._runtime.patience.offline if self._give_up is None else self._give_up
        return f"an answer that cannot continue without it waits {seconds:g} s at most{self._hint}"

    async def watch(self, stopped: asyncio.Event) -> None:
        """During an answer, report once what is wrong, and set `stopped` if the answer should end."""
        self.gave_up = False
        link, since = self._runtime.link, time.monotonic()
        while self._server is not None and link is not None:
            now = time.monotonic()
            if link.welcome:
                since, self._told = now, True  # from here on the answer's state shows the link's
            if not self._told and (now - since >= NOTICE_SECONDS or self._runtime.link_refused):
                self._told = True
                self._tell(self.advice if self._runtime.link_refused else f"{self.advice}; {self._patience}")
            if self._give_up is not None and now - since >= self._give_up:
                self.gave_up = True
                stopped.set()
                return
            await asyncio.sleep(LOOK_SECONDS)
