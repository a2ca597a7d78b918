"""The keyring in a ledger, on real servers: killed at any point, the client is continued by the next, with one effect."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from oncemore import Guard
from oncemore._ledger.connect import connect
from oncemore._ledger.model import Record
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Sleep, arun, run
from oncemore.client.errors import KeyringError, OutcomeUnknown, RetriesExhausted
from oncemore.client.httpx import AsyncRetryTransport, HttpxRequest, RetryTransport
from oncemore.client.keyring import open_keyring
from oncemore.client.keyring.entry import Entry
from oncemore.client.keyring.ledger import MAX_FAILED, NAME, LedgerKeyring, operation_of
from oncemore.client.retry import Retry
from oncemore.encryption import Seal
from oncemore.errors import StoreUnavailable
from tests.chaos.killed_client import BODY, BRIEF, CREDENTIALS, LEASE
from tests.support import processes

from ..support.processes import separate_processes
from . import clients
from .clients import CLIENTS, Httpx
from .server import Server, Visit, answer, effect, performed, reset, then
from .test_keyring import adopt_all, claim, entry

RETRY = Retry(base=0.01, budget=None)
JSON = {"Content-Type": "application/json"}


def briefly(place: str) -> str:
    """The ledger's URL, with a lease that tests can wait for."""
    return f"{place}&lease={LEASE}s"


def kill(visit: Visit) -> None:
    os.kill(int(visit.headers["x-pid"]), signal.SIGKILL)


def run_killed(library: str, point: str, url: str, place: str) -> None:
    command = [sys.executable, "-m", "tests.chaos.killed_client", library, point, url, place]
    ended = processes.run_to_end(command)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    time.sleep(BRIEF + 0.1)


def resumed(library: str, place: str) -> tuple[list[Entry], list[Any]]:
    client = CLIENTS[library](RETRY, briefly(place))
    client.headers = CREDENTIALS
    return clients.resumed(client)


def stored_requests(place: str) -> int:
    with closing(connect(place)) as store:
        records = [run(store.find(*record.id)) for record in run(store.list(Filter(name=NAME))).records]
        return sum(bool(record and record.request) for record in records)


def assert_one_operation(server: Server) -> None:
    assert list(server.effects.values()) == [1]
    assert {(visit.key, visit.body, visit.headers["content-type"]) for visit in server.visits} == {
        (server.visits[0].key, BODY, "application/json")
    }


# The verbs of one call: 1 claims the record and stores the request, then it is sent; 2 settles.


@pytest.mark.chaos
def test_client_killed_before_claim_sends_and_leaves_nothing(ledger: str) -> None:
    with Server() as server:
        run_killed("httpx", "before verb 1", server.url, ledger)
        assert resumed("httpx", ledger) == ([], [])
    assert not server.visits


@pytest.mark.chaos
@pytest.mark.parametrize(("point", "effects"), [("after verb 1", 0), ("before verb 2", 1)])
@pytest.mark.parametrize("library", ["httpx", "aiohttp"])
def test_client_killed_between_claim_and_settle_is_resumed(library: str, point: str, effects: int, ledger: str) -> None:
    with Server() as server:
        run_killed(library, point, server.url, ledger)
        assert len(server.effects) == effects
        before, results = resumed(library, ledger)
    assert [one.state for one in before] == ["sending"]
    assert [result.error for result in results] == [None]
    assert_one_operation(server)
    assert stored_requests(ledger) == 0


@pytest.mark.chaos
def test_client_killed_after_settle_leaves_nothing_to_resume(ledger: str) -> None:
    with Server() as server:
        run_killed("httpx", "after verb 2", server.url, ledger)
        assert resumed("httpx", ledger) == ([], [])
    assert_one_operation(server)
    assert stored_requests(ledger) == 0


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["before the effect", "after the effect", "between two attempts"])
def test_client_killed_while_sending_is_resumed(moment: str, ledger: str) -> None:
    acts = {
        "before the effect": [kill],
        "after the effect": [then(effect, kill)],
        "between two attempts": [answer(503), then(answer(503), kill)],
    }[moment]
    with Server(*acts, default=performed()) as server:
        run_killed("httpx", "on the wire", server.url, ledger)
        _, results = resumed("httpx", ledger)
    assert [result.error for result in results] == [None]
    assert_one_operation(server)


# Many processes


def resume_in_a_process(place: str, begin: Any) -> int:
    client: Any = Httpx(RETRY, briefly(place))
    client.headers = CREDENTIALS
    begin.wait(30)
    return len(client.resume())


