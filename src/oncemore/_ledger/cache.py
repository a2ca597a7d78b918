"""Keeps settled records in this process: they never change until they expire, so a replay needs no store."""

from __future__ import annotations

import struct
import threading
from array import array

import msgspec

from .._runtime.clock import Clock
from .._runtime.forks import reset_in_child
from .._runtime.wakeups import Id
from ..errors import ConfigurationError
from .model import Outcome

# An operator's delete in another process is heard where the store sends messages; this bounds it where it does not.
LONGEST = 60.0
# An outcome takes about four times this, so three of four slots are free, and two outcomes seldom meet in one.
PER_SLOT = 128
# So many of those that were asked for again are kept unpacked, if they take no more bytes than this.
AGAIN, BRIEF = 256, 16 * 1024
HEAD = struct.Struct("=qI")  # the hash of the id, and how many bytes follow


class Kept(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled outcome, and until when this process may trust it."""

    scope: str
    key: str
    fingerprint: str
    outcome: Outcome
    until: float
    expires_at: float | None


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Kept).decode


class Cache:
    """The latest outcomes, in a ring of at most *most* bytes.  It counts durations, never dates.

    Bytes, not objects: what stays behind of each request decides where the objects of the next ones lie, and many small
    ones that stay scatter them all over the memory.  The hash of an id leads to its slot, which says where in the ring the
    outcome is.  Where two meet in one slot the latest has it: the other is asked of the store again.
    """

    def __init__(self, clock: Clock, *, most: int = 32 * 1024 * 1024) -> None:
        if type(most) is not int or most < 0:
            raise ConfigurationError(f"cache = {most!r} is not a size: write a whole number of bytes, or 0 for none")
        self._monotonic = clock.monotonic
        self._most = most
        self._mask = (1 << max(10, (most // PER_SLOT).bit_length() - 1)) - 1
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._ring = bytearray(1)  # it grows; and nothing is at 0, which a free slot says
        self._written = 1  # counted on in every round, by which what was overwritten is known
        self._slots = array("Q")  # made for the first outcome: many a guard never has one
        self._again: dict[Id, Kept] = {}  # unpacked: who asks once more often asks several times

    def get(self, id: Id) -> Kept | None:
        """The outcome of the operation *id*, where it is known and has not expired."""
        kept = self._again.get(id)
        if kept is None:
            if not self._slots or not self._slots[hash(id) & self._mask]:
                return None
            kept = self._unpacked(id)
        if kept is not None and kept.until <= self._monotonic():
            self.drop(id)
            return None
        return kept

    def _unpacked(self, id: Id) -> Kept | None:
        tag = hash(id)
        with self._lock:
            place = self._slots[tag & self._mask]
            if not place or place + self._most < self._written:
                return None
            at = place % self._most
            found, length = HEAD.unpack_from(self._ring, at)
            if found != tag:
                return None
            try:
                kept = decode(self._ring[at + HEAD.size : at + HEAD.size + length])
            except msgspec.ValidationError:  # what could be written but is not of its type: the store knows what it is
                return None
            if (kept.scope, kept.key) != id:
                return None
            if length <= BRIEF:
                if len(self._again) >= AGAIN:
                    self._again.clear()
                self._again[id] = kept
        return kept

    def put(self, id: Id, fingerprint: str, outcome: Outcome, *, remaining: float, expires_at: float | None) -> None:
        """Remember *outcome* for as long as it is kept in the store, or for a minute, whichever is shorter."""
        until = self._monotonic() + (remaining if remaining < LONGEST else LONGEST)
        try:
            packed = encode((*id, fingerprint, outcome, until, expires_at))
        except (TypeError, ValueError, OverflowError):  # a key that is more than a text, or less: a lone surrogate
            self.drop(id)
            return
        tag, length = hash(id), len(packed)
        size = length + HEAD.size
        with self._lock:
            if id in self._again:
                del self._again[id]
            if not self._slots:
                self._slots = array("Q", bytes(8 * (self._mask + 1)))
            if size > self._most // 16:
                self._slots[tag & self._mask] = 0
                return
            place = self._written
            at = place % self._most
            if at + size > self._most:  # it is not broken over the ring's end
                place, at = place + self._most - at, 0
            self._ring[at : at + size] = HEAD.pack(tag, length) + packed
            self._slots[tag & self._mask] = place
            self._written = place + size

    def drop(self, id: Id | None) -> None:
        """Forget the operation *id*; all of them where it is None: some may have been deleted, and nobody heard of it."""
        if id is None:
            self._drop_all()
            return
        slot = hash(id) & self._mask
        if not self._slots or not (self._slots[slot] or id in self._again):
            return
        with self._lock:
            self._again.pop(id, None)
            self._slots[slot] = 0

    def _drop_all(self) -> None:
        with self._lock:
            self._again.clear()
            # Of the same size, for others look into it without the lock.
            self._slots = array("Q", bytes(8 * len(self._slots)))
