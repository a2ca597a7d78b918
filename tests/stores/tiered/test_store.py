"""The tiered store on a real PostgreSQL and a real Valkey: the store contract, and which copies are used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
import redis
from hypothesis.stateful import run_state_machine_as_test
from prometheus_client import CollectorRegistry, generate_latest
from psycopg_pool import ConnectionPool

from oncemore import Guard, Op, Operation, Policy
from oncemore._ledger.encrypted import StoreWrapper
from oncemore._ledger.events import Event
from oncemore._ledger.model import Lease, Outcome, Record
from oncemore._runtime.plan import Plan, Sleep, arun, run
from oncemore.encryption import Seal
from oncemore.errors import ConfigurationError, StoreUnavailable
from oncemore.observe.prometheus import count_tiers
from oncemore.stores import TieredStore, connect, schema
from oncemore.stores.redis import RedisStore
from oncemore.stores.sqlite import connect as connect_sqlite
from oncemore.stores.tiered import copies as tiered_copies
from oncemore.testing import Clock
from oncemore.testing.machine import store_machine
from oncemore.testing.stores import StoreContract

from ..parts import DONE, HOUR, OPERATION, blocked, claimed, operation, settled
from .conftest import tiered_url

pytestmark = pytest.mark.server

WAIT = 20.0  # the longest wait for background work, in seconds


def eventually(is_true: Callable[[], Any]) -> Any:
    """Return the first true value.  Fail if there is none for a long time."""
    deadline = time.monotonic() + WAIT
    while not (value := is_true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return value


def copies(server: redis.Redis, prefix: str) -> list[bytes]:
    return [key for key in server.keys(f"{prefix}:copy:*") if server.get(key) != b"-"]  # type: ignore[union-attr]


def warmed(store: TieredStore) -> TieredStore:
    """Return the store when it knows the primary and has a connection to Redis."""

    def is_warm() -> bool:
        before = store.tiers.misses
        run(store.claim(Operation("warm", "up"), lease=0.0))
        return store.tiers.misses > before

    eventually(is_warm)
    return store


@pytest.fixture
def copied(store: TieredStore, server: redis.Redis, redis_prefix: str) -> bytes:
    """Settle OPERATION, and return the name of its copy in Redis, which is the only one."""
    settled(warmed(store))
    return eventually(lambda: copies(server, redis_prefix))[0]  # type: ignore[no-any-return]


def from_redis(store: TieredStore) -> Record | None:
    """The record that a repeat is answered with, if Redis has answered: a busy machine may take longer than the budget."""
    found = blocked(store)
    return found if found.tier == "redis" else None


def is_hit(store: TieredStore, operation: Operation = OPERATION) -> bool:
    """Whether Redis answers a repeat."""
    before = store.tiers.hits
    found = run(store.claim(operation, lease=HOUR))
    assert isinstance(found, Record)
    assert found.tier == ("redis" if store.tiers.hits > before else "database")
    return found.tier == "redis"


class TestContract(StoreContract):
    pass


def test_any_history_agrees_with_the_model(url: str) -> None:
    run_state_machine_as_test(store_machine(lambda: connect(url), examples=15))  # type: ignore[no-untyped-call]


# Hits


def test_repeat_is_answered_by_redis(store: TieredStore, copied: bytes) -> None:
    found = eventually(lambda: from_redis(store))
    assert (found.outcome, found.state) == (DONE, "settled")
    assert found.expires_at is not None
    assert found.expires_at - found.now == pytest.approx(HOUR, abs=60)


def test_repeat_on_a_loop_is_answered_by_redis(url: str, copied: bytes) -> None:
    async def repeat() -> None:
        store = connect(url)
        assert isinstance(store, TieredStore)
        async with asyncio.timeout(WAIT):
            while not store.tiers.hits:
                await arun(store.claim(OPERATION, lease=HOUR))
                await asyncio.sleep(0.01)
        await store.aclose()

    asyncio.run(repeat())


def test_record_found_in_the_database_is_copied(
    store: TieredStore, server: redis.Redis, redis_prefix: str, copied: bytes
) -> None:
    server.delete(copied)
    assert not is_hit(store)
    eventually(lambda: copies(server, redis_prefix))
    assert eventually(lambda: is_hit(store))


def test_transaction_outcome_is_copied_after_commit(url: str, server: redis.Redis, redis_prefix: str) -> None:
    guard = Guard(url, policy=Policy(effect="transaction"), cache=0)
    warmed(guard.store)  # type: ignore[arg-type]
    runs: list[list[bytes]] = []

    def perform(op: Op) -> str:
        op.connection.execute("SELECT 1")
        runs.append(copies(server, redis_prefix))
        return "done"

    guard.run(OPERATION, perform)
    eventually(lambda: copies(server, redis_prefix))
    hits = guard.store.tiers.hits  # type: ignore[attr-defined]
    assert guard.run(OPERATION, perform).how == "replayed"
    assert guard.store.tiers.hits == hits + 1  # type: ignore[attr-defined]
    assert runs == [[]]  # it ran once, and there was no copy before its end
    guard.close()


def test_pool_of_the_user_is_the_primary(
    postgres_url: str, postgres_schema: str, valkey_url: str, redis_prefix: str, server: redis.Redis
) -> None:
    with ConnectionPool(postgres_url, min_size=1, max_size=1, open=True) as pool:
        primary = connect(pool, schema=postgres_schema)
        store = TieredStore(primary, f"{valkey_url}?prefix={redis_prefix}", budget=1.0)
        guard = Guard(store, policy=Policy(effect="transaction"), cache=0)
        warmed(store)
        lent: list[int] = []
        guard.run(OPERATION, lambda op: lent.append(op.connection.info.backend_pid))
        with pool.connection() as connection:
            assert lent == [connection.info.backend_pid]
        eventually(lambda: copies(server, redis_prefix))
        assert eventually(lambda: is_hit(store))
        guard.close()


def test_replays_tell_observers_their_tier(url: str, server: redis.Redis, redis_prefix: str) -> None:
    events: list[Event] = []
    guard = Guard(url, observers=[events.append])
    warmed(guard.store)  # type: ignore[arg-type]
    guard.run(OPERATION, lambda op: 1)
    guard.run(OPERATION, lambda op: 2)
    eventually(lambda: copies(server, redis_prefix))
    guard.cache.drop(None)
    guard.run(OPERATION, lambda op: 3)
    guard.cache.drop(None)
    server.flushdb()
    guard.run(OPERATION, lambda op: 4)
    assert [event.tier for event in events if event.kind == "replayed"] == ["process", "redis", "database"]
    guard.close()


def test_prometheus_exports_the_tiers(url: str, copied: bytes) -> None:
    guard, registry = Guard(url), CollectorRegistry()
    count_tiers(guard, registry)
    guard.run(OPERATION, lambda op: 1)
    exported = generate_latest(registry).decode()
    assert 'idempotency_redis_lookups_total{result="skipped"} 1.0' in exported
    assert "idempotency_redis_left_alone 0.0" in exported
    guard.close()
    with pytest.raises(ConfigurationError, match="has no tiers"):
        count_tiers(Guard("memory://"), registry)


# Copies that are not used


def test_unbelievable_copies_are_left_to_the_database(store: TieredStore, server: redis.Redis, copied: bytes) -> None:
    good: Any = server.get(copied)
    other = Operation("scope", "other", "c1:aa", "refunds.create")
    lease = run(store.claim(other, lease=HOUR))
    run(store.settle(lease, Outcome("value", body=b"other"), retention=HOUR))
    eventually(lambda: len(server.keys(copied.partition(b":copy:")[0] + b":copy:*")) > 1)  # type: ignore[arg-type]
    foreign: Any = next(
        server.get(key) for key in server.keys(copied.partition(b":copy:")[0] + b":copy:*") if key != copied
    )  # type: ignore[union-attr]
    for poisoned in (
        b"",
        b"x",
        b"\xff" * 100,
        good[:-1],
        good[1:],
        good + b"x",
        good[:8] + b"\x91" + good[9:],
        foreign,
    ):
        server.set(copied, poisoned)
        assert not is_hit(store), poisoned
    server.delete(copied)
    server.rpush(copied, "a list")
    assert not is_hit(store)
    server.delete(copied)
    server.set(copied, good)
    assert eventually(lambda: is_hit(store))


def test_other_payload_is_judged_by_the_database(store: TieredStore, copied: bytes) -> None:
    assert not is_hit(store, Operation("scope", "key", "c1:bb"))


def test_copy_past_its_retention_is_not_used(store: TieredStore, copied: bytes) -> None:
    Clock(store).advance(2 * HOUR)
    claimed(store)  # the operation runs as new


def test_copy_ends_at_the_cap(url: str, server: redis.Redis, redis_prefix: str) -> None:
    store = warmed(connect(f"{url}&cap=30s"))  # type: ignore[arg-type]
    settled(store)
    (name,) = eventually(lambda: copies(server, redis_prefix))
    assert 0 < server.pttl(name) <= 30_000  # type: ignore[operator]
    store.close()


def test_large_outcome_stays_in_the_database(url: str, server: redis.Redis, redis_prefix: str) -> None:
    store = warmed(connect(f"{url}&largest=100"))  # type: ignore[arg-type]
    lease = run(store.claim(Operation("scope", "large"), lease=HOUR))
    run(store.settle(lease, Outcome("value", body=b"x" * 101), retention=HOUR))
    settled(store)
    eventually(lambda: copies(server, redis_prefix))
    assert len(copies(server, redis_prefix)) == 1
    store.close()


def test_key_with_half_a_character_is_stored_and_deleted(store: TieredStore) -> None:
    """It works as in PostgreSQL alone, and has no copy."""
    odd = Operation("scope", "a\ud800", "c1:aa")
    lease = run(warmed(store).claim(odd, lease=HOUR))
    assert isinstance(lease, Lease)
    run(store.settle(lease, DONE, retention=HOUR))
    assert not is_hit(store, odd)
    assert run(store.delete("scope", "a\ud800"))


def test_absence_is_never_remembered(store: TieredStore, other: TieredStore, server: redis.Redis) -> None:
    warmed(store)
    lease = claimed(other)
    assert blocked(store).state == "running"
    run(other.release(lease, retention=HOUR))
    claimed(store)


# Changes


def test_deleted_record_runs_again_in_every_process(
    store: TieredStore, other: TieredStore, copied: bytes, server: redis.Redis
) -> None:
    warmed(other)
    assert eventually(lambda: is_hit(other))
    assert run(store.delete("scope", "key"))
    assert server.get(copied) == b"-"
    claimed(other)


def test_late_copy_of_a_deleted_record_is_not_written(
    store: TieredStore, other: TieredStore, copied: bytes, server: redis.Redis
) -> None:
    record = run(other.find("scope", "key"))
    warmed(other)
    run(store.delete("scope", "key"))
    other._copies._keep(record, other._copies.moment())  # like a process that has read the record before the deletion
    settled(other, "later")
    eventually(lambda: len(server.keys(copied.partition(b":copy:")[0] + b":copy:*")) > 1)  # type: ignore[arg-type]
    assert server.get(copied) == b"-"


def test_settle_answered_late_is_not_copied(
    store: TieredStore, server: redis.Redis, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record may have been deleted since then, and the mark of the deletion may have expired."""
    monkeypatch.setattr(tiered_copies, "OLDEST_PENDING", 0.5)

    class Late(StoreWrapper):
        def settle_first(self, held: Lease, *args: Any, **settings: Any) -> Plan[bool]:
            is_first: bool = yield from self.inner.settle_first(held, *args, **settings)  # type: ignore[attr-defined]
            if held.operation.key == "late":
                yield Sleep(0.6)
            return is_first

    warmed(store)._primary = Late(store.inner)  # type: ignore[assignment]
    settled(store, "late")
    settled(store, "prompt")
    eventually(lambda: copies(server, redis_prefix))
    assert eventually(lambda: is_hit(store, operation("prompt")))
    assert not is_hit(store, operation("late"))


