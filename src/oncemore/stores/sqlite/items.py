"""What callers ask of the SQLite ledger: each item goes into a flight, and comes back with its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._ledger.model import Lease, Operation, Outcome, encode_outcome
from ..._runtime.wakeups import Id
from .statements import Row

if TYPE_CHECKING:
    from .batch import Flight

NO_RECORD: Id = ("", "")  # the id of what concerns none in particular


class Item:
    """What one caller asks, and its *answer*.  *rings*: it may wake those who wait."""

    __slots__ = ("answer", "id", "rings")

    def __init__(self, id: Id, *, rings: bool) -> None:
        self.id = id
        self.rings = rings
        self.answer: Any = None


class Claim(Item):
    """An ask for *operation*, under the name *holder*."""

    __slots__ = ("holder", "lease", "operation")

    def __init__(self, operation: Operation, lease: float, holder: str) -> None:
        super().__init__(operation.id, rings=False)
        self.operation = operation
        self.lease = lease
        self.holder = holder


class Settle(Item):
    """An ask to keep the outcome of *held*; *row* is what will be written."""

    __slots__ = ("held", "row")

    def __init__(self, held: Lease, outcome: Outcome, retention: float, audit: bool, note: str) -> None:
        super().__init__(held.operation.id, rings=True)
        self.held = held
        status, data, digest = outcome.status, encode_outcome(outcome), outcome.digest()
        self.row: Row = (held.token, *self.id, retention, status, data, digest, note, audit)


class Change(Item):
    """Any other ask, about one record or none: *apply* is called within the transaction."""

    __slots__ = ("apply",)

    def __init__(self, id: Id, apply: Callable[[Flight], Any], *, rings: bool = False) -> None:
        super().__init__(id, rings=rings)
        self.apply = apply


def kept(outcome: Outcome) -> dict[str, Any]:
    """The columns that an outcome fills."""
    return {"status": outcome.status, "outcome": encode_outcome(outcome), "response_hash": outcome.digest()}
