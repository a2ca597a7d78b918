"""A database step commits its effect with its checkpoint, on every driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from oncemore import Guard, Operation
from oncemore._ledger.context import Op
from oncemore._runtime.plan import Call, Effect
from oncemore.errors import ConfigurationError, ProviderDuplicate

from .shops import POLICY, Shop

STEPS = dataclasses.replace(POLICY, effect="steps", errors=(LookupError,))
ASKED = Operation("customer-1", "k", "same", "orders.pay")


def on(shop: Shop, text: str, *values: Any, then: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """Return a step's function that runs one statement and then calls *then*."""

    def effect(connection: Any) -> Effect[Any]:
        return shop.sql(SimpleNamespace(connection=connection), text, *values)  # type: ignore[arg-type]

    def plain(connection: Any) -> Any:
        effect(connection).run()
        return then()

    async def awaited(connection: Any) -> Any:
        await effect(connection).arun()
        return then()

    return plain if shop.sync else awaited


def insert(shop: Shop, id: str, then: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    return on(shop, f"INSERT INTO refunds VALUES ({shop.mark}, 'x')", id, then=then)


def delete(shop: Shop, id: str) -> Callable[..., Any]:
    return on(shop, f"DELETE FROM refunds WHERE id = {shop.mark}", id)


def raising(*errors: BaseException) -> Callable[[], Any]:
    left = list(errors)

    def then() -> str:
        if left:
            raise left.pop(0)
        return "inserted"

    return then


async def test_failed_step_is_rolled_back_and_retried(shop: Shop) -> None:
    then = raising(RuntimeError("no luck"))

    def perform(op: Op) -> Any:
        yield Call(lambda: op.step("first", insert(shop, "first")))
        return (yield Call(lambda: op.step("second", insert(shop, "second", then))))

    with pytest.raises(RuntimeError):
        await shop.run(ASKED, perform, policy=STEPS)
    assert shop.refunds() == ["first"]
    answer = await shop.run(ASKED, perform, Guard(shop.guard.store), policy=STEPS)
    assert answer.value == "inserted"
    assert shop.refunds() == ["first", "second"]


async def test_retried_step_runs_in_a_new_transaction(shop: Shop) -> None:
    then = raising(RuntimeError("no luck"))

    def perform(op: Op) -> Any:
        return (yield Call(lambda: op.step("only", insert(shop, "only", then), retry=2)))

    assert (await shop.run(ASKED, perform, policy=STEPS)).value == "inserted"
    assert shop.refunds() == ["only"]


async def test_undo_runs_in_a_database_transaction(shop: Shop) -> None:
    def perform(op: Op) -> Any:
        yield Call(lambda: op.step("reserve", insert(shop, "reserve"), undo=delete(shop, "reserve")))
        yield Call(lambda: op.step("keep", insert(shop, "keep")))
        raise LookupError("declined")

    assert (await shop.run(ASKED, perform, policy=STEPS)).outcome.kind == "error"
    assert shop.refunds() == ["keep"]


async def test_undo_whose_connection_was_lost_is_retried(shop: Shop) -> None:
    """On PostgreSQL the server ends the connection.  SQLite has no server: the undo fails after its statement."""
    lost = (
        on(shop, "SELECT pg_terminate_backend(pg_backend_pid())")
        if shop.guard.store.url.startswith("postgres")
        else on(shop, "DELETE FROM refunds", then=raising(ConnectionError("lost")))
    )
    undos = [lost, delete(shop, "reserve")]

    def plain(value: Any, connection: Any) -> Any:
        return undos.pop(0)(connection)

    async def awaited(value: Any, connection: Any) -> Any:
        return await undos.pop(0)(connection)

    def perform(op: Op) -> Any:
        yield Call(lambda: op.step("reserve", insert(shop, "reserve"), undo=plain if shop.sync else awaited))
        yield Call(lambda: op.step("keep", insert(shop, "keep")))
        raise LookupError("declined")

    assert (await shop.run(ASKED, perform, policy=STEPS)).outcome.kind == "error"
    assert (shop.refunds(), undos) == (["keep"], [])


async def test_transaction_ended_by_a_duplicate_is_not_committed(shop: Shop) -> None:
    def perform(op: Op) -> Any:
        yield Call(lambda: op.step("only", insert(shop, "only", raising(ProviderDuplicate(result="receipt")))))

    with pytest.raises(ProviderDuplicate):
        await shop.run(ASKED, perform, policy=STEPS)
    assert shop.refunds() == []


async def test_step_with_session_parameter_gets_the_drivers_session(shop: Shop) -> None:
    """SQLAlchemy's adapters have a session.  With other drivers, the error names SQLAlchemy."""

    def plain(session: Any) -> bool:
        return isinstance(session, Session if shop.sync else AsyncSession)

    async def awaited(session: Any) -> bool:
        return plain(session)

    def perform(op: Op) -> Any:
        return (yield Call(lambda: op.step("only", plain if shop.sync else awaited)))

    if hasattr(shop, "engine"):
        assert (await shop.run(ASKED, perform, policy=STEPS)).value is True
        return
    with pytest.raises(ConfigurationError, match="SQLAlchemy"):
        await shop.run(ASKED, perform, policy=STEPS)
