"""The PostgreSQL store keeps its guarantees when connections are cut, stalled or refused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from oncemore import Guard, Op, Outbox, Policy, Webhooks
from oncemore._ledger.model import Lease, Operation
from oncemore._ledger.store import Filter
from oncemore._ledger.transactions import Again
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import ConfigurationError, OncemoreError, StoreError, StoreTimeout, StoreUnavailable
from oncemore.messages import Relay
from oncemore.stores.postgres import PostgresStore
from oncemore.stores.postgres.statements import Statement
from oncemore.testing.stores import DONE, LEASE, RETENTION
from oncemore.webhooks import Sender
from tests.support.proxy import FaultProxy
from tests.support.servers import PostgresServer

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
def test_claim_whose_answer_was_lost_gets_its_lease(
    far: PostgresStore, store: PostgresStore, proxy: FaultProxy, drive: Drive, fault: str
) -> None:
    """The server had granted the lease, and the retry must recognise it as its own."""
    drive(far.claim(Operation("s", "warm"), lease=LEASE))
    getattr(proxy, fault)()
    with healed_soon(proxy):
        lease = drive(far.claim(Operation("s", "k"), lease=LEASE))
    record = run(store.find("s", "k"))
    assert isinstance(lease, Lease)
    assert (lease.token, lease.attempt, lease.lapsed) == (record.token, 1, False)
    drive(far.settle(lease, DONE, retention=RETENTION))


def test_claim_whose_answer_was_lost_survives_its_lease(far: PostgresStore, proxy: FaultProxy, drive: Drive) -> None:
    drive(far.claim(Operation("s", "warm"), lease=LEASE))
    proxy.cut_answers()
    with healed_soon(proxy):
        lease = drive(far.claim(Operation("s", "k"), lease=0.01))
    assert (lease.attempt, lease.lapsed) == (1, False)


def test_writes_whose_answers_were_lost_are_applied_once(
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


def test_resolution_whose_answer_was_lost_succeeds(far: PostgresStore, proxy: FaultProxy, drive: Drive) -> None:
    drive(far.hold(drive(far.claim(Operation("s", "k"), lease=LEASE))))
    drive(far.stats())
    proxy.cut_answers()
    with healed_soon(proxy):
        record = drive(far.resolve("s", "k", DONE, retention=RETENTION, note="ticket 7"))
    assert (record.state, record.outcome, record.note) == ("settled", DONE, "ticket 7")


def cut_after_the_first(plan: Plan[bool], proxy: FaultProxy) -> Plan[bool]:
    """Run *plan*, and lose the answers from its second effect on."""
    result = yield next(plan)
    proxy.cut_answers()
    try:
        effect = plan.send(result)
        while True:
            try:
                result = yield effect
            except BaseException as error:
                effect = plan.throw(error)
            else:
                effect = plan.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def test_deletion_whose_answer_was_lost_returns_true(
    far: PostgresStore, store: PostgresStore, proxy: FaultProxy, drive: Drive
) -> None:
    """The repeated statement finds no record."""
    drive(far.settle(drive(far.claim(Operation("s", "k"), lease=LEASE)), DONE, retention=RETENTION))
    drive(far.stats())
    with healed_soon(proxy, 0.5):
        assert drive(cut_after_the_first(far.delete("s", "k"), proxy)) is True
    assert run(store.find("s", "k")) is None
    assert drive(far.delete("s", "k")) is False


def test_claim_that_timed_out_is_undone_once_server_answers(store: PostgresStore, proxy: FaultProxy, url: str) -> None:
    """The caller got a 503 and performed nothing, so the outcome must not be unknown."""
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


async def test_takeover_that_timed_out_stays_in_doubt(store: PostgresStore, proxy: FaultProxy, url: str) -> None:
    """The holder before it crashed, maybe after the effect, so the undone claim must leave the outcome unknown."""
    operation, beside = Operation("s", "k"), Operation("s", "beside")
    run(store.claim(operation, lease=0.0))
    far = PostgresStore(f"{proxy.url(url)}&listen=false&timeout=1s")

    async def claim(*operations: Operation) -> list[Any]:
        """Claim *operations* in one statement, which may take over the lapsed one."""
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


def test_claim_of_ended_event_loop_is_undone(store: PostgresStore, proxy: FaultProxy, url: str) -> None:
    """`asyncio.run` ends while the claim is under way: nobody performs, so the outcome must not be unknown."""
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
def test_silent_server_times_out(proxy: FaultProxy, url: str, fault: str) -> None:
    """The call ends within the URL's timeout, and never with a wrong answer."""
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