@pytest.mark.chaos
def test_concurrent_resumers_send_each_entry_once(ledger: str) -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def slowly(visit: Visit) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(2 * LEASE)  # its lease is renewed meanwhile
        performed()(visit)
        with lock:
            at_once -= 1

    context = separate_processes()
    with Server(kill, default=slowly) as server, context.Manager() as manager:
        run_killed("httpx", "on the wire", server.url, ledger)
        begin = manager.Barrier(3)
        with context.Pool(3) as pool:
            counts = pool.starmap(resume_in_a_process, [(ledger, begin)] * 3)
        assert resumed("httpx", ledger) == ([], [])
    assert sorted(counts) == [0, 0, 1]
    assert most == 1
    assert len(server.visits) == 2
    assert_one_operation(server)


@pytest.mark.chaos
def test_living_process_keeps_its_entries(ledger: str) -> None:
    """Also for much longer than its lease."""
    looked: list[Any] = []

    def look(visit: Visit) -> None:
        time.sleep(2 * LEASE)
        looked.append(resumed("httpx", ledger))

    with Server(then(look, performed())) as server:
        command = [sys.executable, "-m", "tests.chaos.killed_client", "httpx", "never", server.url, ledger]
        processes.run_to_end(command).check_returncode()
    assert looked == [([], [])]
    assert len(server.visits) == 1


def test_request_is_stored_before_first_byte_is_sent(ledger: str) -> None:
    seen = []

    def look(visit: Visit) -> None:
        with closing(connect(ledger)) as store:
            seen.extend(record.state for record in run(store.list(Filter(name=NAME))).records)
        seen.append(stored_requests(ledger))

    with Server(then(look, performed())) as server:
        Httpx(RETRY, ledger).request("POST", server.url, BODY, JSON)
    assert seen == ["running", 1]
    assert stored_requests(ledger) == 0


# States, through the transports


def test_past_the_servers_memory_it_says_unknown_and_sends_nothing(ledger: str) -> None:
    short = Retry(base=0.001, attempts=2, deadline=1.0, key_lifetime=2.0, budget=None)
    own = {"Idempotency-Key": "order-17"}
    with Server(*[then(effect, reset)] * 2) as server:
        with pytest.raises(RetriesExhausted):
            Httpx(short, ledger).request("POST", server.url, BODY, own)
        time.sleep(1.1)
        with pytest.raises(OutcomeUnknown):
            Httpx(short, ledger).request("POST", server.url, BODY, own)
        client = Httpx(short, ledger)
        assert isinstance(client.resume(opened=True)[0].error, OutcomeUnknown)
        assert [one.state for one in client.pending()] == ["open"]
        client.transport.forget(client.pending()[0])
        assert client.pending() == []
    assert len(server.visits) == 2
    assert stored_requests(ledger) == 0


def test_own_key_is_sent_before_dead_lease_lapses(ledger: str) -> None:
    """It sends at once; the entry of the dead process can still be resumed."""
    own = {"Idempotency-Key": "order-17", **JSON}
    place = briefly(ledger)
    ring = open_keyring(place)
    with Server() as server:
        client = Httpx(RETRY, ring)
        with pytest.raises(KeyboardInterrupt):
            run(claimed_and_interrupted(client.transport, server.url))
        ring.heartbeat.close()  # type: ignore[attr-defined]  # as if its process had died
        assert Httpx(RETRY, place).request("POST", f"{server.url}/", BODY, own).status == 201
        time.sleep(LEASE + 0.2)
        assert [one.key for one in Httpx(RETRY, place).pending()] == ["order-17"]
        results = Httpx(RETRY, place).resume()
    assert [result.error for result in results] == [None]
    assert list(server.effects.values()) == [1]
    assert stored_requests(ledger) == 0


def claimed_and_interrupted(transport: RetryTransport, url: str) -> Iterator[Any]:
    """Written down, and never heard of again."""
    headers = {"Idempotency-Key": "order-17", **JSON}
    request = httpx.Request("POST", f"{url}/", content=BODY, headers=headers)
    sent = HttpxRequest(request, None)
    transport.engine.prepare(sent)
    one = transport.engine._entry(sent, BODY)
    yield from transport.engine.keyring.claim(one, oldest=0)  # type: ignore[union-attr]
    raise KeyboardInterrupt