def test_second_settle_of_the_same_owner_is_not_copied(
    store: TieredStore, server: redis.Redis, redis_prefix: str
) -> None:
    """The database ignores it, so a copy of it would answer with an outcome that was never stored."""
    lease = run(warmed(store).claim(OPERATION, lease=HOUR))
    assert isinstance(lease, Lease)
    for outcome in (DONE, Outcome("value", body=b"another")):
        run(store.settle(lease, outcome, retention=HOUR))
    eventually(lambda: copies(server, redis_prefix))
    assert eventually(lambda: from_redis(store)).outcome == DONE


def test_copy_is_of_the_server_that_was_asked(store: TieredStore) -> None:
    """Another server is promoted between the commit and the writing of the copy.  It may not have the outcome."""
    watch = warmed(store)._copies.watch

    class Promoted(StoreWrapper):
        def settle_first(self, *args: Any, **settings: Any) -> Plan[bool]:
            is_first: bool = yield from self.inner.settle_first(*args, **settings)  # type: ignore[attr-defined]
            watch.namespace_of = lambda row: "promoted.00000002"  # type: ignore[method-assign]
            eventually(lambda: watch.namespace() == "promoted.00000002")
            return is_first

    primary, store._primary = store._primary, Promoted(store.inner)  # type: ignore[assignment]
    settled(store)
    store._primary = primary
    settled(store, "later")
    eventually(lambda: is_hit(store, operation("later")))
    assert not is_hit(store)


