"""The heartbeat: leases are renewed in time while their holders work, and no longer."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from oncemore import Guard, Op
from oncemore._ledger.model import Lease, Operation
from oncemore._runtime.heartbeat import CLOSING, Heartbeat, Renewal
from oncemore.errors import ConfigurationError

from .pulse import PATIENCE, Ledger

ASKED = Operation("s", "k")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.heartbeat.close()


def until_idle(ledger: Ledger) -> None:
    ends = time.monotonic() + PATIENCE
    while ledger.heartbeat.threads.thread is not None:
        assert time.monotonic() < ends, "the thread stays"
        time.sleep(0.001)


def test_renewals_are_due_after_each_third_of_their_lease() -> None:
    now = 100.0

    class Frozen:
        def monotonic(self) -> float:
            return now

        time = monotonic

    heartbeat = Heartbeat(lambda renewal: iter(()), Frozen())  # type: ignore[arg-type, return-value]
    lease, renewals = Lease(ASKED, 1, 0.0), set[Renewal]()
    for seconds in (30.0, 60.0):
        renewal = Renewal(heartbeat, lease, seconds)
        renewal.due = now + seconds / 3
        renewals.add(renewal)
    assert heartbeat.take_due(renewals) == []
    now = 110.0
    (short,) = heartbeat.take_due(renewals)
    assert (short.seconds, short.due) == (30.0, 120.0)
    now = 120.0
    assert sorted(each.seconds for each in heartbeat.take_due(renewals)) == [30.0, 60.0]
    assert sorted(each.due for each in renewals) == [130.0, 140.0]


def test_blocking_holder_is_renewed_each_third_until_it_stops(ledger: Ledger) -> None:
    begun = time.monotonic()
    with ledger.kept(0.09):
        ledger.until_renewed("k", 3)
    assert all(at - begun >= 0.03 * count for count, at in enumerate(ledger.times("k"), 1))
    renewals = len(ledger.renewals)
    time.sleep(0.15)
    assert len(ledger.renewals) <= renewals + 1  # one may have been on its way
    assert ledger.heartbeat.threads.renewals == set()


def test_failed_performer_is_not_renewed_any_more() -> None:
    guard = Guard("memory://")

    def fails(op: Op) -> None:
        assert len(guard.heartbeat.threads.renewals) == 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.run(ASKED, fails)
    assert guard.heartbeat.threads.renewals == set()
    guard.close()


def test_shorter_lease_added_later_is_renewed_in_time(ledger: Ledger) -> None:
    """The thread sleeps until the long one is due, and is woken."""
    with ledger.kept(key="long"):
        time.sleep(0.02)  # it sleeps now
        begun = time.monotonic()
        with ledger.kept(0.15, "short"):
            ledger.until_renewed("short", 2)
        assert time.monotonic() - begun < 5  # it was not found by chance, at the next tick
    assert ledger.times("long") == []


def test_many_leases_of_different_lengths_are_all_renewed(ledger: Ledger) -> None:
    def holder(number: int) -> None:
        with ledger.kept(0.1 + number / 100, str(number)):
            ledger.until_renewed(str(number), 2)

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(holder, range(40)))
    assert len(ledger.renewers) <= 2  # one thread for all; another only if there was nothing to renew meanwhile
    assert ledger.heartbeat.threads.renewals == set()


def test_lost_lease_is_not_renewed_again(ledger: Ledger) -> None:
    """The late owner works on, but the lease is another's."""
    lost = threading.Event()

    def refuse(renewal: Renewal) -> None:
        renewal.lost = True
        lost.set()

    ledger.refuses = refuse
    with ledger.kept(0.03):
        assert lost.wait(PATIENCE)
        time.sleep(0.2)
    assert len(ledger.renewals) == 1