async def test_one_cancelled_while_it_is_written_down_leaves_nothing(ledger: str) -> None:
    transport = AsyncRetryTransport(RETRY, ledger)
    with Server() as server:
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            await client.post(server.url, content=BODY)  # opens the connections
            for steps in range(0, 30, 3):
                task = asyncio.create_task(client.post(server.url, content=b"%d" % steps))
                for _ in range(steps):
                    await asyncio.sleep(0)
                sent = len(server.visits)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if len(server.visits) == sent:
                    assert all(one.state == "open" for one in await transport.pending())
            assert await transport.resume() == []


# Failures of the ledger


def test_a_ledger_that_cannot_be_reached_sends_nothing() -> None:
    with Server() as server, pytest.raises(KeyringError, match=r"127\.0\.0\.1:9"):
        Httpx(RETRY, "postgresql://me:hidden@127.0.0.1:9/x?timeout=0.2s").request("POST", server.url, BODY)
    assert not server.visits


class Failing:
    """A store whose named verbs fail from the *after*-th call on."""

    def __init__(self, store: Any, *verbs: str, after: int = 0) -> None:
        self.store, self.verbs, self.left = store, verbs, after

    def __getattr__(self, name: str) -> Any:
        if name in self.verbs:
            self.left -= 1
            if self.left < 0:
                raise StoreUnavailable("the ledger is gone")
        return getattr(self.store, name)


def test_a_ledger_that_fails_afterwards_does_not_lose_the_answer(caplog: Any) -> None:
    store: Any = Failing(connect("memory://"), "settle")
    with Server() as server:
        assert Httpx(RETRY, store).request("POST", server.url, BODY).status == 201
    assert "stays pending" in caplog.text


def test_claim_that_fails_leaves_the_key_free() -> None:
    inner = connect("memory://")
    with pytest.raises(KeyringError):
        claim(LedgerKeyring(Failing(inner, "claim")), entry())  # type: ignore[arg-type]
    assert claim(LedgerKeyring(inner), entry(body=b"other", token=2)).body == b"other"


class FailingOver(Failing):
    """A ledger that writes the claim and then breaks down, before it could answer."""

    def claim(self, *arguments: Any, **options: Any) -> Any:
        found = yield from self.store.claim(*arguments, **options)
        if isinstance(found, Record):
            return found
        self.verbs = ("find", "release", "renew")
        raise StoreUnavailable("the ledger is gone")


def test_claim_whose_answer_was_lost_is_withdrawn_and_never_sent() -> None:
    """Its caller was told that nothing was sent, and makes a new key: to resume this one would do it twice."""
    inner = connect("memory://")
    store: Any = FailingOver(inner)
    with closing(LedgerKeyring(store, lease=0.3)) as ring:
        with pytest.raises(KeyringError):
            claim(ring, entry())
        time.sleep(0.2)  # it is still down
        store.verbs = ()
        eventually(lambda: run(inner.find(*operation_of(entry()).id)) is None)
        time.sleep(0.4)
        assert adopt_all(LedgerKeyring(inner), opened=True) == []
        eventually(lambda: not ring.heartbeat.threads.renewals)


def test_failed_claims_of_long_outage_are_bounded() -> None:
    inner = connect("memory://")
    store = Failing(inner, "claim", "find")
    with closing(LedgerKeyring(store, lease=0.06)) as ring:  # type: ignore[arg-type]
        for number in range(MAX_FAILED + 10):
            with pytest.raises(KeyringError):
                claim(ring, entry(f"k{number}"))
        assert len(ring._failed) <= MAX_FAILED
        assert len(ring.heartbeat.threads.renewals) <= 2
        store.verbs = ()
        eventually(lambda: not ring._failed and not ring.heartbeat.threads.renewals)


def test_claim_whose_answer_was_lost_keeps_an_earlier_attempt_pending() -> None:
    inner = connect("memory://")
    first = LedgerKeyring(inner, lease=0.1)
    claim(first, entry())
    first.heartbeat.close()  # as if its process had died
    time.sleep(0.15)
    store: Any = FailingOver(inner)
    with closing(LedgerKeyring(store, lease=0.3)) as ring:
        with pytest.raises(KeyringError):
            claim(ring, entry(token=3))
        store.verbs = ()
        eventually(lambda: not ring.heartbeat.threads.renewals)
        time.sleep(0.3)
        assert [one.key for one in adopt_all(LedgerKeyring(inner))] == ["k1"]