def test_deletion_drops_a_pending_copy_even_if_redis_forgets_it(
    store: TieredStore, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_copies, "GATHER_SECONDS", 0.5)
    settled(warmed(store))
    run(store.delete("scope", "key"))
    server.flushdb()
    settled(store, "later")
    eventually(lambda: is_hit(store, operation("later")))
    claimed(store)


def test_extended_retention_keeps_the_copy_and_asks_no_redis(url: str, server: redis.Redis, redis_prefix: str) -> None:
    guard = Guard(url, policy=Policy(ttl_from="access"), cache=0)
    store = warmed(guard.store)  # type: ignore[arg-type]
    guard.run(OPERATION, lambda op: "done")
    eventually(lambda: copies(server, redis_prefix))
    before = store.tiers.hits
    for _ in range(3):
        assert guard.run(OPERATION, lambda op: "again").value == "done"
    assert store.tiers.hits == before + 3
    guard.close()


def test_shortened_retention_takes_the_copy_back(store: TieredStore, copied: bytes, server: redis.Redis) -> None:
    run(store.touch(blocked(store), retention=1.0))
    assert server.get(copied) == b"-"
    Clock(store).advance(2)
    claimed(store)


def test_delete_is_refused_while_redis_cannot_be_told(postgres_url: str, postgres_schema: str, own_valkey: Any) -> None:
    store = connect(tiered_url(postgres_url, own_valkey.url, postgres_schema))
    settled(store)
    own_valkey.crash()
    with pytest.raises(StoreUnavailable, match="Nothing was changed"):
        run(store.delete("scope", "key"))
    assert run(store.find("scope", "key")) is not None
    own_valkey.start()
    assert run(store.delete("scope", "key"))
    store.close()


