"""The heartbeat: leases are renewed in time for as long as their performers run, and not a moment longer."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from oncemore._ledger import heartbeat
from oncemore._ledger.context import Op
from oncemore._ledger.heartbeat import Beat, Heartbeat
from oncemore._ledger.model import Lease, Operation
from oncemore.errors import ConfigurationError

from .pulse import PATIENCE, Ledger, two_leases


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.heart.close()


def until_idle(ledger: Ledger) -> None:
    ends = time.monotonic() + PATIENCE
    while ledger.heart.threads._thread is not None:
        assert time.monotonic() < ends, "the thread stays"
        time.sleep(0.001)


def test_due_is_whoever_has_come_to_a_third_of_his_lease() -> None:
    now = 100.0

    class Frozen:
        def monotonic(self) -> float:
            return now

        time = monotonic

    heart = Heartbeat(lambda beat: iter(()), Frozen())  # type: ignore[arg-type, return-value]
    lease = Lease(Operation("s", "k"), 1, 0.0)
    beats = {heart.beat(lease, 30.0), heart.beat(lease, 60.0)}
    assert heart.due(beats) == []
    now = 110.0
    (short,) = heart.due(beats)
    assert (short.seconds, short.due) == (30.0, 120.0)
    now = 120.0
    assert sorted(beat.seconds for beat in heart.due(beats)) == [30.0, 60.0]
    assert sorted(beat.due for beat in beats) == [130.0, 140.0]


def test_a_blocking_performer_is_renewed_at_each_third_of_its_lease_until_it_ends(ledger: Ledger) -> None:
    """CASES 24."""
    begun = time.monotonic()

    def work(op: Op) -> str:
        ledger.until_renewed(op.key, 3)
        return "done"

    assert ledger.perform(work, lease=0.09).run() == "done"
    assert all(at - begun >= 0.03 * count for count, at in enumerate(ledger.times("k"), 1))
    renewals = len(ledger.renewals)
    time.sleep(0.15)
    assert len(ledger.renewals) <= renewals + 1  # one may have been on its way
    assert ledger.heart.threads.beats == set()


def test_a_performer_that_fails_is_not_renewed_any_more(ledger: Ledger) -> None:
    def work(op: Op) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ledger.perform(work).run()
    assert ledger.heart.threads.beats == set()


def test_a_shorter_lease_that_comes_later_is_renewed_in_time(ledger: Ledger) -> None:
    """The thread, which sleeps until the long one is due, is called."""
    with ThreadPoolExecutor(1) as pool:
        release = threading.Event()
        long = pool.submit(ledger.perform(lambda op: release.wait(PATIENCE), key="long").run)
        while not ledger.heart.threads.beats:
            time.sleep(0.001)
        time.sleep(0.02)  # it sleeps now
        begun = time.monotonic()
        ledger.perform(lambda op: ledger.until_renewed("short", 2), lease=0.15, key="short").run()
        assert time.monotonic() - begun < heartbeat.IDLE  # it was not found by chance, at the next look
        release.set()
        assert long.result(PATIENCE)
    assert ledger.times("long") == []


def test_many_leases_of_different_lengths_are_all_renewed(ledger: Ledger) -> None:
    def performer(number: int) -> None:
        key = str(number)
        ledger.perform(lambda op: ledger.until_renewed(key, 2), lease=0.1 + number / 100, key=key).run()

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(performer, range(40)))
    assert ledger.renewers == {ledger.heart.threads._thread}
    assert ledger.heart.threads.beats == set()


def test_all_leases_that_a_performer_depends_on_are_renewed(ledger: Ledger) -> None:
    """The one that comes first in the list may be due last."""
    ledger.perform(lambda op: time.sleep(0.01)).run()  # our thread sleeps for long now
    begun = time.monotonic()
    two_leases(ledger, lambda op: ledger.until_renewed("outer", 2)).run()
    assert time.monotonic() - begun < heartbeat.IDLE
    assert ledger.times("inner") == []


def test_a_lost_lease_is_not_asked_for_again_and_keeps_nobody_busy(ledger: Ledger) -> None:
    """CASES 24: the late owner runs on, but it is over."""
    lost = threading.Event()

    def refuse(beat: Beat) -> None:
        beat.lost = True
        lost.set()

    def work(op: Op) -> None:
        assert lost.wait(PATIENCE)
        time.sleep(0.2)

    ledger.refuses = refuse
    ledger.perform(work, lease=0.03).run()
    assert len(ledger.renewals) == 1
    assert ledger.looks < 30


def test_a_renewal_that_fails_in_an_unforeseen_way_is_logged_and_the_next_beat_tries_again(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0

    def fail_once(beat: Beat) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ZeroDivisionError

    ledger.refuses = fail_once
    with caplog.at_level(logging.ERROR, "oncemore"):
        ledger.perform(lambda op: ledger.until_renewed("k", 1), lease=0.06).run()
    assert "could not be renewed" in caplog.text


def test_quick_performers_cost_no_more_than_an_entry_in_a_set(ledger: Ledger) -> None:
    calls = 0
    hasten = ledger.heart.threads._hasten

    def counted(due: float, rest: float) -> None:
        nonlocal calls
        calls += 1
        hasten(due, rest)

    ledger.heart.threads._hasten = counted  # type: ignore[method-assign]
    begun = time.monotonic()
    for count in range(100):
        ledger.perform(lambda op: None, lease=(30.0, 6.0)[count % 2]).run()
        time.sleep(0.001)  # let the thread see that there is nothing to do any more
    assert calls <= 4 + 4 * (time.monotonic() - begun)


def test_the_thread_ends_when_there_is_nothing_to_do_and_starts_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "IDLE", 0.05)
    threads = ledger.heart.threads
    for _ in range(2):
        ledger.perform(lambda op: ledger.until_renewed("k", len(ledger.renewals) + 1), lease=0.03).run()
        thread = threads._thread
        assert thread is not None
        until_idle(ledger)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert threads.next == float("inf")


def test_a_lease_that_comes_at_the_very_end_of_the_thread_is_not_forgotten(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "IDLE", 0.002)
    monkeypatch.setattr(heartbeat, "BRIEFEST", 0.001)
    for count in range(40):
        key = str(count)
        ledger.perform(lambda op, key=key: ledger.until_renewed(key, 1), lease=0.006, key=key).run()
        time.sleep(0.002)


def test_close_ends_the_thread_and_a_later_performer_starts_another(ledger: Ledger) -> None:
    ledger.heart.close()
    ledger.perform(lambda op: ledger.until_renewed("k", 1), lease=0.03).run()
    thread = ledger.heart.threads._thread
    assert thread is not None
    ledger.heart.close()
    assert not thread.is_alive()
    ledger.perform(lambda op: ledger.until_renewed("k", len(ledger.renewals) + 1), lease=0.03).run()


def test_close_does_not_wait_for_the_thread_to_wake_by_itself(ledger: Ledger) -> None:
    ledger.perform(lambda op: time.sleep(0.01)).run()
    begun = time.monotonic()
    ledger.heart.close()
    assert time.monotonic() - begun < heartbeat.IDLE / 2


def test_close_may_be_called_by_the_thread_itself(ledger: Ledger) -> None:
    closed = threading.Event()

    def close(beat: Beat) -> None:
        ledger.heart.close()
        closed.set()

    ledger.refuses = close
    ledger.perform(lambda op: closed.wait(PATIENCE), lease=0.03).run()
    assert closed.is_set()


def test_an_async_performer_that_nobody_awaits_is_refused_before_it_begins(ledger: Ledger) -> None:
    async def work(op: Op) -> None: ...

    with pytest.raises(ConfigurationError, match="is async"):
        ledger.perform(work).run()
    assert ledger.heart.threads.beats == set()


def test_where_no_thread_can_be_started_nothing_is_performed_and_the_next_one_tries_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    performed: list[Op] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            ledger.perform(performed.append).run()
    assert performed == []
    ledger.perform(lambda op: ledger.until_renewed("k", 1), lease=0.03).run()


FORK = """
import os, sys, threading, time
from oncemore._runtime.clock import SYSTEM
from oncemore._ledger.heartbeat import Heartbeat, Perform
from oncemore._ledger.model import Lease, Operation
from oncemore._ledger.context import Op
from oncemore._runtime.plan import Call