def test_first_failed_claims_of_an_outage_are_withdrawn() -> None:
    """The first was written and its answer lost; the many after it did not reach the ledger."""
    inner = connect("memory://")
    store: Any = FailingOver(inner)
    with closing(LedgerKeyring(store, lease=0.3)) as ring:
        with pytest.raises(KeyringError):
            claim(ring, entry())
        ring.store = Failing(inner, "claim", "find")  # type: ignore[assignment]
        for number in range(MAX_FAILED + 10):
            with pytest.raises(KeyringError):
                claim(ring, entry(f"later-{number}", token=number + 2))
        ring.store = inner
        eventually(lambda: run(inner.find(*operation_of(entry()).id)) is None)


def test_failed_claim_of_ended_loop_is_withdrawn_later() -> None:
    inner = connect("memory://")
    store: Any = FailingOver(inner)

    async def claim_on_a_loop() -> None:
        with pytest.raises(KeyringError):
            await arun(ring.claim(entry(), oldest=0))

    with closing(LedgerKeyring(store, lease=0.3)) as ring:
        asyncio.run(claim_on_a_loop())
        ring.store = inner
        time.sleep(0.4)
        claim(ring, entry("later", token=2))
        eventually(lambda: run(inner.find(*operation_of(entry()).id)) is None)


@pytest.mark.parametrize("broken", ["claim", "find"])
def test_open_entry_stays_open_if_ledger_fails_meanwhile(broken: str) -> None:
    """Its caller knows of it, so no other process may send it by itself."""
    inner = connect("memory://")
    first = LedgerKeyring(inner)
    run(first.leave(claim(first, entry())))
    store: Any = FailingOver(inner) if broken == "claim" else Failing(inner, "find")
    with closing(LedgerKeyring(store, lease=0.3)) as ring:
        with pytest.raises(KeyringError):
            claim(ring, entry(token=2))
        assert not ring._sending
        store.verbs = ()
        eventually(lambda: not ring._failed)
        time.sleep(0.4)
        assert [one.state for one in run(first.pending())] == ["open"]


