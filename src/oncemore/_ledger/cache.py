"""Keeps settled outcomes in this process: they do not change until they expire, so a replay need not ask the store."""

from __future__ import annotations

import threading
from collections import OrderedDict

import msgspec

from .._runtime.clock import Clock
from .._runtime.forks import reset_in_child
from .._runtime.wakeups import Id
from ..errors import ConfigurationError
from .model import Outcome

# An operator's delete in another process arrives as a message if the store sends any.  If not, this many seconds bound it.
LONGEST = 60.0
# The bytes that an entry takes beside its packed outcome: the dictionary's share, the key's tuple and the headers of its texts.
PER_ENTRY = 250


class Kept(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled outcome, and until when this process may trust it."""

    fingerprint: str
    outcome: Outcome
    until: float
    expires_at: float | None


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Kept).decode


class Cache:
    """The latest outcomes, within a limit of *most* bytes.  It measures durations and never reads the date.

    Outcomes are packed: the garbage collector need not look at bytes, and they do not scatter the objects of the requests
    that follow over the memory.
    """

    def __init__(self, clock: Clock, *, most: int = 32 * 1024 * 1024) -> None:
        if type(most) is not int or most < 0:
            raise ConfigurationError(f"cache = {most!r} is not a size: write a whole number of bytes, or 0 for none")
        self._monotonic = clock.monotonic
        self._most = most
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # for changes; a single look into the dictionary needs none
        self._entries: OrderedDict[Id, bytes] = OrderedDict()  # a plain dict takes long to find its oldest entry
        self._size = 0

    def get(self, id: Id) -> Kept | None:
        """Return the outcome of the operation *id*, if it is known and has not expired."""
        packed = self._entries.get(id)
        if packed is None:
            return None
        try:
            kept = decode(packed)
        except msgspec.ValidationError:  # the performer's outcome is not of its declared type: leave it to the store
            return None
        if kept.until <= self._monotonic():
            self.drop(id)
            return None
        return kept

    def put(self, id: Id, fingerprint: str, outcome: Outcome, *, remaining: float, expires_at: float | None) -> None:
        """Remember *outcome* for as long as the store keeps it, or for a minute, whichever is shorter."""
        until = self._monotonic() + (remaining if remaining < LONGEST else LONGEST)
        try:
            packed = encode((fingerprint, outcome, until, expires_at))
        except (TypeError, ValueError, OverflowError):  # not of its declared type, such as a status of 2**70
            self.drop(id)
            return
        size = _size_of(id, packed)
        with self._lock:
            self._remove(id)  # also if the new one is not kept: the old one is not true any more
            if size <= self._most // 16:  # a larger one would push out too many others
                self._entries[id] = packed
                self._size += size
            while self._size > self._most:
                self._remove(next(iter(self._entries)))

    def drop(self, id: Id | None) -> None:
        """Forget the operation *id*; all of them if it is None, because some may have been deleted unnoticed."""
        with self._lock:
            if id is None:
                self._entries.clear()
                self._size = 0
            else:
                self._remove(id)

    def _remove(self, id: Id) -> None:
        packed = self._entries.pop(id, None)
        if packed is not None:
            self._size -= _size_of(id, packed)


def _size_of(id: Id, packed: bytes) -> int:
    scope, key = id
    return len(scope) + len(key) + len(packed) + PER_ENTRY
