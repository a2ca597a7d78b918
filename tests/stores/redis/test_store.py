"""The Redis store on real Valkey servers: the store contract on each kind of server, URLs, records and batches."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis.stateful import run_state_machine_as_test
from redis.crc import key_slot

from oncemore import Guard
from oncemore._ledger.model import Lease, Operation, Outcome, Record
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import arun, run
from oncemore.encryption import Seal
from oncemore.errors import ConfigurationError, CorruptRecord, InvalidKey, NotResolvable, StoreError
from oncemore.stores.redis import RedisStore, connect
from oncemore.testing.machine import store_machine
from oncemore.testing.stores import StoreContract
from tests.support.servers import ValkeySentinel

from ...conftest import unique_name
from ..parts import DONE, HOUR, OPERATION, blocked, claimed, left_in_doubt, settled

pytestmark = pytest.mark.server


@pytest.fixture(scope="session")
def sentinel_url() -> Iterator[str]:
    with ValkeySentinel(fsync=False) as trio:
        yield trio.url


class TestOneServer(StoreContract):
    pass


class TestCluster(StoreContract):
    """Runs the store contract on a cluster, with records on several nodes."""

    @pytest.fixture
    def store(self, cluster_url: str) -> RedisStore:
        return connect(f"{cluster_url}?prefix={unique_name()}")


class TestSentinel(StoreContract):
    """Runs the store contract on the primary that the sentinel names."""

    @pytest.fixture
    def store(self, sentinel_url: str) -> RedisStore:
        return connect(f"{sentinel_url}?prefix={unique_name()}")


def test_any_history_agrees_with_the_model(url: str) -> None:
    run_state_machine_as_test(store_machine(lambda: connect(url), examples=40))  # type: ignore[no-untyped-call]


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:port",
        "redis://localhost/name",
        "redis+sentinel://localhost/service/name",
        "redis://localhost?prefix=a b",
        "redis://localhost?prefix=",
        "redis://localhost?timeout=0",
        "redis://localhost?poll=0",
        "redis://localhost?timeout=soon",
        "redis://localhost?wait_replicas=some",
        "redis://localhost?socket_timeout=soon",
        "redis://localhost?no_such_option=1",
        "redis+sentinel://localhost:26379",
        "redis://localhost?wait_replicas=all",
        "redis+cluster://localhost:7000?wait_replicas=-1",
    ],
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        connect(url)


def test_cluster_url_with_a_database_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="/1 is no database of this kind of server"):
        connect("redis+cluster://localhost/1")


def test_store_url_shows_no_password() -> None:
    store = connect("redis+sentinel://user:secret1@a,b/service?sentinel_password=secret2")
    assert "secret" not in store.url


@pytest.mark.parametrize("password", ["se/cret", "se#cret", "se?cret", "se?secret&cret", "se/1"])
def test_unescaped_password_is_explained_and_not_shown(password: str) -> None:
    for scheme, path in (("redis", "/0"), ("redis+sentinel", "/service"), ("redis+cluster", "")):
        with pytest.raises(ConfigurationError, match="%2F") as caught:
            connect(f"{scheme}://user:{password}@host:6379{path}")
        shown = "".join(traceback.format_exception(caught.value, limit=0))
        assert not any(part in shown for part in ("cret", "'se", "se@", "/1"))


def test_two_prefixes_and_two_databases_are_four_ledgers(valkey_url: str, redis_prefix: str) -> None:
    base = valkey_url.rpartition("/")[0]
    for place in ("0?prefix=a", "1?prefix=a", "0?prefix=b", "1?prefix=b"):
        store = connect(f"{base}/{place}-{redis_prefix}")
        lease = claimed(store)
        assert run(store.stats()).running == 1
        run(store.release(lease, retention=0.0))
        store.close()


def test_cluster_node_under_redis_url_names_the_right_scheme(cluster_url: str) -> None:
    store = connect(cluster_url.replace("redis+cluster", "redis").partition(",")[0])
    with pytest.raises(ConfigurationError, match=r"redis\+cluster://"):
        [claimed(store, str(n)) for n in range(30)]  # some of these keys are on another node
    store.close()


# Records, tokens and clocks


def names(store: RedisStore, server: Any) -> list[str]:
    return sorted(key.decode() for key in server.scan_iter(match=f"{store.prefix}:*", count=10_000))


def test_only_settled_and_released_records_expire_in_the_server(store: RedisStore, server: Any) -> None:
    run(store.hold(claimed(store, "held")))
    claimed(store, "running")
    settled(store, "audited", audit=True)
    unfinished = {server.pttl(name) for name in names(store, server)}
    settled(store, "settled")
    run(store.release(claimed(store, "released"), retention=HOUR))
    lives = [server.pttl(name) for name in names(store, server)]
    assert unfinished == {-1}
    assert sum(HOUR * 1000 < life <= (HOUR + 61) * 1000 for life in lives) == 2


def test_record_claimed_again_has_no_expiry(store: RedisStore, server: Any) -> None:
    run(store.release(claimed(store), retention=0.1))
    claimed(store)
    assert [server.pttl(name) for name in names(store, server)] == [-1]


def test_expired_record_is_removed_by_the_server(store: RedisStore, server: Any) -> None:
    run(store.settle(claimed(store), DONE, retention=0.0))
    (name,) = names(store, server)
    assert 0 < server.pttl(name) <= 60_000
    assert run(store.stats()).expired == 1


def test_audited_record_is_archived_whole_in_its_slot(store: RedisStore, server: Any) -> None:
    """In a cluster, an archived record must stay on its node."""
    first = settled(store, audit=True, note="seen")
    (name,) = names(store, server)
    before = server.get(name)
    store.shift += 2 * HOUR
    assert claimed(store).attempt == 1
    assert names(store, server) == [name, f"{name}:{first.token}"]
    assert server.get(f"{name}:{first.token}") == before
    assert key_slot(name.encode()) == key_slot(f"{name}:{first.token}".encode())
    assert run(store.stats()).archived == 1


def test_tokens_grow_after_delete_and_clock_set_back(store: RedisStore, server: Any) -> None:
    """A deleted record leaves its token.  Here it comes from a clock that was an hour ahead."""
    ahead = settled(store)
    (name,) = names(store, server)
    far = ahead.token + int(HOUR * 1_000_000)
    server.set(name, server.get(name).replace(ahead.token.to_bytes(8, "big"), far.to_bytes(8, "big"), 1))
    assert run(store.delete(*OPERATION.id)) is True
    assert run(store.find(*OPERATION.id)) is None
    assert run(store.stats()).settled == 0
    assert claimed(store).token == far + 1


def test_wrong_client_clock_does_not_matter(
    store: RedisStore, other: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time
    claimed(store)
    monkeypatch.setattr(time, "time", lambda: right() + 10 * HOUR)
    assert blocked(other).state == "running"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: b"",
        lambda value: b"text that is no record",
        lambda value: value[:40],
        lambda value: value[:-90],
        lambda value: value.replace(b"response", b"resp\xff\xff\xff\xff"),
        lambda value: value.replace(b"settled", b"sottled"),
        lambda value: b"\xdc\x00\x14" + b"\x93" * 60,
    ],
)
def test_unreadable_record_is_a_tombstone_and_can_be_deleted(
    store: RedisStore, server: Any, spoil: Callable[[bytes], bytes]
) -> None:
    """The claim gets a tombstone: it does not fail or hang, and nothing is performed again."""
    lease = settled(store)
    (name,) = names(store, server)
    server.set(name, spoil(server.get(name)))
    record = blocked(store)
    assert (record.outcome, record.note) == (Outcome("tombstone"), "unreadable record")
    assert run(store.find(*OPERATION.id)) is not None
    assert len(run(store.list(Filter())).records) <= 1
    assert run(store.purge()) == 0
    run(store.touch(record, retention=HOUR))
    with pytest.raises(NotResolvable):
        run(store.resolve(*OPERATION.id, DONE, retention=HOUR))
    assert run(store.delete(*OPERATION.id)) is True
    assert claimed(store).token > lease.token


def test_record_copied_to_another_key_shows_nothing(store: RedisStore, server: Any) -> None:
    """Otherwise a user who can write to the server could show one caller another's outcome, even a sealed one."""
    guard = Guard(store, seal=Seal([b"k" * 32]), cache=0)
    guard.run(Operation("alice", "key", "c1:aa"), lambda op: "alice's")
    server.copy(store._name(("alice", "key")), store._name(("bob", "key")))
    with pytest.raises(CorruptRecord):
        guard.run(Operation("bob", "key", "c1:aa"), lambda op: "bob's")
    record = run(store.find("bob", "key"))
    assert record is not None
    assert (record.id, record.outcome, record.note) == (("bob", "key"), Outcome("tombstone"), "unreadable record")


