"""The items of a batch: what each caller asks of the SQLite ledger, and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._ledger.model import Lease, Operation, Outcome, encode_outcome
from ..._runtime.wakeups import Id
from .statements import Row

if TYPE_CHECKING:
    from .batch import Batch

NO_RECORD: Id = ("", "")  # the id of an item that concerns no record in particular


class Item:
    """One caller's part of a batch.  *result* is what the caller gets; an exception is raised there."""

    __slots__ = ("id", "notifies", "result")

    def __init__(self, id: Id, *, notifies: bool) -> None:
        self.id = id
        self.notifies = notifies  # waiters of the record are woken
        self.result: Any = None


class Claim(Item):
    """Claim *operation*, under the name *holder*, for *lease* seconds."""

    __slots__ = ("holder", "lease", "operation", "request")

    def __init__(self, operation: Operation, lease: float, holder: str, request: bytes = b"") -> None:
        super().__init__(operation.id, notifies=False)
        self.operation = operation
        self.lease = lease
        self.holder = holder
        self.request = request


class Settle(Item):
    """Store the outcome of *held*; *row* has the values that are written."""

    __slots__ = ("held", "row")

    def __init__(self, held: Lease, outcome: Outcome, retention: float, audit: bool, note: str) -> None:
        super().__init__(held.operation.id, notifies=True)
        self.held = held
        status, data, digest = outcome.status, encode_outcome(outcome), outcome.digest()
        self.row: Row = (held.token, *self.id, retention, status, data, digest, note, int(audit))


class Change(Item):
    """Any other write, to one record or none: *apply* is called in the transaction."""

    __slots__ = ("apply",)

    def __init__(self, id: Id, apply: Callable[[Batch], Any], *, notifies: bool = False) -> None:
        super().__init__(id, notifies=notifies)
        self.apply = apply


def outcome_columns(outcome: Outcome) -> dict[str, Any]:
    """The columns that an outcome fills."""
    return {"status": outcome.status, "outcome": encode_outcome(outcome), "response_hash": outcome.digest()}
