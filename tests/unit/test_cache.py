"""The cache: settled outcomes are replayed from this process for at most a minute, within a limit of bytes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard, Operation
from oncemore._ledger.ledger import LONGEST, Cache
from oncemore._ledger.model import Outcome
from oncemore._runtime.clock import SYSTEM
from oncemore.errors import ConfigurationError

ID = ("scope", "key")


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        raise AssertionError("dates are the store's business")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def outcome(size: int) -> Outcome:
    return Outcome("value", body=b"x" * size)


@pytest.mark.parametrize("size", [1e6, "32MiB", None, True, -1])
def test_cache_size_that_is_no_number_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a size: write a whole number of bytes"):
        Guard("memory://", cache=size)


def test_guard_without_cache_replays_from_the_store() -> None:
    guard = Guard("memory://", cache=0)
    assert [guard.run(Operation(*ID), lambda op: 1).how for _ in range(2)] == ["stored", "replayed"]
    assert guard.cache.get(ID) is None


def keep(cache: Cache, key: str = "key", *, size: int = 0, remaining: float = 3600.0) -> None:
    cache.put(("scope", key), "fingerprint", outcome(size), remaining=remaining, expires_at=5.0)


def test_get_returns_all_that_a_replay_needs(clock: HandClock) -> None:
    cache = Cache(clock)
    keep(cache, size=3)
    kept = cache.get(ID)
    assert kept is not None
    assert (kept.fingerprint, kept.outcome, kept.expires_at) == ("fingerprint", outcome(3), 5.0)
    assert cache.get(("scope", "other")) is None
    assert cache.get(("scop", "ekey")) is None


@pytest.mark.parametrize(("remaining", "trusted"), [(5.0, 5.0), (86400.0, LONGEST)])
def test_outcome_is_trusted_for_its_retention_or_a_minute(clock: HandClock, remaining: float, trusted: float) -> None:
    cache = Cache(clock)
    keep(cache, remaining=remaining)
    clock.now += trusted - 0.001
    assert cache.get(ID) is not None
    clock.now += 0.001
    assert cache.get(ID) is None
    clock.now -= 1
    assert cache.get(ID) is None  # gone, and not only hidden


def test_expired_outcome_is_not_found(clock: HandClock) -> None:
    cache = Cache(clock)
    keep(cache, remaining=-1.0)
    assert cache.get(ID) is None


def test_dropped_outcome_is_forgotten(clock: HandClock) -> None:
    cache = Cache(clock)
    keep(cache)
    cache.drop(("scope", "stranger"))
    cache.drop(ID)
    assert cache.get(ID) is None


def test_drop_without_id_forgets_all(clock: HandClock) -> None:
    cache = Cache(clock)
    cache.drop(None)
    for key in ("key", "other"):
        keep(cache, key)
    assert cache.get(ID) is not None
    cache.drop(None)
    assert [cache.get(("scope", key)) for key in ("key", "other")] == [None, None]
    keep(cache)
    assert cache.get(ID) is not None


def test_oldest_outcomes_make_room_for_the_latest(clock: HandClock) -> None:
    cache = Cache(clock, most=20 * 1024)
    for number in range(100):
        keep(cache, str(number), size=512)
    found = [number for number in range(100) if cache.get(("scope", str(number)))]
    assert 15 < len(found) < 40
    assert min(found) > 60


def test_second_put_replaces_the_first(clock: HandClock) -> None:
    cache = Cache(clock)
    for size in (1, 2):
        keep(cache, size=size)
        kept = cache.get(ID)
        assert kept is not None
        assert kept.outcome == outcome(size)
    cache.drop(ID)
    assert cache.get(ID) is None
    assert cache._size == 0


class Marked(str):
    """A subclass of str, such as template engines make."""

    __slots__ = ()


@pytest.mark.parametrize("key", ["\ud800", Marked("key")])
def test_key_that_cannot_be_packed_is_kept(clock: HandClock, key: str) -> None:
    cache = Cache(clock)
    keep(cache, key)
    assert cache.get(("scope", str(key))) is not None


@pytest.mark.parametrize(
    "odd",
    [
        Outcome("response", 201, (("retry-after", 5),)),  # type: ignore[arg-type]
        Outcome("value", body="no bytes"),  # type: ignore[arg-type]
        Outcome("response", 2**70),
    ],
)
def test_outcome_of_wrong_type_is_left_to_the_store(clock: HandClock, odd: Outcome) -> None:
    cache = Cache(clock)
    keep(cache)
    cache.put(ID, "fingerprint", odd, remaining=5.0, expires_at=None)
    assert cache.get(ID) is None  # nor is what was kept before: it is not true any more


def test_outcome_above_a_sixteenth_of_the_limit_is_not_kept(clock: HandClock) -> None:
    cache = Cache(clock, most=16 * 1024)
    keep(cache, "small")
    keep(cache, "large", size=1024)
    assert cache.get(("scope", "small")) is not None
    assert cache.get(("scope", "large")) is None
    keep(cache, "small", size=1024)
    assert cache.get(("scope", "small")) is None  # what it was is not true any more


def test_headers_count_towards_the_limit(clock: HandClock) -> None:
    """A security policy is longer than many bodies."""
    cache = Cache(clock, most=20 * 1024)
    policy = Outcome("response", 204, (("content-security-policy", "x" * 480),))
    for number in range(100):
        cache.put(("scope", str(number)), "fingerprint", policy, remaining=3600.0, expires_at=5.0)
    found = [number for number in range(100) if cache.get(("scope", str(number)))]
    assert 15 < len(found) < 40


def test_cache_of_zero_bytes_keeps_nothing(clock: HandClock) -> None:
    cache = Cache(clock, most=0)
    keep(cache)
    assert cache.get(ID) is None


keys = st.sampled_from("abcdef")
steps = st.lists(st.tuples(st.sampled_from(["put", "drop", "wait"]), keys, st.integers(0, 700)), max_size=60)


@given(steps)
def test_cache_stays_within_its_limit_and_returns_the_latest(story: list[tuple[str, str, int]]) -> None:
    clock = HandClock()
    cache, model = Cache(clock, most=16 * 1200), {}
    for verb, key, number in story:
        if verb == "put":
            keep(cache, key, size=number, remaining=float(number))
            model[key] = (number, clock.now + min(number, LONGEST))
        elif verb == "drop":
            cache.drop(("scope", key))
            model.pop(key, None)
        else:
            clock.now += number / 20
        assert sum(map(len, cache._entries.values())) + 250 * len(cache._entries) <= cache._size <= 16 * 1200
        kept = cache.get(("scope", key))
        if kept is not None:
            size, until = model[key]
            assert len(kept.outcome.body) == size
            assert clock.now < until


def test_threads_never_get_the_outcome_of_another_key() -> None:
    cache = Cache(SYSTEM, most=16 * 1200)

    def caller(name: str) -> None:
        for number in range(2000):
            body = f"{name} {number % 40} ".encode() * (number % 40)
            key = (name, str(number % 40))
            cache.put(key, "fingerprint", Outcome("value", body=body), remaining=60.0, expires_at=None)
            for other in ("a", "b", "c", "d"):
                kept = cache.get((other, key[1]))
                assert kept is None or kept.outcome.body == f"{other} {key[1]} ".encode() * int(key[1])
            if number % 7 == 0:
                cache.drop(key)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(caller, name) for name in "abcd"]:
            future.result()
    cache.drop(None)
    assert (cache._size, len(cache._entries)) == (0, 0)


class DroppingClock(HandClock):
    """A clock that drops the outcome while it is being put."""

    cache: Cache

    def monotonic(self) -> float:
        self.cache.drop(ID)
        return super().monotonic()


def test_drop_while_put_forgets_only_the_earlier_outcome() -> None:
    clock = DroppingClock()
    clock.cache = cache = Cache(clock)
    keep(cache, size=1)
    keep(cache, size=2)
    assert len(cache._entries) == 1
    assert cache._size == len(cache._entries[ID]) + len("scopekey") + 250


FORK = """
import os, sys, threading
from oncemore._ledger.ledger import Cache
from oncemore._runtime.clock import SYSTEM
from oncemore._ledger.model import Outcome

def hold(lock):
    with lock:
        held.set()
        let_go.wait(20)

cache, held, let_go = Cache(SYSTEM), threading.Event(), threading.Event()
threading.Thread(target=hold, args=[cache._lock]).start()
held.wait(20)
child = os.fork()  # at the worst moment
if child == 0:
    cache.put(("s", "k"), "", Outcome(), remaining=60, expires_at=None)
    sys.exit(0 if cache.get(("s", "k")) else 1)
let_go.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_forked_child_can_use_a_locked_cache() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=20)
