"""The running operation, as the code that performs it sees it."""

from __future__ import annotations

import hashlib

from .model import Lease, Operation


class Op:
    """What performs the operation is given this: its key, which attempt it is, and stable keys for providers."""

    __slots__ = ("lease", "note")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
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
