"""Senders that are killed at each step, stopped, cancelled, or run beside each other; and a database that goes away."""

from __future__ import annotations

import asyncio
import collections
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Policy, Webhooks
from oncemore._ledger.tables import Tables
from oncemore._runtime.plan import run
from oncemore.testing.clock import Clock
from oncemore.webhooks import Sender
from oncemore.webhooks import statements as sql
from oncemore.webhooks.claims import Claims, MatchingPass
from oncemore.webhooks.requests import Result
from oncemore.webhooks.sender import Results, SenderRun
from tests.support.processes import Program
from tests.webhooks.conftest import LOOPBACK, send
from tests.webhooks.hooks import OK, Answer, Arrived, Hooks, response

SCRIPT = str(Path(__file__).with_name("killed_sender.py"))
WAIT = 90.0  # the longest that a test waits for something that comes at once on an idle machine

# Killed at: whether a request may have been sent before, so that one comes twice.
POINTS = {
    "before match": False,
    "after match": False,
    "before claim": False,
    "after claim": False,
    "before request": False,
    "after request": True,
    "before record": True,
    "before commit of results": True,  # they are committed, but another request may be under way
    "after record": True,
}


def until(condition: Any) -> None:
    ends = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize("point", POINTS)
def test_killed_sender_loses_nothing_and_keeps_ids(webhooks: Webhooks, url: str, hooks: Hooks, point: str) -> None:
    webhooks.endpoints.create(hooks.url("/free"))
    webhooks.endpoints.create(hooks.url("/fifo"), order="fifo")
    ids = send(webhooks, *range(5))
    with Program([sys.executable, SCRIPT, url, point]) as program:
        assert program.wait(WAIT) == -signal.SIGKILL
    Clock(webhooks.guard.store).advance(50)  # until its leases have ended
    Sender(webhooks).run_once()
    assert webhooks.stats() == {"pending": 0, "delivered": 10, "dead": 0, "parked": 0}
    counts = collections.Counter((each.path, each.id) for each in hooks.arrived)
    assert set(counts) == {(path, id) for path in ("/free", "/fifo") for id in ids}
    assert max(counts.values()) <= (2 if POINTS[point] else 1)
    first_seen = list(dict.fromkeys(each.id for each in hooks.arrived if each.path == "/fifo"))
    assert first_seen == ids


def test_sender_killed_within_a_request_is_followed_by_another(webhooks: Webhooks, url: str, hooks: Hooks) -> None:
    programs: list[Program] = []

    def answer(arrived: Arrived) -> Answer:
        if len(hooks.arrived) == 1:
            programs[0].kill()
        return OK

    hooks.answer = answer
    webhooks.endpoints.create(hooks.url(), order="fifo")
    ids = send(webhooks, *range(3))
    with Program([sys.executable, SCRIPT, url]) as program:
        programs.append(program)
        assert program.wait(WAIT) == -signal.SIGKILL
    sender = Sender(webhooks)
    assert sender.run_once() == 0  # its lease is held, and nothing overtakes it
    Clock(webhooks.guard.store).advance(50)
    assert sender.run_once() == 3
    assert hooks.ids == [ids[0], *ids]


def test_killed_between_disabling_and_parking_leaves_nothing_pending(
    webhooks: Webhooks, url: str, hooks: Hooks
) -> None:
    hooks.answer = lambda _: response(410)
    endpoint = webhooks.endpoints.create(hooks.url(), order="fifo")
    send(webhooks, *range(3))
    with Program([sys.executable, SCRIPT, url, "before park"]) as program:
        assert program.wait(WAIT) == -signal.SIGKILL
    assert webhooks.endpoints.get(endpoint.id).state == "disabled"
    Sender(webhooks).run_once()
    assert webhooks.stats() == {"pending": 0, "delivered": 0, "dead": 1, "parked": 2}


def test_sigterm_finishes_the_request_under_way(webhooks: Webhooks, url: str, hooks: Hooks) -> None:
    asked = threading.Event()

    async def slow(reader: Any, writer: Any) -> None:
        asked.set()
        await asyncio.sleep(1.0)
        writer.write(OK)
        await writer.drain()

    hooks.answer = lambda _: slow
    webhooks.endpoints.create(hooks.url())
    send(webhooks, 1)
    with Program([sys.executable, SCRIPT, url]) as program:
        assert asked.wait(WAIT)
        program.send_signal(signal.SIGTERM)
        assert program.wait(WAIT) == 0
    (delivery,) = webhooks.deliveries.list()
    assert (delivery.state, len(hooks.arrived)) == ("delivered", 1)


