"""The types of the ledger: an operation, the lease of the caller that performs it, its record and its outcome."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import secrets
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from .._runtime.forks import reset_in_child
from ..errors import InvalidKey
from .states import HELD, RUNNING, State

Kind = Literal["response", "value", "error", "tombstone"]
UNREADABLE = (
    "unreadable record"  # the note of a record with an outcome that the store cannot read; a tombstone replaces it
)
Tier = Literal["process", "redis", "database"]  # where a stored outcome was found

# Objects of these classes are in no reference cycle, so the garbage collector need not visit them (`gc=False`).  Otherwise
# each of its runs would take longer.


class Operation(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One intended effect.  *scope* owns the *key*, which is the caller's name for it; *fingerprint* digests the request.

    *name* is the kind of operation (`refunds.create`).  *matches* tells whether a fingerprint that was stored under an older
    algorithm or secret is of this same request.  *issued_at* is the time of the key, if the caller tells it.  *unique* names
    the effect that must happen once whatever the key, such as an order to be paid.  *request* returns the request, for a
    completer that finishes the operation without its caller.  *giving_up* is true in the last attempt.
    """

    scope: str
    key: str
    fingerprint: str = ""
    name: str = ""
    matches: Callable[[str], bool] | None = None
    issued_at: float | None = None
    unique: str | None = None
    request: Callable[[], Any] | None = None
    giving_up: bool = False

    def __post_init__(self) -> None:
        # A database would store 5 as "5", and not find it again for 5: the effect would happen twice.
        if not isinstance(self.key, str) or not isinstance(self.scope, str):
            raise InvalidKey(f"scope {self.scope!r} and key {self.key!r} name an operation; both must be texts")

    @property
    def id(self) -> tuple[str, str]:
        return (self.scope, self.key)

    def same(self, stored: str) -> bool:
        """Whether the *stored* fingerprint is of this request.  An empty fingerprint, on either side, fits every request."""
        if stored == self.fingerprint or not stored or not self.fingerprint:
            return True
        return self.matches is not None and self.matches(stored)


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of an operation: an HTTP response, a function's value or error, or a tombstone if it is not kept."""

    kind: Kind = "value"
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def digest(self) -> str:
        """Return the hash of the body, for the audit."""
        return hashlib.sha256(self.body).hexdigest()


class Lease(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The right to perform *operation* until *expires_at* by the store's clock.  *token* grows with every claim.

    *lapsed* is true if an earlier attempt crashed, and may have taken effect.
    """

    operation: Operation
    token: int
    expires_at: float
    attempt: int = 1
    lapsed: bool = False


class Claim(msgspec.Struct, frozen=True, gc=False):
    """One call of a store's `claim`.  *holder* is its name, which no other claim of any process ever has."""

    operation: Operation
    holder: str
    lease: float
    request: bytes = b""


class Holder:
    """Makes a unique name for each claim of this process, so that the store recognises a claim that is sent again."""

    def __init__(self) -> None:
        self._reset()
        reset_in_child(self)  # a child must not repeat its parent's names

    def _reset(self) -> None:
        self._prefix = ""  # made at the first claim, to keep forks fast
        self._count = itertools.count(1)

    def next(self) -> str:
        """Return a name that no other claim ever has."""
        if not self._prefix:
            self._prefix = f"{platform.node()[:40]}:{os.getpid()}:{secrets.token_hex(4)}:"
        return f"{self._prefix}{next(self._count)}"


class Record(msgspec.Struct, frozen=True, gc=False):
    """The stored state of an operation.  All times are by the store's clock; *now* is the time of the read.

    *request* is the stored request, if the operation may have to be finished without its caller: a claim writes it, and
    `settle` drops it.  *tier* says where the record was read.
    """

    scope: str
    key: str
    name: str
    fingerprint: str
    state: State
    token: int
    holder: str
    attempts: int
    created_at: float
    lease_until: float
    now: float
    settled_at: float | None = None
    expires_at: float | None = None
    accessed_at: float | None = None
    outcome: Outcome | None = None
    response_hash: str = ""
    note: str = ""
    request: bytes = b""
    tier: Tier = "database"

    @property
    def id(self) -> tuple[str, str]:
        return (self.scope, self.key)

    @property
    def remaining(self) -> float:
        """The seconds of retention that were left when the record was read."""
        return (self.expires_at or self.now) - self.now


def state_of(record: Record | None, now: float | None = None) -> str:
    """Return the state by the store's clock, at *now* or when the record was read.

    Only settled and released records expire; only running records lapse.
    """
    if record is None:
        return "absent"
    now = record.now if now is None else now
    if record.state == RUNNING:
        return "lapsed" if record.lease_until <= now else RUNNING
    expired = record.expires_at is not None and record.expires_at <= now
    return "absent" if expired and record.state != HELD else record.state


encode_outcome = msgspec.msgpack.Encoder().encode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
