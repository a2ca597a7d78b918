"""`Sender`: delivers webhooks.  Any number of processes may run one; each delivery is sent by one of them at a time.

A round of the sender is: record results, match new messages with the endpoints that want them, claim deliveries that are due,
and start their requests.  A claimed delivery carries a token and a lease.  If the process dies, the lease ends and another
sender tries again, under the same webhook-id; a sender that was too slow changes nothing any more.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

import aiohttp

from .._contract.policy import duration
from .._ledger.guard import check_positive
from .._runtime.backoff import Backoff
from .._runtime.clock import SYSTEM
from .._runtime.loops import to_the_end
from .._runtime.plan import arun
from .._runtime.service import run_service
from .._runtime.wakeups import Waiter
from ..errors import ConfigurationError, OncemoreError
from . import statements as sql
from .claims import FOR_EVER, ROUND, Claimed, Claims
from .matching import MatchingPass
from .requests import Requests, Result
from .results import Attempt, Results, log
from .webhooks import WAKEUP, Webhooks

SHORTEST_POLL, LONGEST_POLL = 0.01, 0.5  # seconds between two looks for work, if nobody wakes the sender
TOGETHER = 0.005  # seconds in which other requests may end, so that their results are recorded together
HOUSEKEEPING = 60.0  # seconds between two looks for old messages
LEASE_MARGIN = 30.0  # seconds of a lease beyond the longest request
LAST_RECORDING = 10.0  # seconds for which a sender that stops tries to record its results
DOWN = Backoff(base=0.1, cap=5.0, jitter="equal")  # while the database is down


class Sender:
    """Delivers the webhooks of *webhooks*.

    Args:
        webhooks: What to send.
        concurrency: Requests at a time, each with its message (up to 1 MiB) in memory.  Failing endpoints share a quarter
            of them at most.
        connect_timeout: How long a connection may take.
        timeout: How long a request may take in all.
        grace: How long `run` waits for requests under way when it is told to stop.
    """

    def __init__(
        self,
        webhooks: Webhooks,
        *,
        concurrency: int = 1000,
        connect_timeout: float | str = "5s",
        timeout: float | str = "15s",
        grace: float | str = "20s",
    ) -> None:
        if not isinstance(webhooks, Webhooks):
            raise ConfigurationError(f"Sender needs Webhooks, and was given a {type(webhooks).__name__}")
        self.webhooks = webhooks
        self.concurrency = check_positive("concurrency", concurrency)
        self.timeout = aiohttp.ClientTimeout(total=duration(timeout), connect=duration(connect_timeout))
        if not duration(timeout) or not duration(connect_timeout):
            raise ConfigurationError("timeout and connect_timeout must be longer than 0: aiohttp would wait for ever")
        self.lease = duration(timeout) + LEASE_MARGIN
        self.grace = duration(grace)
        self._running: SenderRun | None = None

    def run(self) -> None:
        """Deliver until SIGTERM or SIGINT, or until `stop`; requests that are under way are finished."""
        run_service(self.arun, stop=self.stop, close=self.webhooks.tables.access.aclose)

    async def arun(self) -> None:
        """Deliver until `stop` is called or the task is cancelled; requests that are under way are finished."""
        self._running = SenderRun(self)
        try:
            await self._running.forever()
        finally:
            self._running = None

    def stop(self) -> None:
        """Let `run` or `arun` return once the requests under way have ended.  May be called on any thread."""
        running = self._running
        if running is not None:
            running.stop()

    def run_once(self) -> int:
        """Deliver what is due now, each once, and return how many deliveries succeeded."""
        return run_service(self.arun_once, close=self.webhooks.tables.access.aclose)

    async def arun_once(self) -> int:
        """Deliver what is due now: `run_once` for event loops."""
        return await SenderRun(self).drain()


class SenderRun:
    """One run of a sender, on one event loop."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.webhooks = sender.webhooks
        self.tables = sender.webhooks.tables
        self.requests = Requests(sender.webhooks, sender.timeout)
        self.claims = Claims(sender.webhooks, concurrency=sender.concurrency, lease=sender.lease)
        self.results = Results(sender.webhooks)
        self.matching = MatchingPass(sender.webhooks)
        self.waiter = Waiter()
        self.stopping = False
        self.delivered = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: deque[Attempt] = deque()  # attempts that are not recorded yet
        self._next_housekeeping = 0.0

    def stop(self) -> None:
        self.stopping = True
        self.waiter.notify()

    # Rounds

    async def forever(self) -> None:
        self.tables.access.listen()
        with self.tables.store.wakeups.waiting(WAKEUP) as self.waiter:
            try:
                await self._rounds()
            finally:
                await to_the_end(asyncio.ensure_future(self._end()))

    async def _rounds(self) -> None:
        poll, failures = SHORTEST_POLL, 0
        while not self.stopping:
            try:
                done = await to_the_end(asyncio.ensure_future(self._round(FOR_EVER)))
                failures = 0
            except ConfigurationError:  # a wrong password, say: no later attempt would do better
                raise
            except OncemoreError as error:
                failures += 1
                log.warning("Webhooks wait for the database: %s", error)
                await self.waiter.wait(DOWN.delay(failures, random.random())).arun()
                continue
            if done and len(self._tasks) < self.sender.concurrency:
                poll = SHORTEST_POLL
                await asyncio.sleep(0)
                continue
            began = SYSTEM.monotonic()
            await self.waiter.wait(poll).arun()
            if self._ended and self._tasks:
                await asyncio.sleep(TOGETHER)
            is_woken = SYSTEM.monotonic() - began < 0.9 * poll
            poll = SHORTEST_POLL if is_woken else min(2 * poll, LONGEST_POLL)

    async def _round(self, due_by: float) -> int:
        """Record results and start to send what is due, while a page of messages is matched; return how much was done."""
        parts = await asyncio.gather(self._work(due_by), self._match(), return_exceptions=True)
        for part in parts:
            if isinstance(part, BaseException):
                raise part
        await self._keep_house()
        return sum(parts)  # type: ignore[arg-type]

    async def _work(self, due_by: float) -> int:
        """Record results, then claim what is due: an endpoint that these results have disabled gets no more."""
        recorded = await self._record()
        free = self.sender.concurrency - len(self._tasks)
        claimed = await arun(self.claims.claim(free, due_by=due_by)) if free > 0 else []
        for each in claimed:
            self._tasks.add(asyncio.create_task(self._deliver(each)))
        return recorded + len(claimed)

    async def drain(self) -> int:
        """Send what is due now, each delivery once, and return how many succeeded."""
        try:
            while not self.matching.is_over:
                await self._match()
            ((((now,),),)) = await arun(self.tables.execute(self.tables.query(sql.NOW)))
            while await self._round(now) or self._tasks or self._ended:
                if self._tasks and not self._ended:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.sleep(TOGETHER if self._tasks else 0)
            return self.delivered
        finally:
            await to_the_end(asyncio.ensure_future(self._end()))

    async def _match(self) -> int:
        if self.matching.is_over:
            self.matching = MatchingPass(self.webhooks)
        return await arun(self.matching.match_page())

    async def _deliver(self, claimed: Claimed) -> None:
        """Send one request, and keep its result."""
        result = Result(error="the sender was stopped", tried=False)
        try:
            result = await self.requests.attempt(claimed)
        finally:
            # If the task was cancelled, nobody knows whether the request arrived, and another sender tries again.
            success = result.is_success if result.tried else None
            self.claims.end(claimed.registered.endpoint.id, success=success)
            self._ended.append((claimed, result))
            self._tasks.discard(asyncio.current_task())
            self.waiter.notify()

    async def _record(self) -> int:
        """Record the results so far; return how many."""
        count = 0
        while self._ended:
            attempts = [self._ended.popleft() for _ in range(min(len(self._ended), ROUND))]
            try:
                await arun(self.results.record(attempts))
            except BaseException:
                self._ended.extendleft(reversed(attempts))
                raise
            count += len(attempts)
            self.delivered += sum(result.is_success for _, result in attempts)
        return count

    async def _end(self) -> None:
        """Finish the requests under way, or give their deliveries back, and record the results."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.sender.grace)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_RECORDING)
        ends, failures = SYSTEM.monotonic() + LAST_RECORDING, 0
        while self._ended:
            try:
                await self._record()
            except OncemoreError as error:
                failures += 1
                if SYSTEM.monotonic() > ends:  # they are sent again when their leases have ended
                    log.warning("The results of %d webhooks could not be recorded: %s", len(self._ended), error)
                    break
                await asyncio.sleep(DOWN.delay(failures, random.random()))
        await self.requests.aclose()

    async def _keep_house(self) -> None:
        """Once a minute: park what was left for disabled endpoints, and delete a slice of what is too old."""
        if SYSTEM.monotonic() < self._next_housekeeping:
            return
        self._next_housekeeping = SYSTEM.monotonic() + HOUSEKEEPING
        self.claims.forget_idle()
        await arun(self.webhooks.endpoints.park_strays())
        if await arun(self.webhooks.purge_slice()):
            self._next_housekeeping = 0.0  # there may be more
