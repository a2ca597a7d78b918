"""The PostgreSQL store keeps its word when connections are cut, stalled or refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from oncemore._ledger.model import Lease, Operation
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import OncemoreError, StoreError, StoreTimeout, StoreUnavailable
from oncemore.stores.postgres import PostgresStore
from oncemore.testing.proxy import FaultProxy
from oncemore.testing.store_contract import DONE, LEASE, RETENTION

from .parts import until

Drive = Callable[[Plan[Any]], Any]


# The network


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[FaultProxy]:
    with FaultProxy.before(postgres_url) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: FaultProxy, url: str) -> Iterator[PostgresStore]:
    """The store behind the proxy, with its connections open."""
    store = PostgresStore(f"{proxy.url(url)}&listen=false")
    yield store
    proxy.heal()
    store.close()


@pytest.fixture(params=["run", "arun"])
def drive(request: pytest.FixtureRequest, far: PostgresStore) -> Iterator[Drive]:
    if request.param == "run":
        yield run
        return
    with asyncio.Runner() as runner:
        yield lambda plan: runner.run(arun(plan))
        runner.run(far.aclose())


@contextmanager
def healed_soon(proxy: FaultProxy, seconds: float = 0.3) -> Iterator[None]:
    timer = threading.Timer(seconds, proxy.heal)
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("fault", ["cut_answers", "refuse"])
def test_a_claim_whose_answer_was_lost_gets_its_own_lease_again(
    far: PostgresStore, store: PostgresStore, proxy: FaultProxy, drive: Drive, fault: str
) -> None:
    """CASES 26: the server had granted it; the retry must not take it for someone else's."""
    drive(far.claim(Operation("s", "warm"), lease=LEASE))
    getattr(proxy, fault)()
    with healed_soon(proxy):
        lease = drive(far.claim(Operation("s", "k"), lease=LEASE))
    record = run(store.find("s", "k"))
    assert isinstance(lease, Lease)
    assert (lease.token, lease.attempt, lease.lapsed) == (record.token, 1, False)
    drive(far.settle(lease, DONE, retention=RETENTION))


def test_a_claim_whose_answer_was_lost_is_its_own_even_after_its_lease(
    far: PostgresStore, proxy: FaultProxy, drive: Drive
) -> None:
    drive(far.claim(Operation("s", "warm"), lease=LEASE))
    proxy.cut_answers()
    with healed_soon(proxy):
        lease = drive(far.claim(Operation("s", "k"), lease=0.01))
    assert (lease.attempt, lease.lapsed) == (1, False)


def test_writes_whose_answers_were_lost_are_done_once(
    far: PostgresStore, store: PostgresStore, proxy: FaultProxy, drive: Drive
) -> None:
    leases = [drive(far.claim(Operation("s", verb), lease=LEASE)) for verb in ("settle", "release", "hold", "renew")]
    drive(far.renew(leases[0], lease=LEASE))
    for lease, write in zip(
        leases,
        (
            lambda lease: far.settle(lease, DONE, retention=RETENTION),
            lambda lease: far.release(lease, retention=RETENTION),
            lambda lease: far.hold(lease, note="why"),
            lambda lease: far.renew(lease, lease=LEASE),
        ),
        strict=True,
    ):
        proxy.cut_answers()
        with healed_soon(proxy):
            drive(write(lease))
    states = {record.key: record.state for record in run(store.list(Filter(scope="s"))).records}
    assert states == {"settle": "settled", "release": "released", "hold": "held", "renew": "running"}


def test_a_resolution_whose_answer_was_lost_is_known_for_ones_own(
    far: PostgresStore, proxy: FaultProxy, drive: Drive
) -> None:
    drive(far.hold(drive(far.claim(Operation("s", "k"), lease=LEASE))))
    drive(far.stats())
    proxy.cut_answers()
    with healed_soon(proxy):
        record = drive(far.resolve("s", "k", DONE, retention=RETENTION, note="ticket 7"))
    assert (record.state, record.outcome, record.note) == ("settled", DONE, "ticket 7")


