"""The protocol of stores.  Each verb is atomic, compares only the store's own clock, and may safely be sent twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, get_args

import msgspec

from .._runtime.plan import Plan
from .._runtime.wakeups import Wakeups
from ..errors import ConfigurationError, InvalidPayload, StoreError
from .model import Claim, Lease, Operation, Outcome, Record
from .states import State
from .transactions import TransactionSource


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which records to list; a None matches all.  *lapsed* asks for running records with a lease that has ended."""

    state: State | None = None
    scope: str | None = None
    key: str | None = None
    name: str | None = None
    lapsed: bool | None = None

    def __post_init__(self) -> None:
        # With a misspelt state nothing would be found, and an operator would think that nothing is held.
        if self.state is not None and self.state not in get_args(State):
            known = ", ".join(map(repr, get_args(State)))
            raise ConfigurationError(f"state = {self.state!r} is unknown: choose one of {known}, or lapsed=True")

    def matches(self, record: Record) -> bool:
        """Whether *record* is to be listed, at the time when it was read."""
        lapsed = record.state == "running" and record.lease_until <= record.now
        wanted = (
            (self.state, record.state),
            (self.scope, record.scope),
            (self.key, record.key),
            (self.name, record.name),
            (self.lapsed, lapsed),
        )
        return all(want is None or want == actual for want, actual in wanted)


class Page(msgspec.Struct, frozen=True):
    """Some records, and the *cursor* that continues the list; None at its end."""

    records: tuple[Record, ...]
    cursor: str | None


def token_of(cursor: str | None) -> int:
    """The token of the last record of a page, if records are listed by their tokens; 0 for the first page."""
    if cursor and not re.fullmatch("[0-9]{1,18}", cursor):
        raise InvalidPayload(f"{cursor[:40]!r} is not a cursor that list() has given")
    return int(cursor or 0)


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """How many records there are.  *lapsed* ones are also counted as running, *expired* ones under their state."""

    running: int = 0
    settled: int = 0
    released: int = 0
    held: int = 0
    lapsed: int = 0
    expired: int = 0
    archived: int = 0


# A store raises these if it cannot write for now: it is down, or refuses the login, or the tables are not there.
STORE_FAILURES = (StoreError, ConfigurationError)


class TierCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a process has looked for copies of outcomes in Redis, and what came of it.

    *skipped* looks were not made, because Redis or the primary was not known to be there; *open* says that Redis is left
    alone for now, because it has failed.
    """

    hits: int = 0
    misses: int = 0
    errors: int = 0
    skipped: int = 0
    open: bool = False


class Store(Protocol):
    """A ledger.

    `claim` answers with a Lease (the caller's own) or with the Record that prevents it.  It also writes *request*, what
    was asked; an empty one leaves the stored one as it is.  `settle` and a resolution with an outcome drop the request.

    `unclaim` undoes claims of callers that are gone: they were cancelled, or the answer was lost.  A record that is still
    running under the claim's holder goes back to what it was: in doubt, if the claim took over a lapsed lease (it is
    running, and its lease ends now); absent, if this was the first attempt; otherwise released, and remembered for a day.
    Every other record stays as it is, so that `unclaim` may be sent twice, and late.

    `renew`, `settle`, `release` and `hold` raise Fenced if the lease is lost.
    """

    url: str  # as given, without its password
    wakeups: Wakeups  # notified when a record may have changed
    poll: float  # the longest that a waiter trusts wake-ups alone, in seconds
    shift: float  # added to the store's clock: 0, except in tests that let time pass

    @property
    def lender(self) -> TransactionSource | None: ...  # for effects that join a transaction; None if the store has none

    def claim(self, operation: Operation, *, lease: float, request: bytes = b"") -> Plan[Lease | Record]: ...
    def unclaim(self, claims: Sequence[Claim]) -> Plan[None]: ...
    def renew(self, held: Lease, *, lease: float) -> Plan[Lease]: ...
    def settle(
        self, held: Lease, outcome: Outcome, *, retention: float, audit: bool = False, note: str = ""
    ) -> Plan[None]: ...
    def release(self, held: Lease, *, retention: float) -> Plan[None]: ...
    def hold(self, held: Lease, *, note: str = "") -> Plan[None]: ...
    def touch(self, record: Record, *, retention: float) -> Plan[None]: ...
    def watch(self, record: Record) -> Plan[None]: ...

    def find(self, scope: str, key: str) -> Plan[Record | None]: ...
    def list(self, where: Filter, *, limit: int = 100, cursor: str | None = None) -> Plan[Page]: ...
    def resolve(
        self, scope: str, key: str, outcome: Outcome | None, *, retention: float, note: str = ""
    ) -> Plan[Record]: ...
    def delete(self, scope: str, key: str) -> Plan[bool]: ...
    def purge(self, *, batch: int = 1000) -> Plan[int]: ...
    def stats(self) -> Plan[Stats]: ...

    def close(self) -> None: ...
    async def aclose(self) -> None: ...
