"""SQLAlchemy: sessions that join the operation's transaction, and engines that the guard refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from oncemore import Guard
from oncemore._ledger.connect import connect
from oncemore._ledger.context import Op
from oncemore._ledger.transactions import Do
from oncemore.errors import ConfigurationError, StoreTimeout, TransactionEnded

from .conftest import emptied, opened
from .shops import ON_POSTGRES, ON_SQLITE, POLICY, Shop
from .test_transaction import Performing, asked, refund

SQLITE = [name for name in ON_SQLITE if name.startswith("alchemy")]
POSTGRES = [name for name in ON_POSTGRES if name.startswith("alchemy")]


class Table(DeclarativeBase):
    pass


class Refund(Table):
    __tablename__ = "refunds"
    id: Mapped[str] = mapped_column(primary_key=True)
    made_in: Mapped[str]


@pytest.fixture(params=[*SQLITE, *(pytest.param(name, marks=pytest.mark.server) for name in POSTGRES)])
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    """A shop on each of SQLAlchemy's drivers."""
    if request.param in SQLITE:
        kind, url = ON_SQLITE[request.param], f"sqlite:///{tmp_path / 'shop.db'}"
    else:
        kind, url = ON_POSTGRES[request.param], emptied(request.getfixturevalue("shops_url"))
    async for each in opened(kind, url):
        yield each


def called(shop: Shop, method: Any, *args: Any) -> Do[Any]:
    """Return the effect that calls a method of a session or connection, sync or async."""
    return Do(lambda: method(*args), None if shop.sync else lambda: method(*args))


async def test_session_commit_ends_only_a_savepoint(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        session = op.session()
        session.add(Refund(id="kept", made_in="x"))
        yield called(shop, session.commit)
        session.add(Refund(id="thought better of", made_in="x"))
        yield called(shop, session.flush)
        yield called(shop, session.rollback)
        assert "kept" not in shop.refunds() if shop.mark != "?" else True  # by another connection: not committed yet
        return "done"

    assert (await shop.run(asked(), perform)).how == "stored"
    assert shop.refunds() == ["kept"]


async def test_session_without_commit_is_kept_when_the_code_returns(shop: Shop) -> None:
    made: list[Refund] = []

    def perform(op: Op) -> Performing:
        session = op.session()
        made.append(Refund(id="added", made_in="x"))
        session.add(made[0])
        other = op.session()
        other.add(Refund(id="flushed", made_in="x"))
        yield called(shop, other.flush)
        yield shop.insert(op, "beside it")
        return "done"

    await shop.run(asked(), perform)
    assert shop.refunds() == ["added", "beside it", "flushed"]
    assert made[0].id == "added", "it is readable after the end"


async def test_session_without_commit_is_kept_when_its_block_ends(shop: Shop) -> None:
    """A block that raises discards its work, and so does `rollback`.  The performer may go on after both."""

    def insert(op: Op, id: str, then: Any) -> Do[None]:
        def plain() -> None:
            with suppress(LookupError), op.session() as session:
                session.add(Refund(id=id, made_in="x"))
                then(session)

        async def awaited() -> None:
            with suppress(LookupError):
                async with op.session() as session:
                    session.add(Refund(id=id, made_in="x"))
                    if inspect.isawaitable(awaitable := then(session)):
                        await awaitable

        return Do(plain, None if shop.sync else awaited)

    def fail(session: Any) -> None:
        raise LookupError

    def perform(op: Op) -> Performing:
        yield insert(op, "kept", lambda session: None)
        yield insert(op, "raised", fail)
        yield insert(op, "rolled back", lambda session: session.rollback())
        yield insert(op, "closed", lambda session: session.close())
        return "done"

    await shop.run(asked(), perform)
    assert shop.refunds() == ["kept"]


async def test_session_whose_flush_failed_keeps_nothing(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, "there")
        session = op.session()
        session.add_all([Refund(id="there", made_in="x"), Refund(id="another", made_in="x")])
        try:
            yield called(shop, session.flush)
        except IntegrityError:
            return "done"

    assert (await shop.run(asked(), perform)).value == "done"
    assert shop.refunds() == ["there"]


async def test_flush_that_fails_at_the_end_rolls_everything_back(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, "there")
        op.session().add(Refund(id="there", made_in="x"))
        return "done"

    with pytest.raises(IntegrityError):
        await shop.run(asked(), perform)
    assert shop.refunds() == []


async def test_session_of_a_step_is_kept_without_commit(shop: Shop) -> None:
    policy = dataclasses.replace(POLICY, effect="steps")

    def insert(session: Any) -> str:
        session.add(Refund(id="by step", made_in="x"))
        return "receipt"

    async def ainsert(session: Any) -> str:
        return insert(session)

    def perform(op: Op) -> Any:
        return op.step("insert", insert if shop.sync else ainsert)

    if shop.sync:
        answer = await asyncio.to_thread(shop.guard.run, asked(), perform, policy=policy)
    else:
        answer = await shop.guard.arun(asked(), perform, policy=policy)
    assert (answer.value, shop.refunds()) == ("receipt", ["by step"])


async def test_failure_rolls_back_committed_session_work(shop: Shop) -> None:
    def perform(op: Op) -> Performing:
        session = op.session()
        session.add(Refund(id="k", made_in="x"))
        yield called(shop, session.commit)
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        await shop.run(asked(), perform)
    assert shop.refunds() == []


@pytest.mark.parametrize("word", ["commit", "rollback"])
async def test_transaction_ended_on_the_connection_is_noticed(shop: Shop, word: str) -> None:
    def perform(op: Op) -> Performing:
        yield shop.insert(op, "before")
        yield called(shop, getattr(op.connection, word))
        yield shop.insert(op, "after")
        return "done"

    with pytest.raises(TransactionEnded, match="leave both to the guard"):
        await shop.run(asked(), perform)
    assert "after" not in shop.refunds()


async def test_connection_is_refused_after_the_transaction(shop: Shop) -> None:
    ops: list[Op] = []

    def perform(op: Op) -> Performing:
        ops.append(op)
        yield shop.insert(op, op.key)
        return "done"

    await shop.run(asked(), perform)
    with pytest.raises(TransactionEnded, match="is over"):
        _ = ops[0].connection
    with pytest.raises(TransactionEnded, match="is over"):
        ops[0].session()


async def test_connections_go_back_to_the_pool(shop: Shop) -> None:
    for number in range(3):
        await shop.run(asked(f"k{number}"), refund(shop))
        with pytest.raises(RuntimeError):
            await shop.run(asked(f"f{number}"), failing)
    assert shop.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("raises", [True, False])
async def test_connection_closed_by_the_performer_is_left_alone(shop: Shop, raises: bool) -> None:
    """`with op.connection:` gives the connection back to its pool.  Its next user must not be rolled back."""
    others: list[Any] = []
    engine: Any = shop.engine  # type: ignore[attr-defined]

    def perform(op: Op) -> Performing:
        yield called(shop, op.connection.close)
        others.append((yield called(shop, engine.connect)))
        yield called(shop, others[0].exec_driver_sql, "INSERT INTO refunds VALUES ('others', 'x')")
        if raises:
            raise LookupError
        return "done"

    with pytest.raises(LookupError if raises else TransactionEnded):
        await shop.run(asked(), perform)
    for method in (others[0].commit, others[0].close):
        if inspect.isawaitable(done := method()):
            await done
    assert shop.refunds() == ["others"]
    assert (await shop.run(asked("k2"), refund(shop))).how == "stored"


@pytest.mark.server
@pytest.mark.parametrize("shop", POSTGRES, indirect=True)
async def test_begin_hook_of_the_engine_applies(shop: Shop) -> None:
    """The hook sets a tenant, as for row-level security."""
    engine: Any = shop.engine  # type: ignore[attr-defined]
    event.listen(
        getattr(engine, "sync_engine", engine),
        "begin",
        lambda connection: connection.exec_driver_sql("SET LOCAL app.tenant = '7'") and None,
    )

    def perform(op: Op) -> Performing:
        yield shop.insert(op, op.key)
        return (yield shop.ask(op, "SELECT current_setting('app.tenant')"))

    for key in ("k1", "k2"):
        assert (await shop.run(asked(key), perform)).value == "7"
    assert shop.refunds() == ["k1", "k2"]


def failing(op: Op) -> Performing:
    raise RuntimeError
    yield


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_engine_on_memory_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a file"):
        Guard(create_engine(url))


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (lambda: create_engine("postgresql+psycopg://"), "names no database"),
        (lambda: create_engine("mysql+pymysql://h/d", module=SimpleNamespace(paramstyle="format")), "on mysql has no"),
        (lambda: create_async_engine("sqlite+aiosqlite://"), "needs a file"),
        (lambda: Session(), "no engine"),
    ],
)
def test_engine_that_cannot_lend_connections_is_refused(engine: Any, complaint: str) -> None:
    made = engine()
    with pytest.raises(ConfigurationError, match=complaint):
        Guard(made)