def test_sealed_outcomes_are_sealed_in_redis(url: str, server: redis.Redis, redis_prefix: str) -> None:
    guard = Guard(url, seal=Seal([b"k" * 32]), cache=0)
    warmed(guard.store.inner)  # type: ignore[attr-defined]
    guard.run(OPERATION, lambda op: "secret result")
    (name,) = eventually(lambda: copies(server, redis_prefix))
    assert b"secret result" not in server.get(name)  # type: ignore[operator]
    answer = guard.run(OPERATION, lambda op: "again")
    assert answer.how == "replayed"
    assert b"secret result" in answer.outcome.body
    guard.close()


# Configuration


def test_password_of_redis_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    url = "redis+postgresql://me:secret1@127.0.0.1:1/db?redis=redis%3A%2F%2F%3Asecret2%40127.0.0.1%3A1%2F0"
    store = connect(url)
    assert store.url == "redis+postgresql://me:***@127.0.0.1:1/db?redis=redis%3A%2F%2F%3A%2A%2A%2A%40127.0.0.1%3A1%2F0"
    with pytest.raises(ConfigurationError) as wrong:
        connect(url.replace("%2F0", "%2Fabc"))
    with pytest.raises(StoreUnavailable) as down:
        claimed(store)
    assert "secret" not in f"{wrong.value} {down.value} {caplog.text}"
    store.close()


