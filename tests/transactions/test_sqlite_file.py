"""Transactions on a SQLite file that is locked, full or missing, or whose connection the performer closes."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from asgiref.sync import sync_to_async
from sqlalchemy import create_engine, event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from oncemore import Guard, Operation, Policy
from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Again, Do
from oncemore.errors import PayloadMismatch, StoreError, StoreTimeout, StoreUnavailable, TransactionEnded

from .conftest import opened
from .shops import ON_SQLITE, POLICY, Shop
from .test_transaction import Performing, asked, refund

OURS = ["sqlite3", "aiosqlite"]


@contextlib.contextmanager
def locked(shop: Shop) -> Iterator[None]:
    """Lock the file, as another process would, until the end of the block."""
    other = sqlite3.connect(shop.url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


@pytest.mark.parametrize("shop", ["aiosqlite"], indirect=True)
async def test_cancel_while_the_file_is_locked_frees_the_loop(shop: Shop) -> None:
    """A cancel scope of anyio also cancels each await of the clean-up."""
    await shop.run(asked("first"), refund(shop))
    began = time.monotonic()
    with locked(shop), anyio.move_on_after(0.1) as scope:
        await shop.run(asked(), refund(shop))
    assert scope.cancelled_caught
    assert time.monotonic() - began < 2
    assert (await shop.run(asked(), refund(shop))).how == "stored"
    assert shop.refunds() == ["first", "k"]


@pytest.mark.parametrize("kind", OURS)
async def test_lock_timeout_is_waited_for_only_once(kind: str, tmp_path: Path) -> None:
    async for shop in opened(ON_SQLITE[kind], f"sqlite:///{tmp_path / 'shop.db'}"):
        await shop.run(asked("first"), refund(shop))
        shop.guard.store.timeout = 2.0  # type: ignore[attr-defined]
        began = time.monotonic()
        with locked(shop), pytest.raises(StoreTimeout, match="locked by another"):
            await shop.run(asked(), refund(shop), wait=0.0)
        assert time.monotonic() - began < 3.9


@pytest.fixture
def workers_end() -> Callable[[], None]:
    """Return when all aiosqlite connections of this test are closed.  Those of other tests may still be open."""
    before = threading.enumerate()

    def wait() -> None:
        ends = time.monotonic() + 5
        while left := [each for each in threading.enumerate() if is_worker(each) and each not in before]:
            assert time.monotonic() < ends, left
            time.sleep(0.01)

    return wait


def is_worker(thread: threading.Thread) -> bool:
    return "_connection_worker" in thread.name


def test_ended_event_loops_leave_no_threads(tmp_path: Path, workers_end: Callable[[], None]) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}", policy=POLICY)

    async def perform(op: Op) -> None:
        await asyncio.sleep(0.01)

    async def several(turn: int) -> None:
        await asyncio.gather(*(guard.arun(asked(f"{turn}-{n}"), perform) for n in range(3)))

    for turn in range(4):
        asyncio.run(several(turn))
    guard.close()
    workers_end()


@pytest.mark.parametrize("kind", OURS)
async def test_foreign_keys_option_enforces_foreign_keys(kind: str, tmp_path: Path) -> None:
    """The performer could not enable them, because SQLite ignores this PRAGMA inside a transaction."""
    async for shop in opened(ON_SQLITE[kind], f"sqlite:///{tmp_path / 'shop.db'}"):
        shop.execute("CREATE TABLE lines (refund text REFERENCES refunds)")
        keeping = Guard(f"{shop.url}?foreign_keys=true", policy=POLICY)

        def perform(op: Op, shop: Shop = shop) -> Performing:
            yield shop.sql(op, "INSERT INTO lines VALUES ('none')")

        with pytest.raises(sqlite3.IntegrityError):
            await shop.run(asked(), perform, keeping)
        assert (await shop.run(asked("k2"), perform)).how == "stored"
        await keeping.aclose()


def test_lease_inside_transaction_on_same_file_says_why(tmp_path: Path) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}?timeout=0.1s")

    def perform(op: Op) -> None:
        guard.run(asked("inner"), lambda op: None, policy=Policy())

    with pytest.raises(StoreTimeout, match="by the caller, if it is itself performing"):
        guard.run(asked("outer"), perform, policy=POLICY)
    guard.close()


@pytest.mark.parametrize("shop", OURS, indirect=True)
async def test_connection_closed_by_the_performer_raises_transaction_ended(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        yield Closing(op)
        return "done"

    with pytest.raises(TransactionEnded):
        await shop.run(asked(), perform)
    assert shop.refunds() == []
    assert (await shop.run(asked(), refund(shop))).how == "stored"


@pytest.mark.parametrize("shop", ["django-sqlite", "django-sqlite-async"], indirect=True)
async def test_django_connection_closed_by_performer_keeps_the_fingerprint(shop: Shop) -> None:
    """The failure is noted immediately, in another transaction on the same thread."""

    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        yield Do(op.connection.close, sync_to_async(op.connection.close))
        return "done"

    with pytest.raises(TransactionEnded, match="leave both to the guard"):
        await shop.run(asked(), perform)
    with pytest.raises(PayloadMismatch):
        await shop.run(asked(fingerprint="another"), refund(shop))
    assert (await shop.run(asked(), refund(shop))).how == "stored"


class Closing:
    def __init__(self, op: Op) -> None:
        self.op = op

    def run(self) -> None:
        self.op.connection.close()

    async def arun(self) -> None:
        await self.op.connection.close()


@pytest.mark.parametrize("shop", OURS, indirect=True)
async def test_full_disk_at_commit_is_a_store_error(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        pages = yield shop.ask(op, "PRAGMA page_count")
        yield shop.sql(op, f"PRAGMA max_page_count = {pages}")
        return "x" * 100_000

    with pytest.raises(StoreError, match="the disk is full"):
        await shop.run(asked(), perform)


def made(kind: str, path: Path) -> Any:
    if kind == "engine":
        return create_engine(f"sqlite:///{path}")
    return create_async_engine(f"sqlite+aiosqlite:///{path}") if kind == "async engine" else f"sqlite:///{path}"


@pytest.mark.parametrize("kind", ["url", "engine", "async engine"])
@pytest.mark.parametrize("broken", ["missing", "no database"])
async def test_unusable_file_is_a_store_error(
    kind: str, broken: str, tmp_path: Path, workers_end: Callable[[], None]
) -> None:
    path = tmp_path / "nowhere" / "shop.db" if broken == "missing" else tmp_path / "shop.db"
    if broken != "missing":
        path.write_bytes(b"not a database" * 1000)
    guard = Guard(made(kind, path), policy=POLICY)
    expected = StoreUnavailable if broken == "missing" else StoreError
    with pytest.raises(expected, match="nowhere" if broken == "missing" else "not a SQLite database"):
        await guard.arun(asked(), lambda op: None)
    if kind == "url":
        with pytest.raises(expected):
            await asyncio.to_thread(guard.run, asked(), lambda op: None)
    await asyncio.to_thread(workers_end)  # they tell this loop


def test_deferred_constraint_fails_like_the_performer(tmp_path: Path) -> None:
    """The store is not at fault, and a retry would not help."""
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA foreign_keys = ON"))
    guard = Guard(engine, policy=POLICY)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id text PRIMARY KEY)")
        connection.exec_driver_sql("CREATE TABLE refunds (id text REFERENCES orders DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(IntegrityError):
        guard.run(
            Operation("a", "k"), lambda op: op.connection.exec_driver_sql("INSERT INTO refunds VALUES ('x')") and 1
        )
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM refunds").scalar() == 0


def test_refusal_of_nested_transaction_does_not_rerun_the_outer(tmp_path: Path) -> None:
    guard, other = Guard(f"sqlite:///{tmp_path}/a.db"), Guard(f"sqlite:///{tmp_path}/b.db")
    policy, calls = Policy(effect="transaction"), []

    def inner(op: Any) -> None:
        calls.append("inner")
        raise Again("deadlock")

    def outer(op: Any) -> None:
        calls.append("outer")
        other.run(Operation("s", "inner"), inner, policy=policy)

    with pytest.raises(StoreUnavailable):
        guard.run(Operation("s", "outer"), outer, policy=policy)
    assert (calls.count("outer"), calls.count("inner")) == (1, 4)
    guard.close()
    other.close()
