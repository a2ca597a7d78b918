"""`Sender`: delivers webhooks.  Any number of processes may run one; each delivery is sent by one of them at a time.

Each round of the sender records results, matches new messages with the endpoints that want them, claims deliveries
that are due, and starts their requests.  A claimed delivery has a token and a lease.  If the process dies, the lease
ends and another sender tries again, under the same webhook-id.  A sender that was too slow changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from typing import Any

import aiohttp
import msgspec

from .._contract.policy import duration
from .._ledger.guard import check_positive
from .._ledger.model import Operation
from .._runtime.backoff import Backoff
from .._runtime.clock import SYSTEM
from .._runtime.loops import to_the_end
from .._runtime.plan import Plan, arun
from .._runtime.service import run_service
from .._runtime.wakeups import Waiter
from ..errors import ConfigurationError, NotFound, OncemoreError
from . import statements as sql
from .claims import FOR_EVER, ROUND, Claimed, Claims, MatchingPass
from .requests import Requests, Result
from .signature import new_id
from .webhooks import WAKEUP, Webhooks, pack_data

log = logging.getLogger("oncemore.webhooks")

SHORTEST_POLL, LONGEST_POLL = 0.01, 0.5  # seconds between two looks for work, if nobody wakes the sender
TOGETHER = 0.005  # seconds to wait for other requests to end, so that their results are recorded together
HOUSEKEEPING = 60.0  # seconds between two looks for old messages and for deliveries to park
LEASE_MARGIN = 30.0  # seconds of a lease beyond the longest request
LAST_RECORDING = 10.0  # seconds for which a stopping sender tries to record its results
DOWN = Backoff(base=0.1, cap=5.0, jitter="equal")  # the pauses while the database is down
PAUSES = {429, 502, 504}  # statuses after which the whole endpoint pauses
SHORTEST_PAUSE = 5.0  # seconds
DISABLED = "endpoint.disabled"

Attempt = tuple[Claimed, Result]
encode = msgspec.json.encode


class Sender:
    """Sends the deliveries of *webhooks* that are due.

    Args:
        webhooks: The webhooks to send.
        concurrency: The most requests at a time.  Each has a connection, and its message (up to 1 MiB) in memory.
            Failing endpoints share a quarter of them at most.
        connect_timeout: How long a connection may take.
        timeout: How long a request may take in all.
        grace: How long a sender that stops waits for its requests under way.
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
            raise ConfigurationError(f"webhooks is a {type(webhooks).__name__}: make Webhooks, as in Webhooks(guard)")
        self.webhooks = webhooks
        self.concurrency = check_positive("concurrency", concurrency)
        self.timeout = aiohttp.ClientTimeout(total=duration(timeout), connect=duration(connect_timeout))
        if not duration(timeout) or not duration(connect_timeout):
            raise ConfigurationError("timeout and connect_timeout must be longer than 0: aiohttp would wait for ever")
        self.lease = duration(timeout) + LEASE_MARGIN
        self.grace = duration(grace)
        self._running: SenderRun | None = None

    def run(self) -> None:
        """Deliver until SIGTERM, SIGINT or `stop`, and then finish the requests under way, within *grace*."""
        run_service(self.arun, stop=self.stop, close=self.webhooks.tables.access.aclose)

    async def arun(self) -> None:
        """Deliver until `stop` or until the task is cancelled, as `run` does."""
        self._running = SenderRun(self)
        try:
            await self._running.forever()
        finally:
            self._running = None

    def stop(self) -> None:
        """Have `run` or `arun` return after the requests under way.  May be called on any thread."""
        running = self._running
        if running is not None:
            running.stop()

    def run_once(self) -> int:
        """Try each delivery that is due now once, and return how many succeeded."""
        return run_service(self.arun_once, close=self.webhooks.tables.access.aclose)

    async def arun_once(self) -> int:
        """Try each delivery that is due now once, as `run_once` does."""
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
            except ConfigurationError:  # for example a wrong password: later attempts would fail as well
                raise
            except OncemoreError as error:
                failures += 1
                log.warning("The sender of webhooks waits for the database, and tries again: %s", error)
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
        """Record results and start requests, while a page of messages is matched; return how much was done."""
        parts = await asyncio.gather(self._work(due_by), self._match(), return_exceptions=True)
        for part in parts:
            if isinstance(part, BaseException):
                raise part
        await self._keep_house()
        return sum(parts)  # type: ignore[arg-type]

    async def _work(self, due_by: float) -> int:
        """Record results before claiming, because they may disable an endpoint; return how much was done."""
        recorded = await self._record()
        free = self.sender.concurrency - len(self._tasks)
        claimed = await arun(self.claims.claim(free, due_by=due_by)) if free > 0 else []
        for each in claimed:
            self._tasks.add(asyncio.create_task(self._deliver(each)))
        return recorded + len(claimed)

    async def drain(self) -> int:
        """Try each delivery that is due now once, and return how many succeeded."""
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
        """Send one request, and keep its result until `_record`."""
        result = Result(error="the sender was stopped", tried=False)
        try:
            if SYSTEM.monotonic() - claimed.began > LEASE_MARGIN:
                result.error = "the sender stood still, and its lease could have ended within the request"
            else:
                result = await self.requests.attempt(claimed)
        finally:
            # If the task was cancelled, nobody knows whether the request arrived, and another sender tries again.
            success = result.is_success if result.tried else None
            self.claims.end(claimed.registered.endpoint.id, success=success)
            self._ended.append((claimed, result))
            self._tasks.discard(asyncio.current_task())
            self.waiter.notify()

    async def _record(self) -> int:
        """Record the results so far, and return how many there were."""
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
                if SYSTEM.monotonic() > ends:  # the deliveries are sent again after their leases
                    log.warning("%d results were not recorded; the webhooks are repeated: %s", len(self._ended), error)
                    break
                await asyncio.sleep(DOWN.delay(failures, random.random()))
        await self.requests.aclose()

    async def _keep_house(self) -> None:
        """Once a minute, park deliveries of disabled endpoints and delete old messages, a slice in each round."""
        if SYSTEM.monotonic() < self._next_housekeeping:
            return
        self._next_housekeeping = SYSTEM.monotonic() + HOUSEKEEPING
        self.claims.forget_idle()
        parked = await arun(self.webhooks.endpoints.park_strays())
        purged = await arun(self.webhooks.purge_slice())
        if parked or purged:
            self._next_housekeeping = 0.0  # there may be more


