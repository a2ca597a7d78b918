"""Recording: what becomes of a delivery and its endpoint after an attempt."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from .._ledger.model import Operation
from .._runtime.plan import Plan
from ..errors import NotFound
from . import statements as sql
from .claims import Claimed
from .requests import Result
from .signature import new_id
from .webhooks import Webhooks, pack_data

log = logging.getLogger("oncemore.webhooks")

PAUSES = {429, 502, 504}  # statuses after which the whole endpoint is left alone for a while
SHORTEST_PAUSE = 5.0  # seconds
DISABLED = "endpoint.disabled"

Attempt = tuple[Claimed, Result]
encode = msgspec.json.encode


class Results:
    """Records the attempts of one sender.

    Recording the same ones again, because the answer to a commit was lost, changes nothing.
    """

    def __init__(self, webhooks: Webhooks) -> None:
        self.webhooks = webhooks
        self.tables = webhooks.tables

    def record(self, attempts: list[Attempt]) -> Plan[None]:
        """Write what became of the deliveries, in one transaction; then disable the endpoints that have to be."""
        tables = self.tables
        rows = [self._row(claimed, result) for claimed, result in attempts]
        packed = encode(rows).decode()
        queries = [tables.query(sql.FINISH, packed), tables.query(sql.ADD_ATTEMPTS, packed)]
        ended = {
            (claimed.registered.endpoint.id, claimed.order_key)
            for (claimed, _), row in zip(attempts, rows, strict=True)
            if claimed.order_key is not None and row["state"] != "pending"
        }
        if ended:
            pairs = [{"endpoint": endpoint, "order_key": key} for endpoint, key in ended]
            queries.append(tables.query(sql.NEXT_IN_ORDER, encode(pairs).decode()))
        health = self._health(attempts, rows)
        if health:
            queries.append(tables.query(sql.HEALTH, encode(health).decode()))
        # Locked in the order of their ids, because another sender may record results of the same endpoints.
        locked = {endpoint for endpoint, _ in ended} | {each["id"] for each in health if not each["healthy"]}
        locks = [tables.query(sql.ORDERED_ENDPOINTS, encode([{"id": id} for id in locked]).decode())] if locked else []
        yield from tables.execute(*locks, *queries)
        self._tell(attempts, rows)
        yield from self._disable_gone(attempts)
        yield from self._disable_failing([each for each in health if not each["healthy"]])

    def _row(self, claimed: Claimed, result: Result) -> dict[str, Any]:
        """The delivery after an attempt, and the attempt itself."""
        now, former = claimed.now, claimed.former
        state, next_at, attempts = "delivered", claimed.next_at, claimed.attempts
        if not result.tried:  # another sender does it at once
            state, attempts = "pending", claimed.attempts - 1
        elif not result.is_success:
            at = self._next_attempt(claimed, result, now)
            if former is not None and former != "pending":  # resent by hand: it is as it was
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
        """When the delivery is tried again; None: not again."""
        if result.permanent or result.status == 410:
            return None
        step = self.webhooks.schedule.next_attempt(now - claimed.first_at, result.retry_after)
        return None if step is None else claimed.first_at + step

    def _health(self, attempts: list[Attempt], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The health of each endpoint after these attempts; one success is enough.  What was resent by hand does not count.

        An endpoint that is overloaded pauses, but no longer than the delivery that it refused may wait.
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
        """Disable those that have just failed again, and have only failed for days."""
        if not failed:
            return
        ids = encode([{"id": each["id"]} for each in failed]).decode()
        query = self.tables.query(sql.FAILING, ids, self.webhooks.disable_after)
        (rows,) = yield from self.tables.execute(query)
        for id, seconds in rows:
            yield from self._disable(id, f"every attempt has failed for {seconds / 86400:.1f} days")

    def _disable(self, id: str, reason: str) -> Plan[None]:
        """Disable an endpoint, and tell the operators; the event for them is committed with it."""
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
        log.warning("The webhook endpoint %s of tenant %r is disabled: %s", id, endpoint.tenant, reason)
        if webhooks.on_event is not None:
            try:
                webhooks.on_event(DISABLED, data)
            except Exception:
                log.exception("on_event failed on %s", DISABLED)

    # Observers

    def _tell(self, attempts: list[Attempt], rows: list[dict[str, Any]]) -> None:
        """Log what became of the deliveries, and tell the observers."""
        guard = self.webhooks.guard
        for (claimed, result), row in zip(attempts, rows, strict=True):
            message, endpoint = claimed.message, claimed.registered.endpoint
            if row["state"] == "dead":
                log.warning(
                    "The webhook %s of type %s for %s is a dead letter after %d attempts: %s",
                    message.id,
                    message.type,
                    endpoint.id,
                    claimed.attempts,
                    result.error,
                )
            elif result.error:
                log.info("The webhook %s for %s failed: %s", message.id, endpoint.id, result.error)
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
