"""Renews leases in the background while their holders work: one thread for blocking callers, one timer per event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from .clock import TimeSource
from .forks import reset_in_child
from .loops import PerLoop, keep_task
from .plan import Plan, arun, run

log = logging.getLogger("oncemore")

SHORTEST_TICK = 0.005
NEVER = float("inf")
# The seconds that `close` waits for a renewal that is under way.
CLOSING = 5.0


@dataclass(slots=True, eq=False)
class Renewal:
    """Effect: keep *lease*, which is *seconds* long, alive from now on until `stop`.

    The renew function sets *lost* if the store refuses the lease.  The lease is then not renewed any more.
    """

    heartbeat: Heartbeat
    lease: Any
    seconds: float
    due: float = field(default=0.0, init=False)
    lost: bool = field(default=False, init=False)
    stopped: bool = field(default=False, init=False)
    group: set[Renewal] | None = field(default=None, init=False)  # the renewals of the same timer, this one included

    def run(self) -> None:
        self.heartbeat.threads.add(self)

    async def arun(self) -> None:
        self.heartbeat.on_loop().add(self)

    def stop(self) -> None:
        """Stop renewing the lease.  One that is under way may still be refused; `stopped` says that this does not matter."""
        self.stopped = True
        if self.group is not None:
            self.group.discard(self)


class Heartbeat:
    """Keeps leases alive: `yield Renewal(heartbeat, lease, seconds)` in a plan, and `stop()` when the work is over.

    A lease is renewed at the first tick after a third of it has passed, and again after each further third.  A renewal that
    fails is tried again at the next tick.  Ticks come at a fixed interval, a sixth of the shortest lease.  So adding a lease
    costs one entry in a set and wakes nobody, and a renewal has at least three tries before the lease ends.

    Args:
        renew: Makes the plan that renews one lease, and that sets `lost` if the lease is no longer the caller's.
        clock: The clock that decides when a renewal is due.
    """

    def __init__(self, renew: Callable[[Renewal], Plan[None]], clock: TimeSource) -> None:
        self.renew = renew
        self.now = clock.monotonic
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.threads = ThreadTimer(self)
        self._loops = PerLoop(lambda: LoopTimer(self))

    def on_loop(self) -> LoopTimer:
        """Return the timer of the running event loop."""
        return self._loops.get()

    def take_due(self, renewals: set[Renewal]) -> list[Renewal]:
        """Return the renewals that are due now, and set the time of the next one for each."""
        now = self.now()
        due = [each for each in tuple(renewals) if each.due <= now]
        renewals.difference_update([each for each in due if each.lost])
        for each in due:
            each.due = now + each.seconds / 3
        return [each for each in due if not each.lost]

    def renew_one(self, renewal: Renewal) -> Plan[None]:
        """Renew one lease.  After an error, the next tick tries again; no other lease is affected."""
        try:
            yield from self.renew(renewal)
        except Exception:
            renewal.due = 0.0
            log.exception("A lease of %g s could not be renewed; the next tick tries again", renewal.seconds)

    def close(self) -> None:
        """End the thread.  A lease that is added later starts another one."""
        self.threads.close()


class LoopTimer:
    """The renewals of one event loop.  The timer runs only while there are renewals."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.renewals: set[Renewal] = set()
        self.shortest = NEVER  # the length of the shortest lease; NEVER if the timer does not run
        self.started = 0  # the number of the latest timer; earlier ones do nothing

    def add(self, renewal: Renewal) -> None:
        renewals = renewal.group = self.renewals
        renewals.add(renewal)
        seconds = renewal.seconds
        renewal.due = self.heartbeat.now() + seconds / 3
        if seconds < self.shortest:
            self._start(seconds)

    def _start(self, shortest: float) -> None:
        self.shortest, self.started = shortest, self.started + 1
        # In an empty context, because the timer outlives the caller that starts it.  Its handle is not kept, because it would
        # keep the loop alive, and the heartbeat holds loops only weakly.
        interval = max(SHORTEST_TICK, shortest / 6)
        asyncio.get_running_loop().call_later(interval, self._tick, self.started, context=Context())

    def _tick(self, started: int) -> None:
        if started != self.started:  # a later timer has a shorter interval
            return
        for renewal in self.heartbeat.take_due(self.renewals):
            keep_task(arun(self.heartbeat.renew_one(renewal)))
        if self.renewals:
            self._start(self.shortest)
        else:
            self.shortest = NEVER


class ThreadTimer:
    """The renewals of all threads.  One background thread makes them; it starts when needed, and ends at an idle tick."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.renewals: set[Renewal] = set()
        self.shortest = NEVER  # the length of the shortest lease
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()

    def add(self, renewal: Renewal) -> None:
        renewals = renewal.group = self.renewals
        renewal.due = self.heartbeat.now() + renewal.seconds / 3
        renewals.add(renewal)  # before looking at `thread`: see _ended
        if self.thread is None or renewal.seconds < self.shortest:
            try:
                self._start(renewal.seconds)
            except BaseException:
                renewal.stop()
                raise

    def _start(self, shortest: float) -> None:
        with self._lock:
            if self.thread is None:
                self.shortest = shortest
                self._wake = threading.Event()
                thread = threading.Thread(target=self._run, name="oncemore-heartbeat", daemon=True)
                thread.start()
                self.thread = thread
            elif shortest < self.shortest:
                self.shortest = shortest
                self._wake.set()

    def _run(self) -> None:
        with self._lock:  # wait until `_start` has set `thread`
            wake = self._wake
        while True:
            wake.wait(max(SHORTEST_TICK, self.shortest / 6))
            wake.clear()
            if self._ended():
                return
            for renewal in self.heartbeat.take_due(self.renewals):
                run(self.heartbeat.renew_one(renewal))

    def _ended(self) -> bool:
        """End the thread, and return True, if it was closed or there is nothing to renew.

        Clear `thread` first, then look once more: a lease added in between is either seen here, or starts a new thread.
        """
        with self._lock:
            current = threading.current_thread()
            if self.thread is not current:
                return True
            self.thread = None
            if self.renewals:
                self.thread = current
            return self.thread is None

    def close(self) -> None:
        with self._lock:
            thread, self.thread = self.thread, None
            self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=CLOSING)