def test_three_senders_deliver_each_once_and_in_order(webhooks: Webhooks, url: str, hooks: Hooks) -> None:
    for n in range(10):
        webhooks.endpoints.create(hooks.url(f"/free{n}"))
    webhooks.endpoints.create(hooks.url("/fifo"), order="fifo")
    webhooks.endpoints.create(hooks.url("/subject"), order="subject")
    programs = [Program([sys.executable, SCRIPT, url]) for _ in range(3)]
    try:
        for n in range(50):
            send(webhooks, [n, 0], [n, 1], subject=f"s{n % 5}")
        until(lambda: webhooks.stats()["delivered"] == 1200)
        for program in programs:
            program.send_signal(signal.SIGTERM)
        assert [program.wait(WAIT) for program in programs] == [0, 0, 0]
    finally:
        for program in programs:
            program.kill()
            program.__exit__()
    counts = collections.Counter((each.path, each.id) for each in hooks.arrived)
    assert (len(counts), set(counts.values())) == (1200, {1})
    assert [each.data for each in hooks.arrived if each.path == "/fifo"] == [[n, m] for n in range(50) for m in (0, 1)]
    for rest in range(5):
        found = [each.data for each in hooks.arrived if each.path == "/subject" and each.data[0] % 5 == rest]
        assert found == [[n, m] for n in range(rest, 50, 5) for m in (0, 1)]


def test_send_wakes_a_sender_of_the_same_process(
    webhooks: Webhooks, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncemore.webhooks.sender.SHORTEST_POLL", 3600.0)
    monkeypatch.setattr("oncemore.webhooks.sender.LONGEST_POLL", 3600.0)
    webhooks.endpoints.create(hooks.url())
    sender = Sender(webhooks)
    thread = threading.Thread(target=sender.run)
    thread.start()
    try:
        for n in range(3):
            until(lambda: sender._running is not None and sender._running.waiter._wake is not None)  # it waits
            send(webhooks, n)
            until(lambda n=n: webhooks.stats()["delivered"] == n + 1)
    finally:
        sender.stop()
        thread.join(WAIT)
    assert not thread.is_alive()
    assert hooks.data == [0, 1, 2]


@pytest.mark.server
def test_send_wakes_a_sender_of_another_process(postgres_url: str, postgres_schema: str, hooks: Hooks) -> None:
    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}schema={postgres_schema}"
    guard, other = Guard(url, policy=Policy(effect="transaction")), Guard(url)
    webhooks = Webhooks(guard, allow=LOOPBACK, allow_http=True)
    heard = threading.Event()
    other.store.wakeups.subscribe(lambda id: heard.set() if id == ("oncemore.webhooks", "") else None)
    Webhooks(other).tables.access.listen()

    def sent() -> bool:  # the listener may not be connected yet
        send(webhooks, 1)
        return heard.wait(0.5)

    until(sent)
    guard.close()
    other.close()


def test_cancelled_sender_finishes_its_requests(webhooks: Webhooks, hooks: Hooks) -> None:
    async def slow(reader: Any, writer: Any) -> None:
        await asyncio.sleep(0.5)
        writer.write(OK)
        await writer.drain()

    hooks.answer = lambda _: slow
    webhooks.endpoints.create(hooks.url())

    async def main() -> None:
        task = asyncio.create_task(Sender(webhooks).arun())
        await asyncio.to_thread(send, webhooks, 1)
        async with asyncio.timeout(WAIT):
            while not hooks.arrived:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    (delivery,) = webhooks.deliveries.list()
    assert (delivery.state, delivery.attempts) == ("delivered", 1)


def test_stopped_sender_gives_back_slow_requests(webhooks: Webhooks, hooks: Hooks) -> None:
    async def hang(reader: Any, writer: Any) -> None:
        await reader.read()

    hooks.answer = lambda arrived: hang if len(hooks.arrived) == 1 else OK
    webhooks.endpoints.create(hooks.url())
    send(webhooks, 1)
    sender = Sender(webhooks, grace="100ms")
    thread = threading.Thread(target=sender.run)
    thread.start()
    until(lambda: hooks.arrived)
    sender.stop()
    thread.join(WAIT)
    (delivery,) = webhooks.deliveries.list()
    assert (delivery.state, delivery.attempts, delivery.error) == ("pending", 0, "the sender was stopped")
    assert webhooks.deliveries.attempts(delivery.id) == []
    assert Sender(webhooks).run_once() == 1  # at once
    assert len(set(hooks.ids)) == 1


