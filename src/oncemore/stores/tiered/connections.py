"""Whether Redis can be asked now: a breaker for a server that fails, and connections that no request waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..._ledger.events import log
from ..._ledger.store import STORE_FAILURES
from ..._runtime.clock import SYSTEM
from ..._runtime.forks import reset_in_child
from ..._runtime.loops import PerLoop, keep_task
from ..._runtime.plan import arun, run
from ...errors import StoreUnavailable
from ..redis.connection import CONNECTION_ERRORS, Address, ConnectionPool, connection_error
from ..redis.topology import Topology

FAILURES = 3  # in a row, until Redis is left alone
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
CONNECT_SECONDS = 1.0  # to open a connection to Redis, or to write to it, which no request waits for


class RedisBreaker:
    """Open while Redis is left alone, after failures: for a pause that doubles with each failure soon after another.

    It is logged when it opens, and when it closes.
    """

    def __init__(self, opened: str, closed: str) -> None:
        self._opened = opened  # has a place for the reason
        self._closed = closed
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.open = False
        self._lock = threading.Lock()
        self._failures = 0
        self._failed_at = float("-inf")
        self._pause = FIRST_PAUSE

    def is_due(self) -> bool:
        """Whether it is open, and one attempt should be made now."""
        return self.open and SYSTEM.monotonic() >= self._failed_at + self._pause

    def failed(self, error: BaseException, *, at_once: bool = False) -> bool:
        """Count a failure.  Open, and return True, after the third in a row; or after this one, if *at_once*."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES and not at_once:
                return False
            now = SYSTEM.monotonic()
            soon = now - self._failed_at < 2 * LONGEST_PAUSE
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if soon else FIRST_PAUSE
            self._failed_at = now
            opens, self.open = not self.open, True
        if opens:
            log.warning(self._opened, error)
        return True

    def worked(self) -> None:
        """Close it, if it was open."""
        self._failures = 0
        if self.open:
            with self._lock:
                closes, self.open = self.open, False
            if closes:
                log.warning(self._closed)


class NotConnected(StoreUnavailable):
    """No connection to Redis is open; one is being opened, and nobody waits for it."""


class OpenConnections(ConnectionPool):
    """Lends connections that are open already.  New ones are opened in the background, and must answer a PING first.

    For threads, `open_wanted` opens them, on a background thread that *wake* wakes; for an event loop, a task does.
    """

    def __init__(self, topology: Topology, breaker: RedisBreaker, wake: Callable[[], None]) -> None:
        self.topology = topology
        self.breaker = breaker
        self.wake = wake
        super().__init__(topology.pool.connector)

    def _reset(self) -> None:
        super()._reset()
        # From the start, so that it is noticed at once if Redis is missing.  None: whatever server is the first.
        self.wanted: set[Address] = {None}
        self._opening: PerLoop[set[Address]] = PerLoop(set)

    def open(self, address: Address, timeout: float) -> Any:
        self.wanted.add(address)
        self.wake()
        raise NotConnected("No connection to Redis is open yet")

    def open_on_loop(self, address: Address) -> Any:
        opening = self._opening.get()
        if address not in opening:
            opening.add(address)
            keep_task(self._open_on_loop(address, opening))
        raise NotConnected("No connection to Redis is open yet")

    async def _open_on_loop(self, wanted: Address, opening: set[Address]) -> None:
        connection: Any = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if not self.topology.known:
                    await arun(self.topology.locate(CONNECT_SECONDS))
                address = self._current(wanted)
                connection = self.connector.open_on_loop(address)
                await connection.connect()
                await connection.send_command("PING")
                await connection.read_response()
        except (*CONNECTION_ERRORS, *STORE_FAILURES) as error:
            if connection is not None:
                await connection.disconnect(nowait=True)
            self._failed(error, wanted)
        else:
            await self.aput_back(address, self.generation(address), connection)
            self.breaker.worked()
        finally:
            opening.discard(wanted)

    def open_wanted(self) -> None:
        """Open the connections that threads have asked for; and one if it is time to try Redis again."""
        if self.breaker.is_due():
            self.wanted.add(None)
        while self.wanted:
            wanted, connection = self.wanted.pop(), None
            try:
                if not self.topology.known:
                    run(self.topology.locate(CONNECT_SECONDS))
                address = self._current(wanted)
                connection = self.connector.open(address, CONNECT_SECONDS)
                connection.connect()
                connection.send_command("PING")
                connection.read_response()
            except (*CONNECTION_ERRORS, *STORE_FAILURES) as error:
                if connection is not None:
                    with suppress(*CONNECTION_ERRORS):
                        connection.disconnect()
                self._failed(error, wanted)
            else:
                self.put_back(address, self.generation(address), connection)
                self.breaker.worked()

    def _current(self, wanted: Address) -> Address:
        """The address to connect to: if there is one primary, it may be another server by now."""
        return self.topology.primaries()[0] if self.topology.one_primary or wanted is None else wanted

    def _failed(self, error: Exception, address: Address) -> None:
        self.topology.known = False
        own = error if isinstance(error, STORE_FAILURES) else connection_error(error, address)
        self.breaker.failed(own, at_once=True)