async def test_foreign_value_under_the_key_fails_alone(store: RedisStore, server: Any) -> None:
    """That operation gets a clear error, and other operations are not affected."""
    await arun(store.claim(OPERATION, lease=HOUR))
    (name,) = names(store, server)
    server.delete(name)
    server.rpush(name, "not a record")
    operations = [Operation("scope", key, "c1:aa") for key in ("a", "key", "b")]
    claims = [arun(store.claim(each, lease=HOUR)) for each in operations]
    answers = await asyncio.gather(*claims, return_exceptions=True)
    assert [isinstance(answer, CorruptRecord) for answer in answers] == [False, True, False]
    assert len((await arun(store.list(Filter()))).records) == 2
    assert (await arun(store.stats())).running == 2
    await store.aclose()


async def test_record_that_breaks_the_script_fails_alone(store: RedisStore, server: Any) -> None:
    """The record is cut in half, and somebody waits for it.  Only its owner gets an error."""
    leases: list[Any] = [await arun(store.claim(Operation("scope", str(n)), lease=HOUR)) for n in range(5)]
    half = ["running", leases[2].token, 1, 1, 1, None, None, None, "", False, True, False, None]
    server.set(store._name(("scope", "2")), b"\xdc\x00\x0d" + msgspec.msgpack.encode(half)[1:])
    settles = [arun(store.settle(lease, DONE, retention=HOUR)) for lease in leases]
    answers = await asyncio.gather(*settles, return_exceptions=True)
    assert [isinstance(answer, StoreError) for answer in answers] == [False, False, True, False, False]
    await store.aclose()


