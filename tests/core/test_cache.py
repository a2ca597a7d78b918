"""The cache: settled outcomes are replayed from this process for as long as they may be trusted, within a bound."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard, Operation
from oncemore._ledger.cache import LONGEST, Cache
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
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a size: write a whole number of bytes"):
        Guard("memory://", cache=size)


def test_a_guard_may_have_no_cache() -> None:
    guard = Guard("memory://", cache=0)
    assert [guard.run(Operation(*ID), lambda op: 1).how for _ in range(2)] == ["stored", "replayed"]
    assert guard.cache.get(ID) is None


def keep(cache: Cache, key: str = "key", *, size: int = 0, remaining: float = 3600.0) -> None:
    cache.put(("scope", key), "fingerprint", outcome(size), remaining=remaining, expires_at=5.0)


def test_what_was_kept_is_found_with_all_that_a_replay_needs(clock: HandClock) -> None:
    cache = Cache(clock)
    keep(cache, size=3)
    kept = cache.get(ID)
    assert kept is not None
    assert (kept.fingerprint, kept.outcome, kept.expires_at) == ("fingerprint", outcome(3), 5.0)
    assert cache.get(("scope", "other")) is None
    assert cache.get(("scop", "ekey")) is None


@pytest.mark.parametrize(("remaining", "trusted"), [(5.0, 5.0), (86400.0, LONGEST)])
def test_it_is_trusted_until_the_retention_is_over_and_a_minute_at_most(
    clock: HandClock, remaining: float, trusted: float
) -> None:
    """CASES 29."""
    cache = Cache(clock)
    keep(cache, remaining=remaining)
    clock.now += trusted - 0.001
    assert cache.get(ID) is not None
    clock.now += 0.001
    assert cache.get(ID) is None
    clock.now -= 1
    assert cache.get(ID) is None  # gone, and not only hidden


def test_what_has_expired_already_is_not_found(clock: HandClock) -> None:
    cache = Cache(clock)
    keep(cache, remaining=-1.0)
    assert cache.get(ID) is None


def test_a_dropped_outcome_is_forgotten_and_a_stranger_may_be_dropped(clock: HandClock) -> None:
    cache = Cache(clock)
    keep(cache)
    cache.drop(("scope", "stranger"))
    cache.drop(ID)
    assert cache.get(ID) is None


def test_all_are_forgotten_where_a_deletion_may_have_been_missed(clock: HandClock) -> None:
    cache = Cache(clock)
    cache.drop(None)
    for key in ("key", "other"):
        keep(cache, key)
    assert cache.get(ID) is not None  # and is unpacked now
    cache.drop(None)
    assert [cache.get(("scope", key)) for key in ("key", "other")] == [None, None]
    keep(cache)
    assert cache.get(ID) is not None


def test_the_oldest_make_room_for_the_latest(clock: HandClock) -> None:
    cache = Cache(clock, most=20 * 1024)
    for number in range(100):
        keep(cache, str(number), size=512)
    found = [number for number in range(100) if cache.get(("scope", str(number)))]
    assert 15 < len(found) < 40
    assert min(found) > 60


@pytest.mark.parametrize("size", [1, 100_000])
def test_what_is_asked_for_again_and_again_is_the_same_until_it_is_dropped(clock: HandClock, size: int) -> None:
    cache = Cache(clock)
    for number in range(300):  # more than are kept at hand
        keep(cache, str(number), size=size)
        assert cache.get(("scope", str(number))) == cache.get(("scope", str(number)))
    kept = cache.get(("scope", "299"))
    assert kept is not None
    assert kept.outcome == outcome(size)
    keep(cache, "299", size=2)
    kept = cache.get(("scope", "299"))
    assert kept is not None
    assert kept.outcome == outcome(2)
    cache.drop(("scope", "299"))
    assert cache.get(("scope", "299")) is None


def test_where_two_meet_in_one_slot_the_latest_is_found(clock: HandClock) -> None:
    cache = Cache(clock)
    cache._mask = 0
    keep(cache, "first", size=1)
    keep(cache, "last", size=2)
    assert cache.get(("scope", "first")) is None
    kept = cache.get(("scope", "last"))
    assert kept is not None
    assert kept.outcome == outcome(2)


class Namesake(tuple[str, str]):
    """An id with the hash of another."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1


def test_two_with_one_hash_are_not_taken_for_each_other(clock: HandClock) -> None:
    cache = Cache(clock)
    cache.put(Namesake(ID), "fingerprint", outcome(1), remaining=5.0, expires_at=5.0)
    assert cache.get(Namesake(ID)) is not None
    for other in (("scope", "other"), ("other", "key")):
        assert cache.get(Namesake(other)) is None


class Marked(str):
    """A text that is more than one, as a template engine has them."""

    __slots__ = ()


@pytest.mark.parametrize("key", ["\ud800", Marked("key")])
def test_what_cannot_be_packed_is_left_to_the_store(clock: HandClock, key: str) -> None:
    cache = Cache(clock)
    keep(cache, key)
    assert cache.get(("scope", key)) is None


@pytest.mark.parametrize(
    "odd",
    [
        Outcome("response", 201, (("retry-after", 5),)),  # type: ignore[arg-type]
        Outcome("value", body="no bytes"),  # type: ignore[arg-type]
        Outcome("response", 2**70),
    ],
)
def test_an_outcome_that_is_not_of_its_type_is_left_to_the_store(clock: HandClock, odd: Outcome) -> None:
    cache = Cache(clock)
    keep(cache)
    cache.put(ID, "fingerprint", odd, remaining=5.0, expires_at=None)
    assert cache.get(ID) is None  # nor is what was kept before: it is not true any more


def test_what_would_push_out_too_many_others_is_not_kept(clock: HandClock) -> None:
    cache = Cache(clock, most=16 * 1024)
    keep(cache, "small")
    keep(cache, "large", size=1024)
    assert cache.get(("scope", "small")) is not None
    assert cache.get(("scope", "large")) is None
    keep(cache, "small", size=1024)
    assert cache.get(("scope", "small")) is None  # what it was is not true any more


def test_headers_take_room_too(clock: HandClock) -> None:
    """A security policy is longer than many bodies."""
    cache = Cache(clock, most=20 * 1024)
    policy = Outcome("response", 204, (("content-security-policy", "x" * 480),))
    for number in range(100):
        cache.put(("scope", str(number)), "fingerprint", policy, remaining=3600.0, expires_at=5.0)
    found = [number for number in range(100) if cache.get(("scope", str(number)))]
    assert 15 < len(found) < 40


def test_a_cache_of_nothing_keeps_nothing(clock: HandClock) -> None:
    cache = Cache(clock, most=0)
    keep(cache)
    assert cache.get(ID) is None


keys = st.sampled_from("abcdef")
steps = st.lists(st.tuples(st.sampled_from(["put", "drop", "wait"]), keys, st.integers(0, 700)), max_size=60)


@given(steps)
def test_it_never_holds_more_than_its_bound_nor_says_what_was_not_kept_last(story: list[tuple[str, str, int]]) -> None:
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
        assert len(cache._ring) <= 16 * 1200
        kept = cache.get(("scope", key))
        if kept is not None:
            size, until = model[key]
            assert len(kept.outcome.body) == size
            assert clock.now < until


def test_threads_that_overwrite_each_others_are_never_given_anothers() -> None:
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


FORK = """
import os, sys, threading
from oncemore._ledger.cache import Cache
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


def test_a_forked_child_can_use_the_cache() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=20)