def test_mistakes_in_the_url_are_told() -> None:
    for url, reason in {
        "redis+postgresql://h/db": "names no Redis",
        "redis+postgresql://h/db?redis=http%3A%2F%2Fh": "redis= in the store's URL",
        "redis+sqlite:///a.db?redis=redis%3A%2F%2Fh": "SQLite cannot be the primary",
        "redis+postgresql://h/db?redis=redis%3A%2F%2Fh&budget=0": "greater than zero",
    }.items():
        with pytest.raises(ConfigurationError, match=reason):
            connect(url)


def test_primary_must_be_postgresql_and_cache_redis(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match="SQLite cannot be the primary"):
        TieredStore(connect_sqlite(f"sqlite:///{tmp_path}/a.db"), RedisStore("redis://h"))
    with pytest.raises(ConfigurationError, match="cache of a tiered store has to be Redis"):
        TieredStore("postgresql://h/db", "memory://")
    with pytest.raises(ConfigurationError, match=r"redis:// URL or a RedisStore, not a Redis$"):
        TieredStore("postgresql://h/db", redis.Redis())


def test_watch_behind_a_pooler_changes_no_session_of_others(
    pgbouncer_url: str, postgres_schema: str, valkey_url: str, redis_prefix: str
) -> None:
    store = warmed(connect(tiered_url(pgbouncer_url, valkey_url, postgres_schema, redis_prefix)))  # type: ignore[arg-type]
    store.close()
    with ExitStack() as stack:
        for _ in range(4):  # all connections of the pooler, each occupied by an open transaction
            other = stack.enter_context(psycopg.connect(pgbouncer_url, prepare_threshold=None))
            assert other.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_schema_is_that_of_the_primary(url: str) -> None:
    assert "CREATE TABLE" in schema(url)
    assert "redis" not in schema(url).lower()


def test_user_without_rights_of_a_superuser_has_copies(
    postgres_url: str, postgres_schema: str, valkey_url: str, redis_prefix: str, server: redis.Redis
) -> None:
    role = f"plain_{postgres_schema}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD 'plain'; CREATE SCHEMA {postgres_schema} AUTHORIZATION {role}"
        )  # type: ignore[arg-type]
    try:
        login = postgres_url.replace(postgres_url.split("//")[1].split("@")[0], f"{role}:plain")
        store = warmed(connect(tiered_url(login, valkey_url, postgres_schema, redis_prefix)))  # type: ignore[arg-type]
        settled(store)
        eventually(lambda: copies(server, redis_prefix))
        store.close()
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {postgres_schema} CASCADE; DROP ROLE {role}")  # type: ignore[arg-type]
