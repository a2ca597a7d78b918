"""Keeps settled records in this process: they never change until they expire, so a replay needs no store."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from .bell import Id
from .clock import Clock
from .fork import reset_in_child
from .model import Outcome

# An operator's delete in another process is heard where the store sends messages; this bounds it where it does not.
LONGEST = 60.0


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A settled outcome, and until when this process may trust it."""

    fingerprint: str
    outcome: Outcome
    until: float
    expires_at: float | None
    size: int  # about how many bytes it takes


class Cache:
    """The latest outcomes, at most *most* bytes of them.  It counts durations, never dates."""

    def __init__(self, clock: Clock, *, most: int = 32 * 1024 * 1024) -> None:
        self._monotonic = clock.monotonic
        self._most = most
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._size = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Id, Kept] = OrderedDict()  # a plain dict takes long to find its oldest entry

    def get(self, id: Id) -> Kept | None:
        """The outcome of the operation *id*, where it is known and has not expired."""
        kept = self._entries.get(id)
        if kept is None:
            return None
        if kept.until <= self._monotonic():
            self.drop(id)
            return None
        return kept

    def put(self, id: Id, fingerprint: str, outcome: Outcome, *, remaining: float, expires_at: float | None) -> None:
        """Remember *outcome* for as long as it is kept in the store, or for a minute, whichever is shorter."""
        size = 512 + len(outcome.body)
        for name, value in outcome.headers:
            size += len(name) + len(value)
        kept = Kept(fingerprint, outcome, self._monotonic() + min(remaining, LONGEST), expires_at, size)
        with self._lock:
            self._forget(id)
            if size > self._most // 16:
                return
            self._entries[id] = kept
            self._size += size
            while self._size > self._most:
                self._size -= self._entries.popitem(last=False)[1].size

    def drop(self, id: Id) -> None:
        """Forget the operation *id*."""
        if id in self._entries:
            with self._lock:
                self._forget(id)

    def _forget(self, id: Id) -> None:
        kept = self._entries.pop(id, None)
        if kept is not None:
            self._size -= kept.size
