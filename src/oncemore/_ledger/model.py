"""The nouns of the ledger: an operation is asked for, a lease lets one caller perform it, a record remembers it."""

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
UNREADABLE = "unreadable record"  # the note of a record whose outcome a store cannot read; it is shown as a tombstone
Tier = Literal["process", "redis", "database"]  # where a stored outcome was found

# None of these can be part of a cycle, so the garbage collector need not look at them (`gc=False`): a cache full of
# outcomes would otherwise make each of its runs longer.


class Operation(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One intended effect.  *scope* owns the name, *key* is the caller's name, *fingerprint* digests what was asked.

    *name* is the kind of operation (`refunds.create`).  *matches* tells whether a fingerprint stored under an older
    algorithm or secret means this same request.  *issued_at* dates the key, if the caller tells.  *unique* is what must
    happen once whatever the key: one payment per order.  *request* returns the request, for a completer that may have to
    finish it without the caller; *giving_up* says that this is the last attempt.
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
        # A database would take 5 for "5", and then not know it again: it would happen twice.
        if not isinstance(self.key, str) or not isinstance(self.scope, str):
            raise InvalidKey(f"scope {self.scope!r} and key {self.key!r} name an operation; both must be texts")

    @property
    def id(self) -> tuple[str, str]:
        return (self.scope, self.key)

    def same(self, stored: str) -> bool:
        """Whether the stored fingerprint is of this request; an empty one compares with nothing."""
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
        """The hash of the response, for the audit."""
        return hashlib.sha256(self.body).hexdigest()


class Lease(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The right to perform *operation* until *expires_at* by the store's clock; *token* only ever grows.

    *lapsed* says that an earlier attempt crashed: whether its effect happened is not known.
    """

    operation: Operation
    token: int
    expires_at: float
    attempt: int = 1
    lapsed: bool = False


class Claim(msgspec.Struct, frozen=True, gc=False):
    """One call of a store's `claim`.  *holder* names it: no other claim, of any process, ever has the same name."""

    operation: Operation
    holder: str
    lease: float
    request: bytes = b""


class Holder:
    """Names each claim of this process: if the answer to a claim was lost, the claim can be sent again, and is recognised."""

    def __init__(self) -> None:
        self._reset()
        reset_in_child(self)  # which must not repeat its parent's names

    def _reset(self) -> None:
        self._prefix = ""  # not yet: a process that has just been forked has other things to do
        self._count = itertools.count(1)

    def next(self) -> str:
        """A name that no other claim has, nor will have."""
        if not self._prefix:
            self._prefix = f"{platform.node()[:40]}:{os.getpid()}:{secrets.token_hex(4)}:"
        return f"{self._prefix}{next(self._count)}"


class Record(msgspec.Struct, frozen=True, gc=False):
    """The stored state of an operation.  All times are the store's; *now* is when it was read.

    *request* is what was asked, if the operation may have to be finished without its caller: it is written by the claim
    and dropped when the operation is settled.  *tier* is where it was read from.
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
        """Seconds of retention left when it was read."""
        return (self.expires_at or self.now) - self.now


def state_of(record: Record | None, now: float | None = None) -> str:
    """The state as the store's clock sees it, when the record was read or at *now*.

    Only settled and released records expire; only running ones lapse.
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
