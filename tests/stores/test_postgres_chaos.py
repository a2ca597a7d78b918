"""The PostgreSQL store keeps its word when processes are killed or frozen, connections cut, and the server restarted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from oncemore.core.guard import Guard
from oncemore.core.model import Lease, Operation, Outcome
from oncemore.core.plan import Plan, arun, run
from oncemore.core.policy import Policy
from oncemore.core.store import Filter
from oncemore.errors import InProgress, OncemoreError, StoreError, StoreTimeout, StoreUnavailable, UnknownOutcome
from oncemore.stores.postgres import PostgresStore
from oncemore.testing.proxy import FaultProxy
from oncemore.testing.servers import PostgresServer
from oncemore.testing.store_contract import DONE, LEASE, RETENTION

CHILD = Path(__file__).with_name("postgres_child.py")
SERIALIZABLE = quote("-c default_transaction_isolation=serializable")

Drive = Callable[[Plan[Any]], Any]


@pytest.fixture
def url(postgres_url: str, postgres_schema: str) -> str:
    return f"{postgres_url}?schema={postgres_schema}"


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(url)
    yield store
    store.close()


class Child:
    """Another process, at one of the tasks in postgres_child.py."""

    def __init__(self, url: str, task: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), url, task], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child has ended"
        return line.strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def signal(self, which: signal.Signals) -> None:
        self.process.send_signal(which)


@contextmanager
def children(url: str, task: str, count: int = 1) -> Iterator[list[Child]]:
    made = [Child(url, task) for _ in range(count)]
    try:
        yield made
    finally:
        for child in made:
            child.process.kill()
            child.process.communicate()


# Other processes


def test_16_processes_start_on_an_empty_database_and_one_wins(url: str) -> None:
    """CASES 52: they race for the tables first, and for the key then."""
    with children(url, "claim", 16) as processes:
        for process in processes:
            assert process.hear() == "ready"
        for process in processes:
            process.tell()
        found = [process.hear().split() for process in processes]
    assert sorted(name for name, _ in found) == ["Lease"] + ["Record"] * 15
    assert len({token for _, token in found}) == 1


def test_serialization_failures_are_retried_inside(url: str) -> None:
    """CASES 54: four processes run after the same keys in the strictest isolation, and none hears of a failure."""
    with children(f"{url}&options={SERIALIZABLE}&timeout=30s", "contend", 4) as processes:
        for process in processes:
            assert process.hear() == "ready"
        for process in processes:
            process.tell()
        assert sum(int(process.hear()) for process in processes) == 60


@pytest.mark.chaos
def test_the_key_of_a_killed_holder_is_free_after_its_lease(store: PostgresStore, url: str) -> None:
    """CASES 25."""
    with children(url, "settle") as (child,):
        token = int(child.hear())
        child.signal(signal.SIGKILL)
        record = run(store.claim(Operation("s", "k"), lease=LEASE))
        assert (record.state, record.token) == ("running", token)
        store.shift += LEASE + 1
        lease = run(store.claim(Operation("s", "k"), lease=LEASE))
        assert (lease.lapsed, lease.attempt) == (True, 2)
        assert lease.token > token


@pytest.mark.chaos
def test_a_frozen_holder_is_fenced_on_every_verb_when_it_thaws(store: PostgresStore, url: str) -> None:
    """CASES 24."""
    with children(url, "hold") as (child,):
        token = int(child.hear())
        child.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not isinstance(found := run(store.claim(Operation("s", "k"), lease=LEASE)), Lease):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found.lapsed
        assert found.token > token
        child.signal(signal.SIGCONT)
        child.tell()
        assert [child.hear() for _ in range(4)] == ["renew Fenced", "settle Fenced", "release Fenced", "hold Fenced"]
    run(store.settle(found, DONE, retention=RETENTION))
    assert run(store.find("s", "k")).outcome == DONE


def test_a_waiter_is_woken_by_another_process_long_before_it_would_look(url: str) -> None:
    """CASES 17."""
    store = PostgresStore(f"{url}&poll=30s")
    with children(url, "settle") as (child,), store.bell.waiting(("s", "k")) as waiter:
        child.hear()
        record = run(store.claim(Operation("s", "k"), lease=LEASE))
        run(store.watch(record))
        time.sleep(0.5)  # the ear has begun to listen by now, and that has rung once
        waiter.disarm()
        child.tell()
        waiter.wait(store.poll).run()
        woken = time.time()
        assert run(store.claim(Operation("s", "k"), lease=LEASE)).state == "settled"
        assert woken - float(child.hear()) < 5  # in truth, milliseconds
    store.close()


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


def test_a_claim_that_was_given_up_is_taken_back_when_the_server_answers_again(
    store: PostgresStore, proxy: FaultProxy, url: str
) -> None:
    """CASES 27: its caller was told 503 and performed nothing, so the key must not end up as one in doubt."""
    far = PostgresStore(f"{proxy.url(url)}&listen=false&timeout=500ms")
    run(far.claim(Operation("s", "warm"), lease=LEASE))
    proxy.cut_answers()
    with pytest.raises(StoreError):
        run(far.claim(Operation("s", "k"), lease=LEASE))
    assert run(store.find("s", "k")).state == "running"  # it was granted, but nobody knows
    proxy.heal()
    run(far.claim(Operation("s", "other"), lease=LEASE))
    lease = run(store.claim(Operation("s", "k"), lease=LEASE))
    assert (lease.lapsed, lease.attempt) == (False, 2)
    far.close()


@pytest.mark.parametrize("fault", ["stall", "drop_answers"])
def test_a_server_that_is_silent_is_given_up(proxy: FaultProxy, url: str, fault: str) -> None:
    """CASES 27: within the time that the URL allows, and never as if nothing had been wrong."""
    store = PostgresStore(f"{proxy.url(url)}&listen=false&timeout=1s")
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
    assert isinstance(run(store.claim(Operation("s", "k"), lease=LEASE)), Lease)
    store.close()


def test_who_watches_a_server_that_is_away_goes_on_waiting(store: PostgresStore, proxy: FaultProxy, url: str) -> None:
    far = PostgresStore(f"{proxy.url(url)}&timeout=500ms")
    run(store.claim(Operation("s", "k"), lease=LEASE))
    record = run(far.claim(Operation("s", "k"), lease=LEASE))
    proxy.refuse()
    run(far.watch(record))
    proxy.heal()
    far.close()


def test_an_idle_connection_that_the_server_closed_is_replaced_unnoticed(
    store: PostgresStore, postgres_url: str
) -> None:
    run(store.claim(Operation("s", "first"), lease=LEASE))
    link = store.database.claims.link
    assert link is not None
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute("SELECT pg_terminate_backend(%s, 5000)", [link.pgconn.backend_pid])
    assert isinstance(run(store.claim(Operation("s", "second"), lease=LEASE)), Lease)


async def test_an_event_loop_sleeps_well_when_the_server_closes_its_connection(
    store: PostgresStore, postgres_url: str
) -> None:
    await arun(store.claim(Operation("s", "first"), lease=LEASE))
    (link,) = store.database.claims.loops.values()
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
    with mine.bell.waiting(("s", "k")) as waiter:
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


# The server


@pytest.mark.chaos
def test_a_restart_in_mid_load_leads_to_no_wrong_answer_and_no_second_effect(own_postgres: PostgresServer) -> None:
    """CASES 26, 27, 53: each key performed at most once, and none wedged past its lease."""
    policy = Policy(lease=LEASE, wait=0.2, on_unknown="hold")
    performed: Counter[str] = Counter()
    answers: list[tuple[str, bytes]] = []
    errors: list[OncemoreError] = []
    over = threading.Event()

    def work(seed: int, guard: Guard) -> None:
        n = 0
        while not over.is_set():
            n += 1
            key = f"{(seed * 7 + n) // 3}"  # several workers come to the same key, several times
            try:
                answer = guard.run(Operation("s", key, key), lambda op: perform(op.key), policy=policy)
                answers.append((key, answer.outcome.body))
            except OncemoreError as error:
                errors.append(error)

    def perform(key: str) -> Outcome:
        performed[key] += 1
        return Outcome("response", 200, (), key.encode())

    guards = [Guard(own_postgres.url, cache=0) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work, seed, guards[seed % 2]) for seed in range(8)]
        for _ in range(2):
            time.sleep(1.0)
            own_postgres.restart(immediate=True)
        time.sleep(1.0)
        over.set()
        for worker in workers:
            worker.result()
    assert len(performed) > 50
    assert set(performed.values()) == {1}
    assert all(body == key.encode() for key, body in answers)
    assert all(isinstance(error, StoreError | InProgress | UnknownOutcome) for error in errors), errors
    store = PostgresStore(own_postgres.url)
    store.shift = LEASE + 1
    for key in performed:
        found = run(store.claim(Operation("s", key, key), lease=LEASE))
        assert isinstance(found, Lease) or found.state == "settled", found
        if not isinstance(found, Lease):
            assert found.outcome == Outcome("response", 200, (), key.encode())
    for guard in guards:
        guard.close()
    store.close()


@pytest.mark.chaos
def test_tokens_grow_across_a_restart(own_postgres: PostgresServer) -> None:
    """CASES 53."""
    store = PostgresStore(own_postgres.url)
    tokens = []
    for _ in range(3):
        lease = run(store.claim(Operation("s", "k"), lease=LEASE))
        tokens.append(lease.token)
        run(store.release(lease, retention=RETENTION))
        own_postgres.restart(immediate=True)
    assert tokens == sorted(set(tokens))
    store.close()
