"""A program ends by asyncio.run while operations are under way: what was performed is stored, what was not is free."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from pathlib import Path

import pytest

from oncemore import Guard, Operation, Policy
from oncemore._ledger.context import Op
from tests.support.proxy import FaultProxy

ROUNDS, AT_ONCE = 40, 12
TRANSACTION = Policy(effect="transaction")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'once.db'}?thread=always"


STORES = [
    pytest.param("sqlite_url"),
    pytest.param("postgres_url", marks=pytest.mark.server),
    pytest.param("valkey_url", marks=pytest.mark.server),
]


@pytest.mark.parametrize("fixture", STORES)
def test_outcome_is_stored_though_the_loop_shuts_down(
    fixture: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """All tasks are cancelled: also those that have performed, and whose outcomes are on their way."""
    guard = Guard(request.getfixturevalue(fixture))
    scope = random.randbytes(8).hex()
    begun: set[str] = set()
    performed: set[str] = set()

    async def perform(op: Op) -> str:
        begun.add(op.key)
        await asyncio.sleep(random.choice([0, 0, 0.005]) * random.random())
        performed.add(op.key)
        return op.key

    async def main(number: int) -> None:
        tasks = [
            asyncio.create_task(guard.arun(Operation(scope, f"{number}-{each}", "f"), perform))
            for each in range(AT_ONCE)
        ]
        if number % 4:  # else it may end while the first of them still connects
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.01 * random.random())

    for number in range(ROUNDS):
        asyncio.run(main(number))
    gc.collect()
    for key in performed:
        record = guard.find(scope, key)
        assert record is not None
        assert record.state == "settled", key
    for number in range(ROUNDS):
        for key in {f"{number}-{each}" for each in range(AT_ONCE)} - begun:
            record = guard.find(scope, key)
            assert record is None or record.state == "released", key
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    guard.close()


def test_loop_shutdown_while_a_transaction_connects_ends(postgres_url: str, postgres_schema: str) -> None:
    """The pool takes its own end for a failed connection, and would wait for the next order for ever."""
    with FaultProxy.before(postgres_url) as proxy:
        guard = Guard(f"{proxy.url(postgres_url)}?schema={postgres_schema}")
        guard.find("scope", "key")  # the tables are there

        async def main() -> None:
            await guard.afind("scope", "key")
            proxy.stall()
            transaction = asyncio.create_task(guard.arun(Operation("scope", "key"), perform, policy=TRANSACTION))
            await asyncio.sleep(0.3)
            assert not transaction.done()

        ending = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        ending.start()
        ending.join(10)
        assert not ending.is_alive()
        proxy.heal()
        guard.close()


def test_loop_shutdown_at_any_moment_of_first_transactions_ends(postgres_url: str, postgres_schema: str) -> None:
    """The pool opens, connects and is given orders; its tasks may be cancelled at any of these."""
    guard = Guard(f"{postgres_url}?schema={postgres_schema}")

    async def main() -> None:
        keys = [random.randbytes(8).hex() for _ in range(5)]
        tasks = [asyncio.create_task(guard.arun(Operation("scope", key), perform, policy=TRANSACTION)) for key in keys]
        await asyncio.wait(tasks, timeout=0.02 * random.random())

    def rounds() -> None:
        for _ in range(ROUNDS):
            asyncio.run(main())

    ending = threading.Thread(target=rounds, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    guard.close()


async def perform(op: Op) -> str:
    return op.key
