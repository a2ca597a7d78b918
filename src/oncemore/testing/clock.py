"""A clock for tests of leases and retention, without waiting."""

from __future__ import annotations

from .._ledger.store import Store


class Clock:
    """Moves the time by which *store* judges leases and retention.  The server's own clock does not change."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def advance(self, seconds: float) -> None:
        """Move the time forward by *seconds*, or back if they are negative."""
        self.store.shift += seconds
        self.store.wakeups.notify_all()  # outcomes that guards remember may have expired, and waiters look again