def test_result_recorded_twice_is_one_attempt(webhooks: Webhooks, hooks: Hooks, monkeypatch: Any) -> None:
    from oncemore.errors import StoreUnavailable

    record, lost = Results.record, []

    def lose_first_answer(self: Results, attempts: Any) -> Any:
        yield from record(self, attempts)
        if not lost:
            lost.append(attempts)
            raise StoreUnavailable("the answer to the commit was lost")

    monkeypatch.setattr(Results, "record", lose_first_answer)
    hooks.answer = lambda arrived: response(500 if arrived.path == "/bad" else 200)
    webhooks.endpoints.create(hooks.url("/bad"))
    webhooks.endpoints.create(hooks.url("/fifo"), order="fifo")
    send(webhooks, 1, 2)
    sender = Sender(webhooks)
    thread = threading.Thread(target=sender.run)
    thread.start()
    until(lambda: webhooks.stats()["delivered"] == 2 and lost)
    sender.stop()
    thread.join(WAIT)
    for delivery in webhooks.deliveries.list():
        attempts = webhooks.deliveries.attempts(delivery.id)
        assert [each.number for each in attempts] == list(range(1, delivery.attempts + 1))
    fifo = [each.data for each in hooks.arrived if each.path == "/fifo"]
    assert fifo == [1, 2]


@pytest.fixture
def on_postgres(postgres_url: str, postgres_schema: str) -> Iterator[Webhooks]:
    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}schema={postgres_schema}"
    guard = Guard(url, policy=Policy(effect="transaction"))
    yield Webhooks(guard, allow=LOOPBACK, allow_http=True)
    guard.close()


