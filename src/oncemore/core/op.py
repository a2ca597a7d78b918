"""The running operation, as the code that performs it sees it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .model import Lease, Operation

if TYPE_CHECKING:
    from .lending import Transaction


class Op:
    """What performs the operation is given this: its key, which attempt it is, and stable keys for providers."""

    __slots__ = ("deadline", "lease", "note", "transaction")

    def __init__(self, lease: Lease, *, transaction: Transaction | None = None, deadline: float | None = None) -> None:
        self.lease = lease
        self.transaction = transaction
        self.deadline = deadline  # when the caller stops waiting, in seconds since 1970; None where it did not say
        self.note = ""  # kept in the record, for whoever reads the ledger

    @property
    def operation(self) -> Operation:
        return self.lease.operation

    @property
    def key(self) -> str:
        return self.lease.operation.key

    @property
    def attempt(self) -> int:
        """1 for the first attempt; it grows with every claim of the same operation."""
        return self.lease.attempt

    @property
    def connection(self) -> Any:
        """The driver's own connection, borrowed: what is done on it commits with the outcome, or not at all."""
        return self.borrowed("op.connection").connection

    def session(self) -> Any:
        """A SQLAlchemy session within the same transaction; its own commit() only ends a savepoint."""
        return self.borrowed("op.session()").session()

    def borrowed(self, what: str) -> Transaction:
        """The transaction that *what* needs."""
        if self.transaction is None:
            raise ConfigurationError(f"{what} is there with effect = 'transaction' only; say so in the rule or policy")
        return self.transaction

    def derive(self, name: str) -> str:
        """A key for the provider: the same on every attempt of this operation, and never the caller's own."""
        return derive(self.lease.operation, name)


def derive(operation: Operation, name: str) -> str:
    """The key for *name* within *operation*: stable, unguessable only as far as the operation's own key is."""
    digest = hashlib.sha256()
    for part in (operation.scope, operation.key, name):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return "om_" + digest.hexdigest()[:40]