class Results:
    """Records the attempts of one sender.

    If an attempt is recorded again because the answer to a commit was lost, nothing changes.
    """

    def __init__(self, webhooks: Webhooks) -> None:
        self.webhooks = webhooks
        self.tables = webhooks.tables

    def record(self, attempts: list[Attempt]) -> Plan[None]:
        """Write deliveries and attempts in one transaction, then disable endpoints that are gone or fail too long."""
        tables = self.tables
        rows = [self._row(claimed, result) for claimed, result in attempts]
        packed = encode(rows).decode()
        queries = [tables.query(sql.FINISH, packed), tables.query(sql.ADD_ATTEMPTS, packed)]
        ended = {
            (claimed.registered.endpoint.id, claimed.order_key)
            for (claimed, _), row in zip(attempts, rows, strict=True)
            if claimed.order_key is not None and row["state"] != "pending"
        }
        queries += self.webhooks.next_in_order(ended)
        health = self._health(attempts, rows)
        if health:
            queries.append(tables.query(sql.HEALTH, encode(health).decode()))
        # Lock endpoints first, so that none is enabled or disabled meanwhile.  The statement locks them in the order of
        # their ids, because another sender may record results of the same endpoints.
        locked = {
            claimed.registered.endpoint.id
            for (claimed, _), row in zip(attempts, rows, strict=True)
            if claimed.order_key is not None or row["state"] != "delivered"
        }
        locks = [tables.query(sql.LOCK_ENDPOINTS, encode([{"id": id} for id in locked]).decode())] if locked else []
        yield from tables.execute(*locks, *queries)
        self._report(attempts, rows)
        yield from self._disable_gone(attempts)
        yield from self._disable_failing([each for each in health if not each["healthy"]])

    def _row(self, claimed: Claimed, result: Result) -> dict[str, Any]:
        """Return a row with the delivery after an attempt, and the attempt itself."""
        now, former = claimed.now, claimed.former
        state, next_at, attempts = "delivered", claimed.next_at, claimed.attempts
        if not result.tried:  # any sender may claim it immediately
            state, attempts = "pending", claimed.attempts - 1
        elif not result.is_success:
            at = self._next_attempt(claimed, result, now)
            if former is not None and former != "pending":  # a manual resend that failed leaves the former state
                state = former
            else:
                state = "dead" if at is None else "pending"
                next_at = next_at if at is None else at
        return {
            "seq": claimed.seq,
            "token": claimed.token,
            "state": state,
            "next_at": next_at,
            "first_at": claimed.first_at,
            "attempts": attempts,
            "ended_at": None if state == "pending" else now,
            "status": result.status,
            "error": result.error,
            "former": former if not result.tried else None,
            "at": now - result.duration,
            "duration": result.duration,
            "response": result.response,
            "logged": result.tried,
        }

    def _next_attempt(self, claimed: Claimed, result: Result, now: float) -> float | None:
        """Return when the delivery is tried again, or None if it is not."""
        if result.permanent or result.status == 410:
            return None
        step = self.webhooks.schedule.next_attempt(now - claimed.first_at, result.retry_after)
        return None if step is None else claimed.first_at + step

    def _health(self, attempts: list[Attempt], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the health of each endpoint after these attempts.  Manual resends do not count.

        One success makes it healthy.  An overloaded endpoint pauses, at most until the refused delivery is tried again.
        """
        found: dict[str, dict[str, Any]] = {}
        for (claimed, result), row in zip(attempts, rows, strict=True):
            if claimed.former is not None or not result.tried:
                continue
            id = claimed.registered.endpoint.id
            known = found.setdefault(id, {"id": id, "healthy": False, "pause": None})
            known["healthy"] = known["healthy"] or result.is_success
            asked = result.retry_after
            if not result.is_success and (result.status in PAUSES or asked is not None):
                until = claimed.now + max(asked or 0.0, SHORTEST_PAUSE)
                latest = row["next_at"] if row["state"] == "pending" else claimed.now + SHORTEST_PAUSE
                known["pause"] = max(known["pause"] or 0.0, min(until, latest))
        return sorted(found.values(), key=lambda each: str(each["id"]))

    # Endpoints that are disabled

    def _disable_gone(self, attempts: list[Attempt]) -> Plan[None]:
        gone = {
            claimed.registered.endpoint.id
            for claimed, result in attempts
            if result.status == 410 and claimed.former is None
        }
        for id in sorted(gone):
            yield from self._disable(id, "the endpoint answered 410 Gone")

    def _disable_failing(self, failed: list[dict[str, Any]]) -> Plan[None]:
        """Disable those of the endpoints in *failed* that have only failed for `disable_after`."""
        if not failed:
            return
        ids = encode([{"id": each["id"]} for each in failed]).decode()
        query = self.tables.query(sql.FAILING, ids, self.webhooks.disable_after)
        (rows,) = yield from self.tables.execute(query)
        for id, seconds in rows:
            yield from self._disable(id, f"every attempt has failed for {seconds / 86400:.1f} days")

    def _disable(self, id: str, reason: str) -> Plan[None]:
        """Disable an endpoint and tell the operators.  The event for them commits in the same transaction."""
        webhooks = self.webhooks
        try:
            endpoint = yield from webhooks.endpoints._get(id)
        except NotFound:  # deleted meanwhile
            return
        data = {"endpoint": id, "tenant": endpoint.tenant, "url": endpoint.url, "reason": reason}
        also = []
        if webhooks.operational is not None:
            values = [new_id(), webhooks.operational, DISABLED, None, pack_data(data)]
            also.append(self.tables.query(sql.ADD_MESSAGE, *values))
        if not (yield from webhooks.endpoints.disable_now(id, reason, *also)):
            return
        yield from webhooks.endpoints.park_slice(id)  # the rest is parked later, and holds up no other endpoint
        log.warning(
            "The webhook endpoint %s of tenant %r is disabled; enable it when it works: %s", id, endpoint.tenant, reason
        )
        if webhooks.on_event is not None:
            try:
                webhooks.on_event(DISABLED, data)
            except Exception:
                log.exception("on_event failed on %s of endpoint %s", DISABLED, id)

    # Observers

    def _report(self, attempts: list[Attempt], rows: list[dict[str, Any]]) -> None:
        """Log the results, and tell the observers."""
        guard = self.webhooks.guard
        for (claimed, result), row in zip(attempts, rows, strict=True):
            message, endpoint = claimed.message, claimed.registered.endpoint
            if row["state"] == "dead":
                log.warning(
                    "The webhook %s of type %s for %s is a dead letter after %d attempts, until it is resent: %s",
                    message.id,
                    message.type,
                    endpoint.id,
                    claimed.attempts,
                    result.error,
                )
            elif result.error:
                log.info("An attempt to send the webhook %s to %s failed: %s", message.id, endpoint.id, result.error)
            if guard.observers and result.tried:
                guard.emit(
                    "delivery",
                    Operation(f"webhooks|{message.tenant}", message.id, name=f"webhooks.{message.type}"),
                    attempt=claimed.attempts,
                    to_state=row["state"],
                    status=result.status or 0,
                    detail=result.error,
                    duration=max(claimed.now - message.created_at, 0.0),
                )
