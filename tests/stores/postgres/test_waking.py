"""Other processes wake waiters, poolers are detected, and connections and threads are closed."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql

from oncemore._contract.policy import Policy
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Claim, Lease, Operation, Outcome
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import arun, run
from oncemore.stores.postgres import PostgresStore
from oncemore.stores.postgres.pipeline import state_of
from oncemore.testing.stores import DONE, LEASE, RETENTION

from .parts import connections, same, until

# Waking up


def test_waiter_is_woken_by_each_verb_of_another_process(url: str) -> None:
    mine, other = PostgresStore(url), PostgresStore(url)  # each with wake-ups of its own, as in two processes
    for verb in ("settle", "release", "hold", "lapse", "resolve"):
        operation = Operation("s", verb)
        lease = run(other.claim(operation, lease=LEASE))
        record = run(mine.claim(operation, lease=LEASE))
        with mine.wakeups.waiting(operation.id) as waiter:
            run(mine.watch(record))
            do = {
                "settle": lambda lease=lease: other.settle(lease, DONE, retention=RETENTION),
                "release": lambda lease=lease: other.release(lease, retention=RETENTION),
                "hold": lambda lease=lease: other.hold(lease),
                "lapse": lambda lease=lease: other.renew(lease, lease=0.0),
                "resolve": lambda lease=lease: resolved(other, lease),
            }[verb]
            assert wakes(waiter, lambda do=do: run(do())), verb
    mine.close()
    other.close()


def resolved(store: PostgresStore, lease: Lease) -> Any:
    store.shift += LEASE + 1
    record = yield from store.resolve(*lease.operation.id, None, retention=RETENTION)
    return record


def wakes(waiter: Any, act: Callable[[], object]) -> bool:
    """Whether *act* wakes the waiter within seconds, and nothing wakes it before."""
    time.sleep(0.3)  # the listener has connected, and woken everyone
    waiter.disarm()
    act()
    begun = time.monotonic()
    run(forward(waiter.wait(10.0)))
    return time.monotonic() - begun < 5.0


def forward(effect: Any) -> Any:
    return (yield effect)


def test_watch_of_finished_record_wakes_at_once(url: str) -> None:
    mine, other = PostgresStore(url), PostgresStore(url)
    operation = Operation("s", "k")
    lease = run(other.claim(operation, lease=LEASE))
    record = run(mine.claim(operation, lease=LEASE))
    run(other.settle(lease, DONE, retention=RETENTION))
    with mine.wakeups.waiting(operation.id) as waiter:
        run(mine.watch(record))
        assert waiter.arm(lambda: None) is False
    mine.close()
    other.close()


def test_no_message_is_sent_if_no_other_process_waits(url: str, postgres_url: str) -> None:
    store = PostgresStore(url)
    operation = Operation("s", "k")
    lease = run(store.claim(operation, lease=LEASE))
    run(store.watch(run(store.claim(operation, lease=LEASE))))  # its owner is in this process
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute(sql.SQL("LISTEN {}").format(sql.Identifier(store._listener.channel)))
        run(store.settle(lease, DONE, retention=RETENTION))
        assert list(other.notifies(timeout=0.5)) == []
    store.close()


def test_unclaim_wakes_waiters_of_another_process(url: str) -> None:
    mine, other = PostgresStore(url), PostgresStore(url)
    operation = Operation("s", "k")
    run(other.claim(operation, lease=LEASE))
    record = run(mine.claim(operation, lease=LEASE))
    with mine.wakeups.waiting(operation.id) as waiter:
        run(mine.watch(record))
        assert wakes(waiter, lambda: run(other.unclaim([Claim(operation, record.holder, LEASE)])))
    assert isinstance(run(mine.claim(operation, lease=LEASE)), Lease)
    mine.close()
    other.close()


async def test_deletion_in_another_process_empties_the_cache(url: str) -> None:
    mine, other = Guard(url), PostgresStore(url)
    operation = Operation("s", "k", "fp")
    performed = 0

    def perform(_: object) -> Outcome:
        nonlocal performed
        performed += 1
        return DONE

    await mine.arun(operation, perform)
    await mine.arun(operation, perform)
    assert performed == 1
    await asyncio.sleep(0.3)
    await arun(other.delete(*operation.id))
    async with asyncio.timeout(10):
        while mine.cache.get(operation.id) is not None:
            await asyncio.sleep(0.01)
    await mine.arun(operation, perform)
    assert performed == 2
    await mine.aclose()
    await other.aclose()


def test_invalid_message_is_ignored(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    other = PostgresStore(same(store))
    lease = run(other.claim(Operation("s", "k"), lease=LEASE))
    record = run(store.claim(Operation("s", "k"), lease=LEASE))
    with store.wakeups.waiting(("s", "k")) as waiter:
        run(store.watch(record))
        for text in ("", "{}", "[1]", '["x", 7]'):
            server.execute("SELECT pg_notify(%s, %s)", [store._listener.channel, text])
        assert wakes(waiter, lambda: run(other.settle(lease, DONE, retention=RETENTION)))
    other.close()


def test_long_messages_are_split(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    ids = [("s" * 1000, f"{n}" * 500) for n in range(100, 130)]
    messages = list(store._listener.messages(ids))
    assert 1 < len(messages) < 30
    for message in messages:
        server.execute("SELECT pg_notify('anything', %s)", [message])


# Poolers


def test_waiters_behind_a_pooler_look_for_themselves(pgbouncer_url: str, postgres_schema: str) -> None:
    """Messages would not arrive, so the waiter polls until it gets its answer."""
    guards = [Guard(f"{pgbouncer_url}?schema={postgres_schema}") for _ in range(2)]
    operation, begun = Operation("s", "k"), threading.Event()

    def perform(_: object) -> Outcome:
        begun.set()
        time.sleep(0.7)
        return DONE

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(guards[0].run, operation, perform)
        begun.wait()
        second = guards[1].run(operation, perform)
        assert (first.result().how, second.how) == ("stored", "replayed")
    deadline = time.monotonic() + 10
    while guards[1].store.poll != 0.25 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert guards[1].store.poll == 0.25
    for guard in guards:
        guard.close()


@pytest.mark.parametrize("verb", ["DEALLOCATE ALL", "SELECT 1"])
def test_hidden_pooler_is_detected(store: PostgresStore, verb: str) -> None:
    """If a prepared statement is missing or exists already, the statement is sent again, unprepared."""
    run(store.claim(Operation("s", "before"), lease=LEASE))
    (connection,) = store.database.connections.threads.connections
    state = state_of(connection)
    assert state.prepared
    connection.pgconn.exec_(verb.encode())  # as if another server process had the statements that we think we prepared,
    if verb == "SELECT 1":  # or this one had them from another client of the pooler
        state.prepared.clear()
        state._count = itertools.count()
    assert isinstance(run(store.claim(Operation("s", "after"), lease=LEASE)), Lease)
    assert store.database.connections.threads.connections == [connection]
    assert connection.prepare_threshold is None
    assert store.database.pooled


# Coming and going


async def test_closing_ends_every_connection_and_thread(url: str, server: psycopg.Connection[Any]) -> None:
    name = f"closing{secrets.token_hex(4)}"
    store = PostgresStore(f"{url}&application_name={name}")
    lease = await arun(store.claim(Operation("s", "k"), lease=LEASE))
    await asyncio.to_thread(run, store.settle(lease, DONE, retention=RETENTION))
    await arun(store.stats())
    assert until(lambda: connections(server, name) == 4)  # two of the loop's, one of the threads', and the listener's
    listening = store._listener._thread
    assert listening is not None
    await store.aclose()
    assert until(lambda: connections(server, name) == 0)
    assert until(lambda: not listening.is_alive())
    await arun(store.stats())  # and it can be used again
    await store.aclose()


def test_ended_event_loops_leave_no_connections(url: str, server: psycopg.Connection[Any]) -> None:
    name = f"loops{secrets.token_hex(4)}"
    store = PostgresStore(f"{url}&application_name={name}&listen=false")
    for n in range(5):
        lease = asyncio.run(arun(store.claim(Operation("s", str(n)), lease=LEASE)))
        assert isinstance(lease, Lease)
    gc.collect()
    assert len(store.database.connections.loops.things) <= 1
    store.close()
    gc.collect()
    assert until(lambda: connections(server, name) == 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_has_its_own_connections(store: PostgresStore) -> None:
    """Parent and child get their own answers, as under gunicorn with preload."""
    run(store.claim(Operation("s", "before"), lease=LEASE))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            won = [isinstance(run(store.claim(Operation("s", f"c{n}"), lease=LEASE)), Lease) for n in range(50)]
            store.close()
            code = 0 if all(won) else 2
        finally:
            os._exit(code)
    won = [isinstance(run(store.claim(Operation("s", f"p{n}"), lease=LEASE)), Lease) for n in range(50)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(won)
    found = run(store.list(Filter(scope="s"), limit=1000)).records
    assert len(found) == len({record.token for record in found}) == 101


def test_guard_waits_for_another_process_and_replays(url: str) -> None:
    """A duplicate in another process gets the outcome."""
    guards = [Guard(url, policy=Policy(wait=20)) for _ in range(2)]
    begun = threading.Event()

    def perform(_: object) -> Outcome:
        begun.set()
        time.sleep(1.0)
        return DONE

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(guards[0].run, Operation("s", "k"), perform)
        begun.wait()
        assert guards[1].run(Operation("s", "k"), perform).how == "replayed"
        assert first.result().how == "stored"
    for guard in guards:
        guard.close()
