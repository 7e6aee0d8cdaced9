"""Pauses between the attempts to continue a stream."""

from __future__ import annotations

import time

PATIENCE_SECONDS = 30.0
BACKOFF_SECONDS = (0.02, 1.0)


class Attempts:
    """Pauses between attempts, until no message has come for the patience."""

    def __init__(self, routers: int, patience: float) -> None:
        self.routers = routers
        self.patience = patience
        self.failures = 0
        self.since: float | None = None

    def progress(self) -> None:
        """A message has come."""
        self.failures = 0
        self.since = None

    def failed(self) -> bool:
        """Waits for the next attempt; returns False if there is none."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        self.failures += 1
        least, most = BACKOFF_SECONDS
        pause = min(most, least * 2 ** min(self.failures - 1, 16))
        if now + pause > self.since + self.patience:
            return False
        # The next of several routers is tried at once.
        if self.failures >= self.routers:
            time.sleep(pause)
        return True
