"""Let time pass for a store without waiting for it."""

from __future__ import annotations

from .._ledger.store import Store


class Clock:
    """Moves the clock by which *store* judges leases and retention; the server's own is left alone."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass (or, with a negative number, have the clock set back)."""
        self.store.shift += seconds
