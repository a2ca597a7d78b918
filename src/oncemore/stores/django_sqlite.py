"""Django's SQLite connections: one for each thread, and one writer at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .._ledger.store import Store
from .._ledger.transactions import Do, at_once
from .._runtime.plan import Plan
from .django import AtomicLoan, do
from .sqlite import connect, url_of
from .sqlite.desk import Enlisted, ThreadDesk

T = TypeVar("T")


def store_of(alias: str, database: Any, options: Mapping[str, str]) -> Store:
    """The ledger in the file with this alias."""
    store = connect(url_of(str(database.settings_dict["NAME"]), options))
    path = store.path
    store.lender = Enlisted(store, threads=lambda: AtomicDesk(alias, path))
    return store


class AtomicDesk(ThreadDesk):
    """Where the threads' connections are lent: each its own, one at a time."""

    def __init__(self, alias: str, path: str) -> None:
        super().__init__(path)
        self.alias = alias
        self.loan = AtomicLoan(alias)

    def do(self, work: Callable[[], T]) -> Do[T]:
        return do(work)

    def take(self) -> None:
        loan = AtomicLoan(self.alias)
        loan.take()
        self.loan, self.connection = loan, loan.connection

    def raw(self) -> sqlite3.Connection:
        return self.loan.raw  # type: ignore[no-any-return]

    def finish(self) -> Plan[None]:
        yield self.do(self.loan.finish)

    def give(self, *, committed: bool) -> Plan[None]:
        yield self.do(lambda: self.loan.give(healthy=True, committed=committed))

    def shut(self) -> None:
        loan, self.connection = self.loan, None
        if loan.connection is not None:
            at_once(self.do(lambda: close(loan)))

    def end(self) -> Plan[None]:
        """Django must know that its transaction is over before the next one begins on the same thread."""
        loan, self.connection = self.loan, None
        yield self.do(lambda: close(loan))


def close(loan: AtomicLoan) -> None:
    loan.raw.close()
    loan.give(healthy=False, committed=False)