def cut_after_the_first(plan: Plan[bool], proxy: FaultProxy) -> Plan[bool]:
    """The plan, whose answers are lost from its second effect on."""
    result = yield next(plan)
    proxy.cut_answers()
    try:
        while True:
            result = yield plan.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def test_a_deletion_whose_answer_was_lost_says_that_there_was_a_record(
    far: PostgresStore, store: PostgresStore, proxy: FaultProxy, drive: Drive
) -> None:
    """CASES 26: the statement that is sent again finds nothing any more."""
    drive(far.settle(drive(far.claim(Operation("s", "k"), lease=LEASE)), DONE, retention=RETENTION))
    drive(far.stats())
    with healed_soon(proxy, 0.5):
        assert drive(cut_after_the_first(far.delete("s", "k"), proxy)) is True
    assert run(store.find("s", "k")) is None
    assert drive(far.delete("s", "k")) is False


def test_a_claim_that_was_given_up_is_taken_back_when_the_server_answers_again(
    store: PostgresStore, proxy: FaultProxy, url: str
) -> None:
    """CASES 27: its caller was told 503 and performed nothing, so the key must not end up as one in doubt."""
    far = PostgresStore(f"{proxy.url(url)}&listen=false&timeout=3s")
    run(far.claim(Operation("s", "warm"), lease=LEASE))
    proxy.cut_answers()
    with pytest.raises(StoreError):
        run(far.claim(Operation("s", "k"), lease=LEASE))
    assert run(store.find("s", "k")).state == "running"  # it was granted, but nobody knows
    proxy.heal()
    run(far.claim(Operation("s", "other"), lease=LEASE))
    lease = run(store.claim(Operation("s", "k"), lease=LEASE))
    assert (lease.lapsed, lease.attempt) == (False, 1)
    far.close()


async def test_a_takeover_that_was_given_up_leaves_the_operation_in_doubt(
    store: PostgresStore, proxy: FaultProxy, url: str
) -> None:
    """CASES 25: its former holder vanished, perhaps after the effect; taken back, it must not look as if it had failed."""
    operation, beside = Operation("s", "k"), Operation("s", "beside")
    run(store.claim(operation, lease=0.01))
    far = PostgresStore(f"{proxy.url(url)}&listen=false&timeout=1s")

    async def claim(*operations: Operation) -> list[Any]:
        """Together: in one statement, which takes over where it may."""
        plans = (far.claim(each, lease=LEASE) for each in operations)
        return await asyncio.gather(*map(arun, plans), return_exceptions=True)

    await claim(Operation("s", "warm"), Operation("s", "up"))
    proxy.cut_answers()
    assert all(isinstance(answer, StoreError) for answer in await claim(operation, beside))
    taken = run(store.find("s", "k"))
    assert (taken.state, taken.attempts) == ("running", 2)  # it was granted, but nobody knows
    proxy.heal()
    await arun(far.claim(Operation("s", "other"), lease=LEASE))
    leases = [run(store.claim(each, lease=LEASE)) for each in (operation, beside)]
    assert [(lease.lapsed, lease.attempt) for lease in leases] == [(True, 3), (False, 1)]
    await far.aclose()


def test_a_claim_whose_loop_was_shut_down_is_taken_back(store: PostgresStore, proxy: FaultProxy, url: str) -> None:
    """As when a program ends by asyncio.run: nobody performs, so the key must not end up as one in doubt."""
    far = PostgresStore(f"{proxy.url(url)}&listen=false")

    async def ask_and_leave() -> None:
        await arun(far.claim(Operation("s", "warm"), lease=LEASE))
        proxy.drop_answers()
        asking = asyncio.create_task(arun(far.claim(Operation("s", "k"), lease=LEASE)))
        while await asyncio.to_thread(run, store.find("s", "k")) is None:
            await asyncio.sleep(0.01)
        assert not asking.done()

    asyncio.run(ask_and_leave())
    proxy.heal()
    run(far.claim(Operation("s", "other"), lease=LEASE))
    lease = run(store.claim(Operation("s", "k"), lease=LEASE))
    far.close()
    assert isinstance(lease, Lease)
    assert (lease.lapsed, lease.attempt) == (False, 1)