def test_store_options_and_address_can_be_passed_with_an_engine(tmp_path: Path) -> None:
    store = connect(create_engine(f"sqlite:///{tmp_path / 'a b.db'}"), prefix="mine_")
    assert (store.path, store.sql.prefix) == (str(tmp_path / "a b.db"), "mine_")  # type: ignore[attr-defined]
    engine = create_engine("postgresql+psycopg://", creator=lambda: None)
    assert "host=db&dbname=shop" in connect(engine, host="db", dbname="shop").url


def test_async_engine_without_an_event_loop_is_refused(tmp_path: Path) -> None:
    guard = Guard(create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"), policy=POLICY)
    with pytest.raises(ConfigurationError, match="is async"):
        guard.run(asked(), lambda op: None)


@pytest.mark.server
def test_exhausted_pool_is_a_store_timeout(shops_url: str) -> None:
    url = emptied(shops_url).replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    guard = Guard(engine, policy=POLICY)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        with pytest.raises(StoreTimeout, match="pool_size"):
            guard.run(asked(), lambda op: None)
    guard.close()
    engine.dispose()


@pytest.mark.server
@pytest.mark.parametrize("dialect", ["postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg"])
async def test_autocommit_engine_works_or_is_refused_before_the_claim(dialect: str, shops_url: str) -> None:
    """If the guard cannot begin transactions on the engine, it raises before anything is claimed."""
    create = create_async_engine if dialect.endswith("asyncpg") else create_engine
    engine: Any = create(emptied(shops_url).replace("postgresql", dialect, 1), isolation_level="AUTOCOMMIT")
    guard = Guard(engine, policy=POLICY)
    try:
        how = (await guard.arun(asked(), lambda op: None)).how
    except ConfigurationError as error:
        assert "AUTOCOMMIT" in str(error)  # noqa: PT017 (only some are refused)
        how = "refused"
    record = await guard.afind(*asked().id)
    assert (how, record and record.state) in [("stored", "settled"), ("refused", None)]
    await guard.aclose()
    if (gone := engine.dispose()) is not None:
        await gone