def test_unreachable_server_is_unavailable(proxy: FaultProxy, url: str) -> None:
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


def test_watch_on_unreachable_server_does_not_fail(store: PostgresStore, proxy: FaultProxy, url: str) -> None:
    far = PostgresStore(f"{proxy.url(url)}&timeout=3s")
    run(store.claim(Operation("s", "k"), lease=LEASE))
    record = run(far.claim(Operation("s", "k"), lease=LEASE))
    proxy.refuse()
    run(far.watch(record))
    proxy.heal()
    assert run(far.find("s", "k")) is not None
    far.close()


def test_free_connection_closed_by_server_is_replaced(store: PostgresStore, postgres_url: str) -> None:
    run(store.claim(Operation("s", "first"), lease=LEASE))
    (free,) = store.database.connections.threads.connections
    with psycopg.connect(postgres_url, autocommit=True) as server:
        server.execute("SELECT pg_terminate_backend(%s, 5000)", [free.pgconn.backend_pid])
    assert isinstance(run(store.claim(Operation("s", "second"), lease=LEASE)), Lease)


async def test_event_loop_stays_idle_when_server_closes_connection(store: PostgresStore, postgres_url: str) -> None:
    await arun(store.claim(Operation("s", "first"), lease=LEASE))
    (free,) = store.database.connections.loops.get().connections
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as server:
        await server.execute("SELECT pg_terminate_backend(%s, 5000)", [free.pgconn.backend_pid])
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.4  # the socket is readable from then on, and must not be polled
    assert isinstance(await arun(store.claim(Operation("s", "second"), lease=LEASE)), Lease)
    await store.aclose()


def test_listener_whose_connection_was_cut_listens_again(proxy: FaultProxy, url: str) -> None:
    mine, other = PostgresStore(f"{proxy.url(url)}&poll=30s"), PostgresStore(url)
    lease = run(other.claim(Operation("s", "k"), lease=LEASE))
    record = run(mine.claim(Operation("s", "k"), lease=LEASE))
    with mine.wakeups.waiting(("s", "k")) as waiter:
        run(mine.watch(record))
        time.sleep(0.3)
        proxy.cut()
        run(other.settle(lease, DONE, retention=RETENTION))  # the message may be lost
        begun = time.monotonic()
        for _ in range(2):  # but a listener that connects again wakes all waiters
            waiter.wait(mine.poll).run()
            if run(mine.claim(Operation("s", "k"), lease=LEASE)).state == "settled":
                break
        assert time.monotonic() - begun < 20
    mine.close()
    other.close()


@pytest.mark.parametrize("drive", [run, lambda plan: asyncio.run(arun(plan))], ids=["run", "arun"])
@pytest.mark.parametrize(
    ("part", "wrong", "reason"),
    [
        ("password", "secret", 'password authentication failed for user "postgres"'),
        ("user", "nobody", 'authentication failed for user "nobody"'),
        ("dbname", "none", 'database "none" does not exist'),
    ],
)
def test_refused_login_fails_at_first_attempt_with_reason(
    proxy: FaultProxy, url: str, drive: Drive, part: str, wrong: str, reason: str
) -> None:
    place = psycopg.conninfo.conninfo_to_dict(proxy.url(url).partition("?")[0])
    words = {**place, part: wrong}
    store = PostgresStore("postgresql://{user}:{password}@{host}:{port}/{dbname}?timeout=60s".format(**words))
    for verb in (store.find("s", "k"), store.stats(), store.lender.open()):
        before = proxy.accepted
        with pytest.raises(ConfigurationError, match=reason):
            drive(verb)
        assert proxy.accepted <= before + 2  # libpq may try once with and once without encryption
    store._listener.listen()
    assert until(lambda: store._listener._thread is None)
    assert not store._listener.unavailable
    store.close()


@pytest.mark.parametrize(
    "made",
    [lambda guard: Relay(Outbox(guard, source="s"), to="memory://s"), lambda guard: Sender(Webhooks(guard))],
    ids=["relay", "sender"],
)
def test_relay_and_sender_stop_if_their_login_is_refused(postgres_url: str, made: Callable[[Guard], Any]) -> None:
    login, at, place = postgres_url.rpartition("@")
    guard = Guard(f"{login}wrong{at}{place}?listen=false")
    with pytest.raises(ConfigurationError, match="password authentication failed"):
        asyncio.run(asyncio.wait_for(made(guard).arun(), 20))
    guard.close()


