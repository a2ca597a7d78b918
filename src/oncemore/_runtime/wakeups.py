"""Wakes callers that wait for a record to change: after this process's own writes, and after the store's messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .forks import reset_in_child

Id = tuple[str, str]
Subscriber = Callable[[Id | None], None]


class Waiter:
    """One caller that waits for one record.  After a notification between two waits, the next wait returns immediately."""

    __slots__ = ("_lock", "_notified", "_wake")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant for the reason given in `Wakeups._reset`
        self._notified = False
        self._wake: Callable[[], object] | None = None

    def notify(self) -> None:
        with self._lock:
            self._notified = True
            wake = self._wake
        if wake is not None:
            wake()

    def wait(self, timeout: float) -> Wait:
        """Return the effect of waiting for the next notification, at most *timeout* seconds."""
        return Wait(self, timeout)

    def arm(self, wake: Callable[[], object]) -> bool:
        """Have *wake* called at the next notification.  Return False instead if there was one since the last wait."""
        with self._lock:
            if self._notified:
                self._notified = False
                return False
            self._wake = wake
            return True

    def disarm(self) -> None:
        with self._lock:
            self._notified, self._wake = False, None


class Wait:
    """Effect: wait for one notification of *waiter*, at most *timeout* seconds."""

    __slots__ = ("timeout", "waiter")

    def __init__(self, waiter: Waiter, timeout: float) -> None:
        self.waiter = waiter
        self.timeout = timeout

    def run(self) -> None:
        event = threading.Event()
        if self.waiter.arm(event.set):
            try:
                event.wait(self.timeout)
            finally:
                self.waiter.disarm()

    async def arun(self) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def wake_from_any_thread() -> None:
            with suppress(RuntimeError):  # the loop was closed while this caller waited
                loop.call_soon_threadsafe(wake)

        if self.waiter.arm(wake_from_any_thread):
            timer = loop.call_later(self.timeout, wake)
            try:
                await future
            finally:
                timer.cancel()
                self.waiter.disarm()


class Wakeups:
    """The callers of this process that wait for records, and the subscribers to every change."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        # Reentrant: while a thread holds it, the garbage collector may run there and end an abandoned wait, or unsubscribe.
        self._lock = threading.RLock()
        self._waiters: dict[Id | None, set[Waiter]] = {}

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call *subscriber* with the id of each record that may have changed, until `unsubscribe`.  None means any record."""
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        with self._lock:
            self._subscribers = tuple(each for each in self._subscribers if each != subscriber)

    @contextmanager
    def waiting(self, id: Id) -> Iterator[Waiter]:
        """Yield a waiter for the record *id*, which is notified until the block ends."""
        waiter = Waiter()
        with self._lock:
            self._waiters.setdefault(id, set()).add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                waiters = self._waiters.get(id, set())  # empty if the process was forked meanwhile
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(id, None)

    def notify(self, id: Id | None) -> None:
        """Wake all waiters for the record *id*, and call the subscribers."""
        for subscriber in self._subscribers:
            subscriber(id)
        if self._waiters:  # nearly always there are none: then take no lock
            with self._lock:
                waiters = tuple(self._waiters.get(id, ()))
            for waiter in waiters:
                waiter.notify()

    def notify_all(self) -> None:
        """Wake all waiters, because messages of the store may have been missed while its connection was down."""
        self.notify(None)
        with self._lock:
            everyone = [waiter for waiters in self._waiters.values() for waiter in waiters]
        for waiter in everyone:
            waiter.notify()
