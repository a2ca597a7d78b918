"""Free connections are in one list for threads and one for each event loop, and none is taken twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from oncemore.errors import StoreTimeout
from oncemore.stores.postgres.connection import Connections
from oncemore.stores.postgres.pipeline import AnswerTimeout
from tests.support.proxy import FaultProxy
from tests.support.servers import PostgresServer


@pytest.fixture(params=["threads", "loop"])
def taker(request: pytest.FixtureRequest) -> Iterator[Taker]:
    with asyncio.Runner() as runner:
        yield Taker(runner if request.param == "loop" else None)


class Taker:
    """Takes connections on a thread, or on an event loop."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self.runner = runner

    def take(self, connections: Connections, timeout: float = 20.0) -> Any:
        if self.runner is None:
            return connections.take(timeout)
        return self.runner.run(connections.atake(timeout))

    def give_back(self, connections: Connections, connection: Any) -> None:
        async def on_loop() -> None:
            connections.give_back(connection)

        if self.runner is None:
            connections.give_back(connection)
        else:
            self.runner.run(on_loop())

    def execute(self, connection: Any, text: str) -> None:
        if self.runner is None:
            connection.execute(text)
        else:
            self.runner.run(connection.execute(text))

    def close(self, connections: Connections) -> None:
        if self.runner is not None:
            self.runner.run(connections.aclose())
        connections.close()


def test_connection_given_back_last_is_taken_first(postgres_url: str, taker: Taker) -> None:
    connections = Connections(postgres_url)
    one, two = taker.take(connections), taker.take(connections)
    assert one is not two
    taker.give_back(connections, one)
    taker.give_back(connections, two)
    assert taker.take(connections) is two
    assert taker.take(connections) is one
    for each in (one, two):
        taker.give_back(connections, each)
    taker.close(connections)
    assert one.pgconn.status == two.pgconn.status == psycopg.pq.ConnStatus.BAD


def test_connection_given_back_twice_is_free_once(postgres_url: str, taker: Taker) -> None:
    connections = Connections(postgres_url, limit=2)
    one = taker.take(connections)
    taker.give_back(connections, one)
    taker.give_back(connections, one)
    taken = [taker.take(connections) for _ in range(2)]
    assert taken[0] is not taken[1]
    with pytest.raises(StoreTimeout):
        taker.take(connections, 0.05)
    for each in taken:
        taker.give_back(connections, each)
    taker.close(connections)


@pytest.mark.parametrize("state", ["in a transaction", "closed meanwhile"])
def test_connection_that_cannot_be_reused_is_closed(postgres_url: str, taker: Taker, state: str) -> None:
    connections = Connections(postgres_url)
    connection = taker.take(connections)
    if state == "in a transaction":
        taker.execute(connection, "BEGIN")
    else:
        taker.close(connections)
    taker.give_back(connections, connection)
    assert connection.pgconn.status == psycopg.pq.ConnStatus.BAD
    fresh = taker.take(connections)
    assert fresh is not connection
    taker.give_back(connections, fresh)
    taker.close(connections)


def test_connection_limit_is_kept_and_slots_come_back(postgres_url: str, taker: Taker) -> None:
    connections = Connections(postgres_url, limit=1)
    for closed in (False, True, False):
        connection = taker.take(connections)
        begun = time.monotonic()
        with pytest.raises(StoreTimeout, match="pool="):
            taker.take(connections, 0.1)
        assert time.monotonic() - begun < 5
        if closed:
            connection.pgconn.finish()
        taker.give_back(connections, connection)
    taker.close(connections)


def test_connection_that_cannot_be_opened_leaves_its_slot_free(postgres_url: str, taker: Taker) -> None:
    connections = Connections(f"{postgres_url}?port=1&connect_timeout=2", limit=1)
    for _ in range(3):
        with pytest.raises(psycopg.OperationalError):
            taker.take(connections)


def test_thread_that_waits_gets_the_connection_given_back(postgres_url: str) -> None:
    connections = Connections(postgres_url, limit=1)
    first = connections.take(5.0)
    threading.Timer(0.1, connections.give_back, [first]).start()
    assert connections.take(20.0) is first
    connections.give_back(first)
    connections.close()


async def test_task_that_waits_gets_the_connection_given_back(postgres_url: str) -> None:
    connections = Connections(postgres_url, limit=1)
    first = await connections.atake(5.0)
    waiting = asyncio.create_task(connections.atake(20.0))
    cancelled = asyncio.create_task(connections.atake(20.0))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    connections.give_back(first)
    assert await waiting is first
    connections.give_back(first)
    await connections.aclose()


async def test_connecting_to_silent_server_ends_in_time(postgres_url: str) -> None:
    with FaultProxy.before(postgres_url) as proxy:
        proxy.drop_answers()
        connections = Connections(proxy.url(postgres_url), limit=1)
        with pytest.raises(AnswerTimeout):
            await connections.atake(0.2)
        proxy.heal()
        connections.give_back(await connections.atake(20.0))
        await connections.aclose()


def test_program_that_ends_while_connecting_does_not_hang(postgres_url: str) -> None:
    async def connect_and_end() -> None:
        connecting.append(asyncio.create_task(connections.atake(60.0)))
        await asyncio.sleep(0.1)

    connecting: list[asyncio.Task[Any]] = []
    with FaultProxy.before(postgres_url) as proxy:
        proxy.drop_answers()
        connections = Connections(proxy.url(postgres_url))
        begun = time.monotonic()
        asyncio.run(connect_and_end())
        assert time.monotonic() - begun < 20
        assert connecting[0].cancelled()


@pytest.mark.chaos
def test_dead_connections_after_restart_are_not_lent(own_postgres: PostgresServer, taker: Taker) -> None:
    connections = Connections(own_postgres.url, limit=8)
    taken = [taker.take(connections) for _ in range(8)]
    for each in taken:
        taker.give_back(connections, each)
    own_postgres.restart(immediate=True)
    again = taker.take(connections)
    assert again not in taken
    taker.execute(again, "SELECT 1")
    taker.give_back(connections, again)
    taker.close(connections)


def test_connections_behind_a_pooler_prepare_nothing(postgres_url: str, taker: Taker) -> None:
    connections = Connections(postgres_url)
    connections.prepares = False
    connection = taker.take(connections)
    assert connection.prepare_threshold is None
    taker.give_back(connections, connection)
    taker.close(connections)