def test_claim_is_undone_if_login_is_refused_after_it(own_postgres: PostgresServer) -> None:
    """The server granted the lease, the answer was lost, and the second attempt was refused: nobody performs."""
    with psycopg.connect(own_postgres.url, autocommit=True) as admin, FaultProxy.before(own_postgres.url) as proxy:
        admin.execute("CREATE ROLE shop LOGIN SUPERUSER PASSWORD 'old'")
        _, at, place = proxy.url(own_postgres.url).rpartition("@")
        store = PostgresStore(f"postgresql://shop:old{at}{place}?listen=false")
        run(store.claim(Operation("s", "warm"), lease=LEASE))
        admin.execute("ALTER ROLE shop PASSWORD 'new'")
        proxy.cut_answers()
        with healed_soon(proxy), pytest.raises(ConfigurationError, match="password authentication failed"):
            run(store.claim(Operation("s", "k"), lease=LEASE))
        assert admin.execute("SELECT state FROM oncemore_records WHERE key = 'k'").fetchone() == ("running",)
        admin.execute("ALTER ROLE shop PASSWORD 'old'")
        run(store.claim(Operation("s", "next"), lease=LEASE))
        assert run(store.find("s", "k")) is None
        store.close()


def test_login_refused_after_the_claim_hides_nothing(own_postgres: PostgresServer) -> None:
    """A password changes while operations run: results are returned, and the performer's own errors are raised."""
    with psycopg.connect(own_postgres.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE shop LOGIN SUPERUSER")

        def change_password(password: str) -> None:
            admin.execute(f"ALTER ROLE shop PASSWORD '{password}'")
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'")

        def pay(op: Op) -> str:
            change_password("new")
            if op.key == "declined":
                raise OSError("declined")
            return "paid"

        _, at, place = own_postgres.url.rpartition("@")
        guard = Guard(f"postgresql://shop:old{at}{place}?listen=false")
        change_password("old")
        paid = guard.run(Operation("s", "paid"), pay)
        assert (paid.how, paid.value) == ("unstored", "paid")
        change_password("old")
        with pytest.raises(OSError, match="declined"):
            guard.run(Operation("s", "declined"), pay)
        with pytest.raises(ConfigurationError, match="password authentication failed"):
            guard.run(Operation("s", "next"), pay)
        guard.close()


def test_record_of_vanished_machine_is_free_after_a_while(proxy: FaultProxy, url: str, store: PostgresStore) -> None:
    """Its transaction stays open, and the connection is neither closed nor reset."""
    far = PostgresStore(f"{proxy.url(url)}&listen=false&idle_in_transaction=500ms")
    transaction = run(far.lender.open())
    assert isinstance(run(transaction.begin(Operation("s", "k"), lease=LEASE, wait=1.0)), Lease)
    proxy.stall()

    def is_free() -> bool:
        try:
            return isinstance(run(store.claim(Operation("s", "k"), lease=LEASE)), Lease)
        except StoreTimeout:
            return False

    assert until(is_free)
    proxy.heal()
    with pytest.raises((Again, StoreTimeout)):
        run(transaction.commit())
    run(transaction.abort())
    far.close()


def test_server_watches_the_connections_of_sessions(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    """The session has the server's keepalive settings; by default, a vanished machine is noticed after two hours."""
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    ask = "SELECT " + ", ".join(
        f"current_setting('{name}')" for name in (*names, "idle_in_transaction_session_timeout")
    )
    run(store.stats())
    deadline = time.monotonic() + 30
    (row,) = run(store.database.rows(Statement(ask), [], deadline))
    assert row[:4] == ("30", "10", "3", "60000")
    transaction = run(store.lender.open())
    run(transaction.begin(Operation("s", "k"), lease=LEASE, wait=1.0))
    assert transaction.connection.execute(ask).fetchone() == ("30", "10", "3", "60000", "5min")
    run(transaction.abort())


def test_performer_that_is_idle_for_too_long_runs_once(url: str) -> None:
    guard = Guard(f"{url}&idle_in_transaction=200ms", policy=Policy(effect="transaction"))
    runs: list[int] = []

    def perform(op: Op) -> None:
        runs.append(1)
        time.sleep(1)

    with pytest.raises(StoreTimeout, match="idle_in_transaction="):
        guard.run(Operation("s", "k"), perform)
    assert runs == [1]
    guard.close()
