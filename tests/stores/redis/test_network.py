"""The Redis store when the network fails: no wrong answer, and no caller is blocked by its own claim."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from oncemore._ledger.model import Claim, Lease, Record
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import Plan, arun, run
from oncemore.errors import ConfigurationError, Fenced, OncemoreError, StoreError, StoreTimeout, StoreUnavailable
from oncemore.stores.redis import RedisStore, connect
from oncemore.stores.redis.commands import ScriptItem
from oncemore.stores.redis.connection import SendCommands, pack
from oncemore.stores.redis.records import fields, micros
from oncemore.stores.redis.scripts import CLAIM
from tests.support.proxy import FaultProxy
from tests.support.servers import ValkeyServer

from ..parts import DONE, HOUR, operation

pytestmark = pytest.mark.server

Drive = Callable[[Plan[Any]], Any]


@pytest.fixture
def near(store: RedisStore) -> RedisStore:
    """Return the store with a direct connection."""
    return store


@pytest.fixture
def proxy(valkey_url: str) -> Iterator[FaultProxy]:
    with FaultProxy.before(valkey_url) as proxy:
        yield proxy


@pytest.fixture
def far(url: str, proxy: FaultProxy) -> RedisStore:
    """Return the store behind the proxy."""
    return connect(f"{proxy.url(url)}&timeout=10s")


@pytest.fixture
def impatient(url: str, proxy: FaultProxy) -> RedisStore:
    return connect(f"{proxy.url(url)}&timeout=800ms")


@pytest.fixture(params=["run", "arun"])
def drive(request: pytest.FixtureRequest) -> Iterator[Drive]:
    """Yield a driver for plans of the stores `far` and `impatient`: blocking, then awaited."""
    names = [name for name in ("far", "impatient") if name in request.fixturenames]
    stores: list[RedisStore] = [request.getfixturevalue(name) for name in names]
    if request.param == "run":
        yield run
        for store in stores:
            store.close()
        return
    with asyncio.Runner() as runner:
        yield lambda plan: runner.run(arun(plan))
        for store in stores:
            runner.run(store.aclose())


@contextlib.contextmanager
def healed_soon(proxy: FaultProxy) -> Iterator[None]:
    """End the fault a moment after the block has begun."""
    timer = threading.Timer(0.2, proxy.heal)
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("after", [0, 3])
def test_claim_with_lost_answer_gets_its_own_lease(
    far: RedisStore, near: RedisStore, proxy: FaultProxy, drive: Drive, after: int
) -> None:
    """The claim is granted, and the connection breaks before the answer.  The caller's own claim must not block it."""
    drive(far.find("scope", "none"))
    proxy.cut_answers(after=after)
    with healed_soon(proxy):
        lease = drive(far.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    assert (lease.attempt, lease.lapsed) == (1, False)
    record = run(near.find("scope", "key"))
    assert record is not None
    assert (record.token, record.attempts) == (lease.token, 1)
    drive(far.settle(lease, DONE, retention=HOUR))


def test_takeover_with_lost_answer_is_still_a_takeover(
    far: RedisStore, near: RedisStore, proxy: FaultProxy, drive: Drive
) -> None:
    """Otherwise the caller would repeat an effect that its predecessor may have had."""
    drive(far.find("scope", "none"))
    run(near.claim(operation("key"), lease=0.0))
    proxy.cut_answers()
    with healed_soon(proxy):
        lease = drive(far.claim(operation("key"), lease=HOUR))
    assert (lease.attempt, lease.lapsed) == (2, True)


@pytest.mark.parametrize("verb", ["renew", "settle", "release", "hold", "resolve", "delete"])
def test_verb_with_lost_answer_succeeds(
    far: RedisStore, near: RedisStore, proxy: FaultProxy, drive: Drive, verb: str
) -> None:
    lease = drive(far.claim(operation("key"), lease=HOUR))
    drive(far.find("scope", "none"))
    if verb in ("resolve", "delete"):
        run(near.hold(lease))
    verbs: dict[str, Callable[[], Plan[Any]]] = {
        "renew": lambda: far.renew(lease, lease=HOUR),
        "settle": lambda: far.settle(lease, DONE, retention=HOUR),
        "release": lambda: far.release(lease, retention=HOUR),
        "hold": lambda: far.hold(lease),
        "resolve": lambda: far.resolve("scope", "key", DONE, retention=HOUR),
        "delete": lambda: far.delete("scope", "key"),
    }
    proxy.cut_answers()
    with healed_soon(proxy):
        answer = drive(verbs[verb]())
    record = run(near.find("scope", "key"))
    if verb == "delete":
        assert (answer, record) == (True, None)
    else:
        states = {"renew": "running", "release": "released", "hold": "held"}
        assert record is not None
        assert record.state == states.get(verb, "settled")


async def test_batch_cut_in_mid_answer_is_answered_whole(far: RedisStore, proxy: FaultProxy) -> None:
    await arun(far.find("scope", "none"))
    await arun(far.claim(operation("first"), lease=HOUR))
    proxy.cut_answers(after=200)
    with healed_soon(proxy):
        claims = [arun(far.claim(operation(str(n % 40)), lease=HOUR)) for n in range(80)]
        found = await asyncio.gather(*claims)
    assert sum(isinstance(each, Lease) for each in found) == 40
    assert {each.attempt for each in found if isinstance(each, Lease)} == {1}
    await far.aclose()


@pytest.mark.parametrize("before", ["nothing", "released", "lapsed"])
def test_unanswered_claim_is_undone_with_the_next_claim(
    impatient: RedisStore, near: RedisStore, proxy: FaultProxy, drive: Drive, before: str
) -> None:
    """Its caller was refused and performed nothing.  If the claim lapsed, the operation would be held."""
    if before != "nothing":
        former = run(near.claim(operation("key"), lease=0.0))
        assert isinstance(former, Lease)
        if before == "released":
            run(near.release(former, retention=HOUR))
    drive(impatient.claim(operation("first"), lease=HOUR))
    proxy.drop_answers()
    with pytest.raises(StoreError):
        drive(impatient.claim(operation("key"), lease=HOUR))
    record = run(near.find("scope", "key"))
    assert record is not None
    assert record.lease_until > record.now  # the claim was granted
    proxy.heal()
    drive(impatient.claim(operation("other"), lease=HOUR))
    lease = run(near.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    assert lease.lapsed == (before == "lapsed")


def test_idle_connection_closed_by_server_is_replaced(impatient: RedisStore, proxy: FaultProxy, drive: Drive) -> None:
    for n in range(3):
        assert isinstance(drive(impatient.claim(operation(str(n)), lease=HOUR)), Lease)
        proxy.cut()


def test_server_down_is_unavailable_until_it_is_up(impatient: RedisStore, proxy: FaultProxy, drive: Drive) -> None:
    lease = drive(impatient.claim(operation("key"), lease=HOUR))
    proxy.refuse()
    with pytest.raises(StoreUnavailable):
        drive(impatient.claim(operation("other"), lease=HOUR))
    with pytest.raises(StoreUnavailable):
        drive(impatient.settle(lease, DONE, retention=HOUR))
    with pytest.raises(StoreUnavailable):
        drive(impatient.list(Filter()))
    proxy.heal()
    drive(impatient.settle(lease, DONE, retention=HOUR))


@pytest.mark.parametrize("connected", [True, False])
def test_silent_server_is_a_timeout(
    impatient: RedisStore, near: RedisStore, proxy: FaultProxy, drive: Drive, connected: bool
) -> None:
    """If the server has granted the claim, the key is free again when the lease is over."""
    if connected:
        drive(impatient.claim(operation("before"), lease=HOUR))
    proxy.drop_answers()
    with pytest.raises(StoreTimeout):
        drive(impatient.claim(operation("key"), lease=0.5))
    time.sleep(0.6)
    assert isinstance(run(near.claim(operation("key"), lease=HOUR)), Lease)


async def test_callers_of_a_failed_batch_get_separate_errors(impatient: RedisStore, proxy: FaultProxy) -> None:
    proxy.refuse()
    claims = [arun(impatient.claim(operation(str(n)), lease=HOUR)) for n in range(5)]
    errors = await asyncio.gather(*claims, return_exceptions=True)
    assert all(isinstance(error, StoreError) for error in errors)
    assert len({id(error) for error in errors}) == 5
    await impatient.aclose()


def test_late_reply_after_interrupt_is_not_read_by_next_call(far: RedisStore, proxy: FaultProxy) -> None:
    """After Ctrl-C during a verb, a reply may still arrive on the connection, so it must not be used again."""
    run(far.claim(operation("key"), lease=HOUR))
    proxy.stall()
    interrupt(far.find("scope", "key"))
    proxy.heal()
    assert run(far.find("scope", "none")) is None
    far.close()


def test_interrupted_claim_is_undone_with_the_next_claim(far: RedisStore, near: RedisStore, proxy: FaultProxy) -> None:
    run(far.claim(operation("first"), lease=HOUR))
    proxy.drop_answers()
    interrupt(far.claim(operation("key"), lease=HOUR))
    proxy.heal()
    assert isinstance(run(near.claim(operation("key"), lease=HOUR)), Record)  # the interrupted claim was granted
    run(far.claim(operation("other"), lease=HOUR))
    lease = run(near.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    assert not lease.lapsed
    far.close()


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


def interrupt(plan: Plan[Any]) -> None:
    """Carry out *plan*, except for its end."""

    def now(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, now)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            run(plan)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_close_during_a_verb_lets_it_finish(
    url: str, proxy: FaultProxy, server: redis.Redis, redis_prefix: str
) -> None:
    far = connect(f"{proxy.url(url)}&client_name={redis_prefix}")
    run(far.claim(operation("key"), lease=HOUR))
    run(far.find("scope", "key"))  # the server has the script now, so the next call is one round trip
    assert connections(server, redis_prefix)
    proxy.stall()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(far.find("scope", "key"))))
    thread.start()
    time.sleep(0.1)
    far.close()
    proxy.heal()
    thread.join()
    assert [record.key for record in found] == ["key"]
    until = time.monotonic() + 5
    while connections(server, redis_prefix) and time.monotonic() < until:
        time.sleep(0.01)
    assert connections(server, redis_prefix) == 0


def connections(server: redis.Redis, name: str) -> int:
    clients: Any = server.client_list()
    return sum(client["name"] == name for client in clients)


@pytest.mark.parametrize("timeout", [0.1, 5.0])
def test_round_trip_waits_as_long_as_its_timeout(
    far: RedisStore, proxy: FaultProxy, drive: Drive, timeout: float
) -> None:
    """Also on a connection that was opened with a longer timeout.  The next call does not read a late reply."""
    pool = far.topology.pool

    def echo(word: str, seconds: float) -> Plan[Any]:
        return (yield SendCommands(pool, None, pack("ECHO", word), 1, seconds))

    assert drive(echo("first", 5.0)) == [b"first"]
    proxy.stall()
    if timeout > 1:
        threading.Timer(0.2, proxy.heal).start()
        assert drive(echo("slow", timeout)) == [b"slow"]
        return
    began = time.monotonic()
    with pytest.raises(StoreTimeout):
        drive(echo("lost", timeout))
    assert time.monotonic() - began < 2
    proxy.heal()
    assert drive(echo("next", 5.0)) == [b"next"]


@pytest.mark.parametrize("dropped", [True, False])
def test_dropped_connection_is_not_used_again(far: RedisStore, drive: Drive, dropped: bool) -> None:
    pool = far.topology.pool

    def client_id() -> Plan[Any]:
        return (yield SendCommands(pool, None, pack("CLIENT", "ID"), 1, 5.0))

    before = drive(client_id())
    if dropped:
        pool.drop(None)
    assert (drive(client_id()) != before) == dropped
    assert drive(client_id()) == drive(client_id())


def test_release_without_retention_may_be_sent_twice(near: RedisStore) -> None:
    """The answer to a release with retention 0 is lost, so it is sent again.  Nobody has taken over."""
    lease = run(near.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    for _ in range(2):
        run(near.release(lease, retention=0.0))
    with pytest.raises(Fenced):
        run(near.settle(lease, DONE, retention=HOUR))
    assert isinstance(run(near.claim(operation("key"), lease=HOUR)), Lease)
    with pytest.raises(Fenced):
        run(near.release(lease, retention=0.0))


@pytest.mark.parametrize("undone", [True, False])
def test_delayed_copy_of_an_ended_claim_is_not_granted(near: RedisStore, undone: bool) -> None:
    """If a copy that was delayed in the network were granted, nobody would use its lease."""
    lease = run(near.claim(operation("key"), lease=HOUR))
    assert isinstance(lease, Lease)
    holder = run(near.find("scope", "key")).holder  # type: ignore[union-attr]
    if undone:
        run(near.unclaim([Claim(lease.operation, holder, HOUR)]))
    else:
        run(near.release(lease, retention=HOUR))
    about = fields(holder, lease.operation.fingerprint, *lease.operation.id, lease.operation.name)
    copy = ScriptItem(CLAIM, near._name(lease.operation.id), (micros(HOUR), about, b""), holder)
    ((now, _),) = run(near._runner.run([copy]))
    assert now > 0
    record = run(near.find("scope", "key"))
    assert (record.state if record else None) == (None if undone else "released")
    assert isinstance(run(near.claim(operation("key"), lease=HOUR)), Lease)


def test_unreachable_server_raises_only_our_errors(proxy: FaultProxy) -> None:
    proxy.refuse()
    nobody = f"127.0.0.1:{proxy.port}"
    nonsense = f"redis://{64 * 'x'}.example"  # a host's name cannot be that long
    for address in (f"redis://{nobody}", f"redis+sentinel://{nobody}/service", f"redis+cluster://{nobody}", nonsense):
        store = connect(f"{address}?timeout=200ms")
        for plan in (store.claim(operation("key"), lease=HOUR), store.stats(), store.purge(), store.list(Filter())):
            with pytest.raises(OncemoreError):
                run(plan)
        with pytest.raises(OncemoreError):
            asyncio.run(arun(store.find("scope", "key")))
        store.close()


def test_undo_outlives_a_refused_login(own_valkey: ValkeyServer) -> None:
    """A claim is granted and its answer is lost.  Then the password is wrong for a while."""
    with FaultProxy.before(own_valkey.url) as proxy, redis.Redis.from_url(own_valkey.url) as server:
        store = connect(f"{proxy.url(own_valkey.url)}?timeout=800ms")
        run(store.claim(operation("warm"), lease=HOUR))
        proxy.cut_answers()
        with pytest.raises(StoreUnavailable):
            run(store.claim(operation("key"), lease=HOUR))
        server.config_set("requirepass", "new")
        server.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        proxy.heal()
        with pytest.raises(ConfigurationError, match="refused the login"):
            run(store.claim(operation("other"), lease=HOUR))
        server.config_set("requirepass", "")
        run(store.claim(operation("next"), lease=HOUR))
        assert run(store.find("scope", "key")) is None
        store.close()