renewed = []

def renew(beat):
    yield Call(renewed.append, (os.getpid(), beat.lease.operation.key))

heart = Heartbeat(renew, SYSTEM)

def perform(key):
    def work(op):
        ends = time.monotonic() + 20
        while (os.getpid(), key) not in renewed:
            assert time.monotonic() < ends
            time.sleep(0.001)
    lease = Lease(Operation("s", key), 1, 0.0)
    Perform(heart, (heart.beat(lease, 0.03),), work, Op(lease)).run()

ended = threading.Event()
lease = Lease(Operation("s", "parents"), 1, 0.0)
parents = Perform(heart, (heart.beat(lease, 0.03),), lambda op: ended.wait(20), Op(lease))
running = threading.Thread(target=parents.run)
running.start()
perform("before")

def hold(lock):
    with lock:
        held.set()
        let_go.wait(20)

held, let_go = threading.Event(), threading.Event()
threading.Thread(target=hold, args=[heart.threads._changed]).start()
held.wait(20)
child = os.fork()  # at the worst moment
let_go.set()
if child == 0:
    perform("child")
    sys.exit(0 if (os.getpid(), "parents") not in renewed else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
perform("after")
ended.set()
running.join()
heart.close()
"""


def test_a_forked_child_keeps_its_own_leases_alive_and_not_its_parents() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE)


def test_a_thread_that_could_not_be_started_is_started_by_the_next_performer(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that is short of threads for a moment must not leave all later leases without their heartbeat."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            ledger.perform(lambda op: None, lease=0.09).run()
    ledger.perform(lambda op: ledger.until_renewed(op.key, 1), lease=0.09).run()
