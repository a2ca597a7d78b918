"""A performer may set row factories on its connection.  They affect neither the ledger nor the next performer."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from psycopg.rows import dict_row

from oncemore import Guard
from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Do
from oncemore.errors import PayloadMismatch
from oncemore.transitions import Transitions

from .shops import POLICY, Performer, Shop
from .test_transaction import Performing, asked, failing, refund

OURS = ["sqlite3", "aiosqlite"]
ON_POSTGRES = [pytest.param(name, marks=pytest.mark.server) for name in ("psycopg", "psycopg-async")]


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    """The row factory from the documentation of sqlite3."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def dicts(connection: Any) -> None:
    connection.row_factory = dict_row if hasattr(connection, "pgconn") else as_dict


def in_bytes(connection: Any) -> None:
    connection.text_factory = bytes


def otherwise(shop: Shop, change: Callable[[Any], None]) -> Performer:
    def perform(op: Op) -> Performing:
        change(op.connection)
        yield shop.insert(op, op.key)
        return "done"

    return perform


@pytest.mark.parametrize("shop", OURS, indirect=True)
@pytest.mark.parametrize("change", [dicts, in_bytes])
async def test_ledger_ignores_the_performers_row_factory(shop: Shop, change: Any) -> None:
    guard = Guard(shop.guard.store, policy=POLICY, cache=0)
    assert (await shop.run(asked(), otherwise(shop, change), guard)).how == "stored"
    assert (await shop.run(asked(), otherwise(shop, change), guard)).how == "replayed"
    with pytest.raises(PayloadMismatch):
        await shop.run(asked(fingerprint="another"), refund(shop), guard)
    with pytest.raises(RuntimeError):
        await shop.run(asked("fails"), failing(shop, RuntimeError()), guard)
    assert (await shop.run(asked("fails"), refund(shop), guard)).attempt == 2
    assert shop.refunds() == ["fails", "k"]


@pytest.mark.parametrize("shop", [*OURS, *ON_POSTGRES], indirect=True)
async def test_next_performer_gets_plain_rows(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        seven = yield shop.ask(op, "SELECT 7 AS seven")
        return seven

    await shop.run(asked(), otherwise(shop, dicts))
    assert (await shop.run(asked("k2"), perform)).value == 7


@pytest.mark.parametrize("shop", [*OURS, *ON_POSTGRES], indirect=True)
async def test_transitions_ignore_and_keep_the_performers_row_factory(shop: Shop) -> None:
    refunds = Transitions("refunds", {("x", "close"): "closed"}, state="made_in")

    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        dicts(op.connection)
        kind = op.connection.row_factory
        applied = yield Do(lambda: refunds.apply(op, op.key, "close"), lambda: refunds.aapply(op, op.key, "close"))
        return [applied.state, op.connection.row_factory == kind]

    assert (await shop.run(asked(), perform)).value == ["closed", True]