@pytest.mark.parametrize("fault", ["stall", "drop_answers"])
def test_a_server_that_is_silent_is_given_up(proxy: FaultProxy, url: str, fault: str) -> None:
    """CASES 27: within the time that the URL allows, and never as if nothing had been wrong."""
    store = PostgresStore(f"{proxy.url(url)}&listen=false&timeout=3s")
    lease = run(store.claim(Operation("s", "k"), lease=LEASE))
    run(store.renew(lease, lease=LEASE))
    getattr(proxy, fault)()
    begun = time.monotonic()
    with pytest.raises(StoreTimeout):
        run(store.settle(lease, DONE, retention=RETENTION))
    with pytest.raises(StoreError):
        asyncio.run(arun(store.claim(Operation("s", "other"), lease=LEASE)))
    assert time.monotonic() - begun < 30
    proxy.heal()
    run(store.settle(lease, DONE, retention=RETENTION))
    store.close()


def test_a_server_that_is_away_is_unavailable(proxy: FaultProxy, url: str) -> None:
    """CASES 27."""
    store = PostgresStore(f"{proxy.url(url)}&timeout=500ms")
    proxy.refuse()
    for drive in (run, lambda plan: asyncio.run(arun(plan))):
        with pytest.raises(StoreUnavailable):
            drive(store.claim(Operation("s", "k"), lease=LEASE))
        with pytest.raises(StoreUnavailable):
            drive(store.stats())
    proxy.heal()
    assert until(lambda: isinstance(answer(store.claim(Operation("s", "k"), lease=LEASE)), Lease))
    store.close()


def answer(plan: Plan[Any]) -> Any:
    try:
        return run(plan)
    except OncemoreError as error:
        return error


def test_who_watches_a_server_that_is_away_goes_on_waiting(store: PostgresStore, proxy: FaultProxy, url: str) -> None:
    far = PostgresStore(f"{proxy.url(url)}&timeout=3s")
    run(store.claim(Operation("s", "k"), lease=LEASE))
    record = run(far.claim(Operation("s", "k"), lease=LEASE))
    proxy.refuse()
    run(far.watch(record))
    proxy.heal()
    assert run(far.find("s", "k")) is not None
    far.close()


def test_an_idle_connection_that_the_server_closed_is_replaced_unnoticed(
    store: PostgresStore, postgres_url: str
) -> None:
    run(store.claim(Operation("s", "first"), lease=LEASE))
    (link,) = store.database.lanes.threads.links
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute("SELECT pg_terminate_backend(%s, 5000)", [link.pgconn.backend_pid])
    assert isinstance(run(store.claim(Operation("s", "second"), lease=LEASE)), Lease)


async def test_an_event_loop_sleeps_well_when_the_server_closes_its_connection(
    store: PostgresStore, postgres_url: str
) -> None:
    await arun(store.claim(Operation("s", "first"), lease=LEASE))
    (link,) = store.database.lanes.on_loop().links
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as server:
        await server.execute("SELECT pg_terminate_backend(%s, 5000)", [link.pgconn.backend_pid])
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.4  # a socket at its end is always readable; nobody must keep looking
    assert isinstance(await arun(store.claim(Operation("s", "second"), lease=LEASE)), Lease)
    await store.aclose()


def test_the_ear_listens_again_after_its_connection_was_cut(proxy: FaultProxy, url: str) -> None:
    mine, other = PostgresStore(f"{proxy.url(url)}&poll=30s"), PostgresStore(url)
    lease = run(other.claim(Operation("s", "k"), lease=LEASE))
    record = run(mine.claim(Operation("s", "k"), lease=LEASE))
    with mine.wakeups.waiting(("s", "k")) as waiter:
        run(mine.watch(record))
        time.sleep(0.3)
        proxy.cut()
        run(other.settle(lease, DONE, retention=RETENTION))  # the message may go unheard
        begun = time.monotonic()
        for _ in range(2):  # but whoever begins to listen again wakes all who wait
            waiter.wait(mine.poll).run()
            if run(mine.claim(Operation("s", "k"), lease=LEASE)).state == "settled":
                break
        assert time.monotonic() - begun < 20
    mine.close()
    other.close()
