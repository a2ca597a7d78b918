"""The protocol of stores.  Each verb is atomic, uses only the store's own clock, and may safely be sent twice."""

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
    """Selects the records to list; None matches all.  *lapsed* selects running records by whether their lease is over."""

    state: State | None = None
    scope: str | None = None
    key: str | None = None
    name: str | None = None
    lapsed: bool | None = None

    def __post_init__(self) -> None:
        # A misspelt state would find nothing, and an operator would believe that nothing is held.
        if self.state is not None and self.state not in get_args(State):
            known = ", ".join(map(repr, get_args(State)))
            raise ConfigurationError(f"state = {self.state!r} is unknown: choose one of {known}, or lapsed=True")

    def matches(self, record: Record) -> bool:
        """Whether the filter selects *record*, at the time of its read."""
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
    """Some records, and the *cursor* of the next page; None on the last page."""

    records: tuple[Record, ...]
    cursor: str | None


def token_of(cursor: str | None) -> int:
    """Return the token in a cursor of a store that lists records by their tokens; 0 for the first page."""
    if cursor and not re.fullmatch("[0-9]{1,18}", cursor):
        raise InvalidPayload(f"{cursor[:40]!r} is not a cursor: pass the cursor of a page that list() has returned")
    return int(cursor or 0)


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The number of records by state.  *lapsed* ones also count as running, *expired* ones also under their state."""

    running: int = 0
    settled: int = 0
    released: int = 0
    held: int = 0
    lapsed: int = 0
    expired: int = 0
    archived: int = 0


# A store raises these if it cannot write for now: it is down, it refuses the login, or its tables are missing.
STORE_FAILURES = (StoreError, ConfigurationError)


class TierCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The lookups of outcomes in Redis by this process, counted by result.

    *skipped* lookups were not made, because Redis or the primary was not known to be up.  *open* is true while Redis is not
    asked, because it has failed.
    """

    hits: int = 0
    misses: int = 0
    errors: int = 0
    skipped: int = 0
    open: bool = False


class Store(Protocol):
    """The records, and the verbs that read and write them.

    `claim` returns a Lease, or the Record that prevents it.  It also writes *request*; an empty one leaves the stored one
    unchanged.  `settle`, and `resolve` with an outcome, drop the stored request.

    `unclaim` undoes claims whose callers have gone, or whose answers were lost.  If a record is still running under the
    claim's holder, it becomes: lapsed, if the claim was a takeover; absent, if this was the first attempt; otherwise
    released, for a day.  Every other record stays unchanged, so `unclaim` may be sent twice, and late.

    `renew`, `settle`, `release` and `hold` raise Fenced if the lease is lost.
    """

    url: str  # as given, without its password
    wakeups: Wakeups  # notified when a record may have changed
    poll: float  # the longest time in seconds that a waiter relies on wake-ups alone
    shift: float  # the seconds added to the store's clock: 0, except in tests that let time pass

    @property
    def lender(self) -> TransactionSource | None: ...  # opens transactions for effects; None if the store has none

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
