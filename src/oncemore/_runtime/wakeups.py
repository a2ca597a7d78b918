"""Wakes those who wait for a record: one bell a store, rung by this process's writes and by the store's messages."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any

from .forks import reset_in_child

Id = tuple[str, str]


class Waiter:
    """One who waits for one record.  A ring between two waits is not lost: the next wait returns at once."""

    __slots__ = ("_lock", "_rung", "_wake")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # as the bell's
        self._rung = False
        self._wake: Callable[[], object] | None = None

    def ring(self) -> None:
        with self._lock:
            self._rung = True
            wake = self._wake
        if wake is not None:
            wake()

    def wait(self, timeout: float) -> Wait:
        """The effect of waiting for the next ring, or until *timeout* seconds have passed."""
        return Wait(self, timeout)

    def arm(self, wake: Callable[[], object]) -> bool:
        """Ask to be woken by *wake*; False where the bell has rung since the last wait."""
        with self._lock:
            if self._rung:
                self._rung = False
                return False
            self._wake = wake
            return True

    def disarm(self) -> None:
        with self._lock:
            self._rung, self._wake = False, None


class Wait:
    """Wait for one ring of *waiter*, at most *timeout* seconds."""

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

        def ring() -> None:
            with suppress(RuntimeError):  # the loop was closed under its waiters; the one who rings must not suffer
                loop.call_soon_threadsafe(wake)

        if self.waiter.arm(ring):
            timer = loop.call_later(self.timeout, wake)
            try:
                await future
            finally:
                timer.cancel()
                self.waiter.disarm()


class Bell:
    """Who waits for which record in this process, and who wants to hear of every change."""

    def __init__(self) -> None:
        self._listeners: list[tuple[weakref.ref[Any] | None, Callable[..., None]]] = []
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        # One that its own thread may take twice: a wait that nobody goes on with ends when the garbage is collected.
        self._lock = threading.RLock()
        self._waiters: dict[Id | None, set[Waiter]] = {}

    def hear(self, listener: Callable[[Id | None], None]) -> None:
        """Call *listener* with the id of every record that changes; a method, for as long as its object is in use.

        None stands for any record: some changes may have been missed.
        """
        added: tuple[weakref.ref[Any] | None, Callable[..., None]] = (None, listener)
        if isinstance(listener, MethodType):
            added = (weakref.ref(listener.__self__), listener.__func__)
        with self._lock:
            # The dead are removed here, where they are replaced, so that ringing need not change the list.
            living = [(owner, function) for owner, function in self._listeners if owner is None or owner() is not None]
            self._listeners = [*living, added]

    @contextmanager
    def waiting(self, id: Id) -> Iterator[Waiter]:
        """A waiter for the record *id*, from now until the block ends."""
        waiter = Waiter()
        with self._lock:
            self._waiters.setdefault(id, set()).add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                waiters = self._waiters.get(id, set())  # none, where the process was forked meanwhile
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(id, None)

    def ring(self, id: Id | None) -> None:
        """Wake all who wait for the record *id*, and tell those who hear of every change."""
        for owner, function in self._listeners:
            if owner is None:
                function(id)
            elif (listener := owner()) is not None:
                function(listener, id)
        if self._waiters:  # the common case is that nobody waits, and costs no lock
            with self._lock:
                waiters = tuple(self._waiters.get(id, ()))
            for waiter in waiters:
                waiter.ring()

    def ring_all(self) -> None:
        """Wake everyone: the store's messages were not heard for a while, and some may have been missed."""
        self.ring(None)
        with self._lock:
            waiters = [waiter for those in self._waiters.values() for waiter in those]
        for waiter in waiters:
            waiter.ring()