async def test_lone_surrogate_in_a_key_fails_alone(store: RedisStore) -> None:
    keys = ["a", "\ud800", "b"]
    claims = [arun(store.claim(Operation("scope", key, "c1:\ud800"), lease=HOUR)) for key in keys]
    answers: list[Any] = await asyncio.gather(*claims, return_exceptions=True)
    assert [isinstance(answer, InvalidKey) for answer in answers] == [False, True, False]
    await arun(store.settle(answers[0], DONE, retention=HOUR, note="\udfff"))
    assert (await arun(store.find("scope", "a"))).note == "\\udfff"
    await store.aclose()


# Batches


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 300])
async def test_batch_of_any_size_answers_every_claim(store: RedisStore, count: int) -> None:
    operations = [Operation("scope", str(n)) for n in range(count)]
    leases: list[Any] = await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert [lease.operation.key for lease in leases] == [each.key for each in operations]
    outcomes = [Outcome(body=str(n).encode()) for n in range(count)]
    settles = zip(leases, outcomes, strict=True)
    await asyncio.gather(*(arun(store.settle(lease, outcome, retention=HOUR)) for lease, outcome in settles))
    records: list[Any] = await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert [record.outcome for record in records] == outcomes
    await store.aclose()


async def test_concurrent_claims_are_one_call(store: RedisStore, server: Any) -> None:
    await arun(store.find("none", "none"))
    operations = [Operation("scope", str(n)) for n in range(60)]
    before = server.info("stats")["total_commands_processed"]
    await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert server.info("stats")["total_commands_processed"] - before < 180  # three inner commands each, and two calls
    calls = server.info("commandstats")["cmdstat_evalsha"]["calls"]
    await asyncio.gather(*(arun(store.claim(each, lease=HOUR)) for each in operations))
    assert server.info("commandstats")["cmdstat_evalsha"]["calls"] - calls == 2
    await store.aclose()


async def test_cancelled_takeover_stays_in_doubt(store: RedisStore) -> None:
    """If it were released, the next caller would repeat an effect that may have happened."""
    told = await left_in_doubt(store, (0.0, 0.0, 0.0005, 0.001, 0.002))
    assert set(told) == {True}
    await store.aclose()


async def test_cancelled_claim_of_a_released_record_keeps_its_fingerprint(store: RedisStore) -> None:
    """Another payload under the same key is refused, also after a caller was cancelled."""
    lease: Any = await arun(store.claim(OPERATION, lease=HOUR))
    await arun(store.release(lease, retention=24 * HOUR))
    task = asyncio.create_task(arun(store.claim(OPERATION, lease=HOUR)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # now the claim is being sent
    task.cancel()
    await asyncio.wait([task])
    await store._claims.drain()
    store.shift += HOUR
    found = await arun(store.claim(msgspec.structs.replace(OPERATION, fingerprint="c1:bb"), lease=HOUR))
    assert isinstance(found, Record)
    assert (found.state, found.fingerprint, found.attempts) == ("released", "c1:aa", 2)
    await store.aclose()


async def test_cancelled_claims_are_undone_in_one_batch(store: RedisStore, server: Any) -> None:
    """If they were undone one by one, each would delay all other claims by a round trip."""
    await arun(store.find("none", "none"))
    await arun(store.claim(OPERATION, lease=HOUR))
    tasks = [asyncio.create_task(arun(store.claim(Operation("scope", str(n)), lease=HOUR))) for n in range(30)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # now the claims are being sent
    calls = server.info("commandstats")["cmdstat_evalsha"]["calls"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    again = [await arun(store.claim(Operation("scope", str(n)), lease=HOUR)) for n in range(30)]
    assert all(isinstance(lease, Lease) for lease in again)
    assert server.info("commandstats")["cmdstat_evalsha"]["calls"] - calls <= 33
    await store.aclose()