@pytest.mark.server
def test_open_transaction_holds_back_ordered_endpoints_only(
    on_postgres: Webhooks, postgres_url: str, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    monkeypatch.setattr("oncemore.webhooks.claims.PAGE", 3)
    webhooks = on_postgres
    webhooks.endpoints.create(hooks.url("/free"), tenant="free")
    webhooks.endpoints.create(hooks.url("/fifo"), tenant="fifo", order="fifo")
    sender = Sender(webhooks)
    sender.run_once()
    with psycopg.connect(postgres_url) as late:
        webhooks.send(late, "a", "late", tenant="fifo")  # the first number, committed last
        send(webhooks, *range(10), tenant="fifo")
        send(webhooks, *range(5), tenant="free")
        assert sender.run_once() == 5  # they stand behind two pages of messages that wait
        assert sender.run_once() == 0
        late.commit()
    assert sender.run_once() == 11
    assert [each.data for each in hooks.arrived if each.path == "/fifo"] == ["late", *range(10)]


@pytest.mark.server
def test_message_of_a_restored_dump_does_not_wait(
    on_postgres: Webhooks, postgres_url: str, postgres_schema: str, hooks: Hooks
) -> None:
    """The transactions of the dumped server have larger numbers than those of this server."""
    import psycopg

    on_postgres.endpoints.create(hooks.url(), order="fifo")
    send(on_postgres, "before", "the dump")
    with psycopg.connect(postgres_url) as connection:
        table = f"{postgres_schema}.oncemore_webhook_messages"
        connection.execute(f"UPDATE {table} SET xid = '9000000000000'".encode())
    send(on_postgres, "after it")
    assert Sender(on_postgres).run_once() == 3
    assert hooks.data == ["before", "the dump", "after it"]


@pytest.mark.server
def test_recover_sends_deliveries_matched_during_enable(
    on_postgres: Webhooks, postgres_url: str, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender has read that the endpoint is disabled, and commits only after it was enabled."""
    import psycopg

    webhooks = on_postgres
    endpoint = webhooks.endpoints.create(hooks.url(), disabled=True)
    match, matched, may_commit = MatchingPass._match, threading.Event(), threading.Event()

    def slow(self: MatchingPass, *args: Any) -> Any:
        result = yield from match(self, *args)
        matched.set()
        assert may_commit.wait(WAIT)
        return result

    monkeypatch.setattr(MatchingPass, "_match", slow)
    send(webhooks, 1)
    with ThreadPoolExecutor() as threads:
        matching = threads.submit(lambda: run(MatchingPass(webhooks).match_page()))
        assert matched.wait(WAIT)
        webhooks.endpoints.enable(endpoint.id)
        recovering = threads.submit(webhooks.recover, endpoint.id, 0, only="missing")
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            waiting = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            until(lambda: recovering.done() or connection.execute(waiting).rowcount)
        may_commit.set()
        assert (matching.result(), recovering.result()) == (1, 1)
    assert Sender(webhooks).run_once() == 1


@pytest.mark.server
def test_recover_sends_deliveries_given_back_during_enable(
    on_postgres: Webhooks, postgres_url: str, postgres_schema: str, hooks: Hooks
) -> None:
    """A sender has read that the endpoint is disabled, and parks the delivery only after it was enabled."""
    import psycopg

    webhooks = on_postgres
    endpoint = webhooks.endpoints.create(hooks.url())
    send(webhooks, 1)
    run(MatchingPass(webhooks).match_page())
    claims = Claims(webhooks, concurrency=1, lease=50)
    (claimed,) = run(claims.claim(1))
    webhooks.endpoints.disable(endpoint.id)
    result = Result(tried=False)

    def recover() -> int:
        webhooks.endpoints.enable(endpoint.id)
        return webhooks.recover(endpoint.id, 0, only="missing")

    with psycopg.connect(postgres_url, autocommit=True) as server, ThreadPoolExecutor() as threads:
        waiting = "SELECT FROM pg_locks WHERE NOT granted"
        with psycopg.connect(postgres_url) as slow:
            slow.execute(f"SELECT FROM {postgres_schema}.oncemore_webhook_deliveries FOR UPDATE".encode())
            recording = threads.submit(lambda: run(Results(webhooks).record([(claimed, result)])))
            until(lambda: server.execute(waiting).rowcount)
            recovering = threads.submit(recover)
            until(lambda: recovering.done() or server.execute(waiting).rowcount > 1)
        recording.result()
        assert recovering.result() == 1
    assert Sender(webhooks).run_once() == 1


def test_sender_that_stood_still_sends_nothing_late(
    webhooks: Webhooks, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, stood_still = Claims.claim, []

    def claim_and_stand_still(self: Claims, *args: Any, **options: Any) -> Any:
        claimed = yield from claim(self, *args, **options)
        if claimed and not stood_still:
            stood_still.append(50)
            Clock(webhooks.guard.store).advance(50)
            for each in claimed:
                each.began -= 50
            with ThreadPoolExecutor() as threads:  # meanwhile another sender takes over
                assert threads.submit(Sender(webhooks).run_once).result() == 2
        return claimed

    monkeypatch.setattr(Claims, "claim", claim_and_stand_still)
    webhooks.endpoints.create(hooks.url(), order="fifo")
    send(webhooks, 1, 2)
    assert Sender(webhooks).run_once() == 0
    assert hooks.data == [1, 2]
    assert webhooks.stats()["delivered"] == 2


def test_disabling_parks_a_large_backlog_in_slices(
    webhooks: Webhooks, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other endpoints wait for a round of the sender, so it parks no more than a few slices."""
    monkeypatch.setattr("oncemore.webhooks.endpoints.SLICE", 2)
    rounds: list[int] = []
    go, query = SenderRun._round, Tables.query

    async def counted_round(self: SenderRun, *args: Any) -> int:
        rounds.append(0)
        return await go(self, *args)

    def counted_query(self: Tables, statement: Any, *values: Any) -> Any:
        if statement is sql.PARK and rounds:
            rounds[-1] += 1
        return query(self, statement, *values)

    hooks.answer = lambda arrived: response(410 if arrived.path == "/gone" else 200)
    webhooks.endpoints.create(hooks.url("/gone"), order="fifo")
    webhooks.endpoints.create(hooks.url("/well"), order="fifo")
    send(webhooks, *range(20))
    monkeypatch.setattr(SenderRun, "_round", counted_round)
    monkeypatch.setattr(Tables, "query", counted_query)
    sender = Sender(webhooks)
    assert sender.run_once() == 20
    assert max(rounds) <= 2
    while webhooks.stats()["pending"]:
        assert sender.run_once() == 0
    assert webhooks.stats() == {"pending": 0, "delivered": 20, "dead": 1, "parked": 19}


async def to_nothing(*_: Any) -> None:
    return


def test_message_recovered_while_it_is_purged_is_kept(
    webhooks: Webhooks, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer deliveries of an ordered endpoint wait for the old one."""
    monkeypatch.setattr(SenderRun, "_keep_house", to_nothing)
    endpoint = webhooks.endpoints.create(hooks.url(), order="fifo")
    sender, execute = Sender(webhooks), Tables.execute
    send(webhooks, "old")
    sender.run_once()
    Clock(webhooks.guard.store).advance(webhooks.keep + 1)
    send(webhooks, "new")
    sender.run_once()

    def recover_first(self: Tables, *queries: Any, **options: Any) -> Any:
        if len(queries) > 1:
            monkeypatch.setattr(Tables, "execute", execute)
            assert webhooks.recover(endpoint.id, 0, only="all") == 2
        return (yield from execute(self, *queries, **options))

    monkeypatch.setattr(Tables, "execute", recover_first)
    webhooks.purge()
    assert sender.run_once() == 2
    assert hooks.data == ["old", "new", "old", "new"]
    assert webhooks.purge() == 1