class Pausing:
    """A store whose `find` lets others run first."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def find(self, *arguments: Any) -> Any:
        yield Sleep(0.05)
        return (yield from self.store.find(*arguments))


async def test_open_entry_stays_open_if_cancelled_while_it_is_continued() -> None:
    inner = connect("memory://")
    first = LedgerKeyring(inner)
    run(first.leave(claim(first, entry(body=b"x"))))
    ring = LedgerKeyring(Pausing(inner), lease=0.2)  # type: ignore[arg-type]
    one = entry(body=b"x", token=2)
    task = asyncio.create_task(arun(ring.claim(one, oldest=0)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await arun(ring.leave(one))  # as the engine does
    await asyncio.sleep(0.3)
    assert [known.state for known in await arun(first.pending())] == ["open"]


def test_a_renewal_that_fails_is_tried_again(caplog: Any) -> None:
    store = Failing(connect("memory://"), "renew")
    ring = LedgerKeyring(store, lease=0.15)  # type: ignore[arg-type]
    with caplog.at_level("INFO", "oncemore.client"), closing(ring):
        held = claim(ring, entry())
        eventually(lambda: caplog.text.count("could not be renewed") >= 2)
        run(ring.settle(held, 201))


def eventually(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


# One's own run, and those of others


def test_taken_over_process_changes_nothing(ledger: str) -> None:
    """Frozen for longer than its lease, it comes back with an answer."""
    with closing(connect(ledger)) as store:
        frozen, other = LedgerKeyring(store, lease=0.2), LedgerKeyring(store, lease=30.0)
        held = claim(frozen, entry())
        frozen.heartbeat.close()
        time.sleep(0.3)
        (adopted,) = adopt_all(other)
        for verb in (frozen.settle(held, 201), frozen.leave(held), frozen.forget(replace(held, token=99))):
            run(verb)
        again = claim(other, replace(adopted, created_at=time.time()))
        assert again.created_at == adopted.created_at
        assert run(other.pending()) == []
        run(other.settle(again, 201))
        assert adopt_all(other, opened=True) == []


def test_a_forgotten_one_is_as_if_it_had_never_been(ledger: str) -> None:
    with closing(open_keyring(ledger)) as ring:
        run(ring.forget(claim(ring, entry())))
        assert run(ring.pending()) == []
        assert claim(ring, entry(body=b"other", token=2)).body == b"other"


def test_what_was_adopted_and_then_forgotten_is_not_continued(ledger: str) -> None:
    with closing(open_keyring(ledger)) as ring:
        run(ring.leave(claim(ring, entry())))
        (adopted,) = adopt_all(ring, opened=True)
        run(ring.forget(adopted))
        assert claim(ring, entry(body=b"other", token=2)).body == b"other"


def test_reopened_entry_stays_open_after_crash(ledger: str) -> None:
    with closing(connect(ledger)) as store:
        ring = LedgerKeyring(store)
        run(ring.leave(claim(ring, entry())))
        run(ring._reopen(entry()))
        assert [one.state for one in run(ring.pending())] == ["open"]
        assert adopt_all(ring) == []
        assert claim(ring, entry(token=2, created_at=time.time())).token == 2
        run(ring.settle(entry(token=2), 201))
        assert adopt_all(ring, opened=True) == []


def test_many_at_once_are_all_settled(ledger: str) -> None:
    with Server() as server, closing(RetryTransport(RETRY, ledger)) as transport:
        with httpx.Client(transport=transport, timeout=30) as client, ThreadPoolExecutor(8) as threads:
            statuses = list(threads.map(lambda n: client.post(server.url, content=b"%d" % n).status_code, range(40)))
        assert statuses == [201] * 40
        assert transport.pending() == []
    assert stored_requests(ledger) == 0


def test_more_than_a_page_can_be_pending() -> None:
    store = connect("memory://")
    ring = LedgerKeyring(store)
    for number in range(120):
        run(ring.leave(claim(ring, entry(f"k{number}", token=number + 1))))
    assert len(run(ring.pending())) == 120
    assert len(adopt_all(ring, opened=True)) == 120


def test_a_guards_seal_also_covers_what_is_to_be_sent() -> None:
    guard = Guard("memory://", seal=Seal([b"k" * 32]))
    ring = open_keyring(guard)
    run(ring.leave(claim(ring, entry())))
    assert [one.body for one in run(ring.pending())] == [entry().body]
    inner: Any = guard.store.inner  # type: ignore[attr-defined]
    assert [b"amount" in record.request for record in inner._records.values()] == [False]


def test_a_store_that_others_use_is_neither_closed_nor_purged() -> None:
    closed: list[str] = []
    store: Any = connect("memory://")
    store.close = lambda: closed.append("close")
    store.purge = lambda: closed.append("purge")
    ring = open_keyring(store)
    adopt_all(ring)
    ring.close()
    asyncio.run(ring.aclose())
    assert closed == []


def test_forked_child_does_not_inherit_adopted_entries() -> None:
    ring = LedgerKeyring(connect("memory://"))
    run(ring.leave(claim(ring, entry())))
    adopt_all(ring, opened=True)
    child = os.fork()
    if child == 0:
        os._exit(int(bool(ring._sending)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert claim(ring, entry(token=2)).token == 2


# A second sender, and the age of a key


def test_second_sender_of_a_key_just_sends_and_changes_nothing() -> None:
    store = connect("memory://")
    first, second = LedgerKeyring(store), LedgerKeyring(store)
    held = claim(first, entry())
    beside = claim(second, entry(token=2))
    assert (beside.token, beside.created_at) == (2, held.created_at)
    for ending in (second.leave(beside), second.settle(beside, 201), second.forget(beside)):
        run(ending)
    record = run(store.find(*operation_of(held).id))
    assert record is not None
    assert record.state == "running"
    run(first.settle(held, 201))
    assert adopt_all(second, opened=True) == []
    assert claim(second, entry(token=3)).created_at == held.created_at  # it has its answer, and is sent all the same


def test_key_age_counts_from_first_claim_after_crashes() -> None:
    store: Any = connect("memory://")
    oldest = time.time() - 3600
    for token, age in ((1, 0), (2, 2000), (3, 3590)):
        store.shift = float(age)
        dead = LedgerKeyring(store)
        held = run(dead.claim(entry(token=token), oldest=oldest))
        assert held.token == token
        assert held.created_at == pytest.approx(time.time() - age, abs=5)
        dead.heartbeat.close()
    store.shift = 3700.0
    (adopted,) = adopt_all(LedgerKeyring(store))
    assert adopted.created_at < oldest
    store.shift = 3800.0
    assert run(LedgerKeyring(store).claim(entry(token=4), oldest=oldest)).token != 4
    assert [one.state for one in run(LedgerKeyring(store).pending())] == ["open"]