def test_failing_renewal_is_logged_and_tried_again(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[float] = []

    def fail_once(renewal: Renewal) -> None:
        attempts.append(time.monotonic())
        if len(attempts) == 1:
            raise ZeroDivisionError

    ledger.refuses = fail_once
    with caplog.at_level(logging.ERROR, "oncemore"), ledger.kept(0.6):
        ledger.until_renewed("k", 1)
    assert "could not be renewed" in caplog.text
    assert attempts[1] - attempts[0] < 0.6 / 3  # not only after another third


def test_quick_holders_start_one_thread_and_wake_nobody(ledger: Ledger) -> None:
    for count in range(100):
        with ledger.kept((30.0, 60.0)[count % 2]):
            pass
    assert ledger.looks == 0


def test_thread_ends_when_idle_and_starts_again(ledger: Ledger) -> None:
    for _ in range(2):
        with ledger.kept(0.03):
            ledger.until_renewed("k", len(ledger.renewals) + 1)
            thread = ledger.heartbeat.threads.thread
        assert thread is not None
        until_idle(ledger)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_lease_added_while_the_thread_ends_is_renewed(ledger: Ledger) -> None:
    for count in range(40):
        with ledger.kept(0.006, str(count)):
            ledger.until_renewed(str(count), 1)
        time.sleep(0.002)


def test_close_ends_the_thread_and_a_later_lease_starts_another(ledger: Ledger) -> None:
    ledger.heartbeat.close()
    with ledger.kept(0.03):
        ledger.until_renewed("k", 1)
        thread = ledger.heartbeat.threads.thread
    assert thread is not None
    ledger.heartbeat.close()
    assert not thread.is_alive()
    with ledger.kept(0.03):
        ledger.until_renewed("k", len(ledger.renewals) + 1)


def test_close_does_not_wait_for_the_next_tick(ledger: Ledger) -> None:
    with ledger.kept():
        pass
    begun = time.monotonic()
    ledger.heartbeat.close()
    assert time.monotonic() - begun < CLOSING / 2


def test_close_may_be_called_by_the_thread_itself(ledger: Ledger) -> None:
    closed = threading.Event()

    def close(renewal: Renewal) -> None:
        ledger.heartbeat.close()
        closed.set()

    ledger.refuses = close
    with ledger.kept(0.03):
        assert closed.wait(PATIENCE)


def test_async_performer_of_a_blocking_call_is_refused() -> None:
    guard = Guard("memory://")

    async def work(op: Op) -> None: ...

    with pytest.raises(ConfigurationError, match="is async"):
        guard.run(ASKED, work)
    assert guard.heartbeat.threads.renewals == set()
    guard.close()


def test_heartbeat_without_a_thread_performs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, performed = Guard("memory://"), []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            guard.run(ASKED, performed.append)
    assert performed == []
    assert guard.find(*ASKED.id) is None
    assert guard.heartbeat.threads.renewals == set()
    assert guard.run(ASKED, lambda op: "done").how == "stored"
    guard.close()


FORK = """
import os, sys, threading, time
from oncemore._runtime.clock import SYSTEM
from oncemore._runtime.heartbeat import Heartbeat, Renewal
from oncemore._runtime.plan import Call

renewed = []

def renew(renewal):
    yield Call(renewed.append, (os.getpid(), renewal.lease))

heartbeat = Heartbeat(renew, SYSTEM)

def keep(key):
    renewal = Renewal(heartbeat, key, 0.03)
    renewal.run()
    ends = time.monotonic() + 20
    while (os.getpid(), key) not in renewed:
        assert time.monotonic() < ends
        time.sleep(0.001)
    renewal.stop()

parents = Renewal(heartbeat, "parents", 0.03)
parents.run()
keep("before")

def hold(lock):
    with lock:
        held.set()
        let_go.wait(20)

held, let_go = threading.Event(), threading.Event()
threading.Thread(target=hold, args=[heartbeat.threads._lock]).start()
held.wait(20)
child = os.fork()  # at the worst moment
let_go.set()
if child == 0:
    keep("child")
    sys.exit(0 if (os.getpid(), "parents") not in renewed else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
keep("after")
parents.stop()
heartbeat.close()
"""


def test_forked_child_renews_its_own_leases_and_not_its_parents() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE)
