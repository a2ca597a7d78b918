"""`Webhooks`: send events to the endpoints of your customers, in the transaction of the change that they tell of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Literal, get_args

import msgspec

from .._contract.policy import duration
from .._ledger.context import CURRENT, Op
from .._ledger.encrypted import Sealing
from .._ledger.guard import Guard, check_guard, check_positive
from .._ledger.tables import Sql, Tables
from .._ledger.transactions import Query, TransactionAdapter
from .._runtime.plan import Plan, arun, run
from .._runtime.wakeups import Id
from ..errors import ConfigurationError, InProgress, InvalidPayload, NotFound, PayloadTooLarge
from ..messages.outbox import Announcer
from . import statements as sql
from .bodies import BodyFormat, Render, body_of
from .endpoints import Endpoint, Endpoints, check_text
from .schedule import STEPS, DeliverySchedule
from .signature import check_id, new_id
from .statements import FEATURE
from .targets import Network, Targets

DeliveryState = Literal["pending", "delivered", "dead", "parked"]
STATES = get_args(DeliveryState)
Only = Literal["failed", "missing", "all"]
LARGEST = 1024 * 1024  # the most bytes of data
SLICE = 1000  # the most rows that one transaction sends again or deletes
WAITS_FROM = 8e15  # an infinite `next_at` reads as a larger number, on both databases
PING = "webhook.ping"
# A slice of `recover`: its last seq (None if it was empty), the order key of each delivery that is sent again, and the
# statements that are still to be run.
Slice = tuple[int | None, list[str | None], list[Query]]
encode = msgspec.json.encode
WAKEUP: Id = ("oncemore.webhooks", "")  # wakes senders


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """One message on its way to one endpoint.  Times are seconds since 1970.

    *message_id* is the `webhook-id` of every attempt.  *next_at* is the time of the next attempt, or None if it is
    not pending or waits for an earlier delivery.  *status* and *error* are the latest attempt's.
    """

    id: str
    message_id: str
    endpoint: str
    tenant: str
    type: str
    subject: str | None
    state: DeliveryState
    attempts: int
    created_at: float
    next_at: float | None
    ended_at: float | None
    status: int | None
    error: str
    sequence: int | None


class DeliveryAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its *status* (None without a response), *duration* in seconds, and the start of the *response*."""

    number: int
    at: float
    status: int | None
    duration: float
    response: str
    error: str


class Webhooks:
    """Sends events to the endpoints of your customers.

    Args:
        guard: The tables are in its database.
        seal: Encrypts the endpoints' secrets in the database (`oncemore.encryption.Seal`).
        allow: Networks that may be called although they are private, such as `"10.1.0.0/16"`.
        allow_http: Whether plain HTTP is allowed.
        ports: The only ports that may be called; by default all.
        body: The format: `"standard"`, `"cloudevents"`, `"eventId"`, or a function of the message that returns
            bytes or anything that can be written as JSON.
        schedule: The times at which a delivery is tried, in seconds after its first attempt.
        keep: How long messages, deliveries and attempts are kept.
        disable_after: An endpoint that has only failed for this time is disabled with its next failure.
        operational: The tenant that gets `endpoint.disabled` events as webhooks; none by default.
        on_event: Called with the name of an operational event (`endpoint.disabled`) and its data.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        seal: Sealing | None = None,
        allow: Iterable[str | Network] = (),
        allow_http: bool = False,
        ports: Sequence[int] | None = None,
        body: BodyFormat | Render = "standard",
        schedule: Sequence[float | str] = STEPS,
        keep: float | str = "30d",
        disable_after: float | str = "5d",
        operational: str | None = None,
        on_event: Callable[[str, dict[str, Any]], object] | None = None,
    ) -> None:
        self.guard = check_guard(guard)
        if seal is not None and not hasattr(seal, "seal"):
            raise ConfigurationError(f"seal is a {type(seal).__name__}: write Seal([key]), from oncemore.encryption")
        self.tables = Tables(guard.store, FEATURE)
        self.announcer = Announcer(self.tables, WAKEUP)
        self.targets = Targets(allow=allow, allow_http=allow_http, ports=ports)
        self.endpoints = Endpoints(self.tables, self.targets, seal)
        self.deliveries = Deliveries(self.tables)
        self.body = body_of(body)
        self.schedule = DeliverySchedule(schedule)
        self.keep = duration(keep)
        self.disable_after = duration(disable_after)
        self.operational = operational
        self.on_event = on_event
        if self.keep < self.schedule.span:
            raise ConfigurationError(
                f"keep = {keep!r} is shorter than the schedule, which ends after {self.schedule.span:g} s: messages would be "
                "deleted before they are delivered"
            )

    # Sending

    def send(
        self, place: Any, type: str, data: Any, *, tenant: str = "", id: str | None = None, subject: str | None = None
    ) -> str:
        """Send an event to all endpoints of *tenant* that want its type, if the transaction commits; return its id.

        Args:
            place: The `Op` of a transaction or database step, or your own open connection, session or Django alias.
            type: The type of the event, such as `refund.succeeded`.
            data: Anything that can be written as JSON.
            tenant: The customer: all of its endpoints that want the type get the event.
            id: The `webhook-id` of every delivery.  An id that was sent before is not sent again.  By default, it is
                derived from an operation with a transaction, so that a second run sends the same one, or else random.
            subject: The thing that it is about; an endpoint with `order="subject"` gets the events of one subject in order.
        """
        return run(self._send(place, type, data, tenant, id, subject))

    async def asend(
        self, place: Any, type: str, data: Any, *, tenant: str = "", id: str | None = None, subject: str | None = None
    ) -> str:
        """Send an event, as `send` does."""
        return await arun(self._send(place, type, data, tenant, id, subject))

    def _send(self, place: Any, type: str, data: Any, tenant: str, id: str | None, subject: str | None) -> Plan[str]:
        check_text("type", type)
        check_text("tenant", tenant, empty=True)
        if subject is not None:
            check_text("subject", subject, empty=True)
        packed = pack_data(data)
        if id is None:
            op = place if isinstance(place, Op) else CURRENT.get()
            # Not without a transaction: events may be committed before a second run of the operation sends others.
            derives = op is not None and op.transaction is not None
            id = op.derive_next(f"webhook\n{tenant}\n{type}\n{subject}") if op is not None and derives else new_id()
        check_id(id)
        query = self.tables.query(sql.ADD_MESSAGE, id, tenant, type, subject, packed)
        yield from self.tables.execute_in(place, query, after_commit=self.announcer.announce)
        return id

    def ping(self, endpoint: str) -> str:
        """Try once to send the endpoint a `webhook.ping` event, even if it is disabled; return the delivery's id."""
        return run(self._ping(endpoint))

    async def aping(self, endpoint: str) -> str:
        """Send a `webhook.ping` event, as `ping` does."""
        return await arun(self._ping(endpoint))

    def _ping(self, endpoint: str) -> Plan[str]:
        found = yield from self.endpoints._get(endpoint)
        id = new_id()
        _, ((delivery,),) = yield from self.tables.execute(
            self.tables.query(sql.PING, id, found.tenant, PING, pack_data({"endpoint": endpoint})),
            self.tables.query(sql.PING_DELIVERY, id, found.tenant, endpoint),
        )
        self.announcer.announce()
        return str(delivery)

    # Sending again

    def resend(self, delivery: str) -> None:
        """Send a delivery once more, with the same id and the current secret, even if the endpoint is disabled.

        This is one attempt, which does not change the endpoint's health.  If it fails, the former state is restored.

        Raises:
            NotFound: There is no such delivery.
            InProgress: It is being sent just now, or waits for an earlier delivery of its endpoint.
        """
        run(self._resend(delivery))

    async def aresend(self, delivery: str) -> None:
        """Send a delivery once more, as `resend` does."""
        await arun(self._resend(delivery))

    def _resend(self, delivery: str) -> Plan[None]:
        seq = read_delivery_id(delivery)
        (rows,) = yield from self.tables.execute(self.tables.query(sql.RESEND, seq))
        if not rows:
            found = yield from self.deliveries._find(delivery)  # raises NotFound if there is none
            waits = found.state == "pending" and found.next_at is None
            why = "waits for an earlier delivery of its endpoint" if waits else "is being sent just now"
            raise InProgress(f"The delivery {delivery} {why}: try again later", retry_after=30.0)
        self.announcer.announce()

    def recover(
        self,
        endpoint: str,
        since: datetime | float,
        *,
        only: Only = "failed",
        progress: Callable[[int], object] | None = None,
    ) -> int:
        """Send an endpoint the events that it has not got since a time; return their number.

        Args:
            endpoint: The endpoint's id.
            since: The time, with its zone, or seconds since 1970.
            only: `"failed"`: dead letters.  `"missing"`: events that were parked while it was disabled, and events that it
                wants now but did not get because it was registered or changed later.  `"all"`: both, and events that
                were delivered.
            progress: Called with the number so far.

        It works in slices, without a limit.  If it was interrupted, call it again to go on.  The endpoint must be
        enabled.  An ordered endpoint gets these events in their order, before events that wait.  A delivery that was
        tried before is finished first.
        """
        return run(self._recover(endpoint, since, only, progress))

    async def arecover(
        self,
        endpoint: str,
        since: datetime | float,
        *,
        only: Only = "failed",
        progress: Callable[[int], object] | None = None,
    ) -> int:
        """Send events to an endpoint that has not got them, as `recover` does."""
        return await arun(self._recover(endpoint, since, only, progress))

    def _recover(
        self, endpoint: str, since: datetime | float, only: Only, progress: Callable[[int], object] | None
    ) -> Plan[int]:
        if only not in sql.REQUEUES:
            raise ConfigurationError(f"only = {only!r}: write one of {', '.join(map(repr, sql.REQUEUES))}")
        if not isinstance(since, datetime | float | int):
            raise ConfigurationError(f"since = {since!r}: write a datetime with its zone, or seconds since 1970")
        if isinstance(since, datetime) and since.tzinfo is None:
            raise ConfigurationError(f"since = {since} has no time zone: write datetime(..., tzinfo=UTC)")
        start = since.timestamp() if isinstance(since, datetime) else float(since)
        found = yield from self.endpoints._get(endpoint)
        if found.state == "disabled":
            raise ConfigurationError(
                f"The endpoint {endpoint!r} is disabled ({found.reason}): enable it first, then recover"
            )
        queries = map(self.tables.query, (sql.MATCHING_ENDED, sql.LAST_DELIVERY))
        _, ((last,),) = yield from self.tables.execute(*queries, patient=True)
        parts: list[Callable[..., Plan[Slice]]] = [partial(self._requeue, found.id, sql.REQUEUES[only], start, last)]
        if only != "failed":
            parts.append(partial(self._match, found, start))
        total = 0
        for part in parts:
            after: int | None = 0
            while after is not None:
                after, count = yield from self._recover_slice(found.id, part, after)
                total += count
                if progress is not None and count:
                    progress(total)
        return total

    def _recover_slice(self, id: str, part: Callable[..., Plan[Slice]], after: int) -> Plan[tuple[int | None, int]]:
        """Take a slice of *part* with the endpoint locked; return its last seq, and how many are sent again."""
        transaction = yield from self.tables.open()
        try:
            ids = encode([{"id": id}]).decode()
            rows = yield from transaction.begin(self.tables.query(sql.LOCK_ENDPOINTS, ids))
            if not rows:
                raise NotFound(f"There is no endpoint {id!r}: it was deleted meanwhile")
            last, keys, queries = yield from part(transaction, after, rows[0][1])
            heads = {(id, key) for key in keys if key is not None}
            yield from transaction.commit(*queries, *self.next_in_order(heads))
        except BaseException:
            yield from transaction.rollback()
            raise
        self.announcer.announce()
        return last, len(keys)

    def _requeue(
        self, id: str, statement: Sql, start: float, last: int, transaction: TransactionAdapter, after: int, _: int
    ) -> Plan[Slice]:
        """Make a slice of the deliveries pending again."""
        rows = yield from transaction.execute(self.tables.query(statement, id, start, after, last, SLICE))
        return max((seq for seq, _ in rows), default=None), [key for _, key in rows], []

    def _match(
        self, endpoint: Endpoint, start: float, transaction: TransactionAdapter, after: int, sequence: int
    ) -> Plan[Slice]:
        """Make deliveries of a slice of messages that have none for the endpoint; *sequence* is its latest number."""
        query = self.tables.query(sql.UNMATCHED, endpoint.tenant, start, after, endpoint.id, SLICE)
        rows = yield from transaction.execute(query)
        made: list[dict[str, Any]] = []
        for seq, type, subject in rows:
            if type == PING or not endpoint.wants(type):
                continue
            key, number = order_key_of(endpoint, subject), None
            if key is not None:
                number = sequence = sequence + 1
            made.append(new_delivery(seq, endpoint, key, number, waits=key is not None))
        sequences = [{"id": endpoint.id, "sequence": sequence}]
        queries = [
            self.tables.query(sql.ADD_DELIVERIES, encode(made).decode()),
            self.tables.query(sql.SET_SEQUENCES, encode(sequences).decode()),
        ]
        return rows[-1][0] if rows else None, [each["order_key"] for each in made], queries if made else []

    def next_in_order(self, heads: Iterable[tuple[str, str]]) -> list[Query]:
        """Return the statement that makes the first delivery of each endpoint and order key due, unless one is."""
        pairs = [{"endpoint": endpoint, "order_key": key} for endpoint, key in heads]
        return [self.tables.query(sql.NEXT_IN_ORDER, encode(pairs).decode())] if pairs else []

    # Housekeeping

    def stats(self) -> dict[str, int]:
        """Return the number of deliveries in each state."""
        return run(self._stats())

    async def astats(self) -> dict[str, int]:
        """Return the number of deliveries in each state."""
        return await arun(self._stats())

    def _stats(self) -> Plan[dict[str, int]]:
        (rows,) = yield from self.tables.execute(self.tables.query(sql.COUNTS), patient=True)
        return {"pending": 0, "delivered": 0, "dead": 0, "parked": 0, **dict(map(tuple, rows))}

    def purge(self, *, tenant: str | None = None) -> int:
        """Delete messages with their deliveries and attempts: all of *tenant*, or those older than `keep` by default.

        An old message with a pending delivery is kept.  Return how many messages were deleted.
        """
        return run(self._purge(tenant))

    async def apurge(self, *, tenant: str | None = None) -> int:
        """Delete old messages, or all messages of a tenant, as `purge` does."""
        return await arun(self._purge(tenant))

    def _purge(self, tenant: str | None) -> Plan[int]:
        total = 0
        while gone := (yield from self.purge_slice(tenant)):
            total += gone
        return total

    def purge_slice(self, tenant: str | None = None) -> Plan[int]:
        """Delete a slice of the messages that are too old, or of the tenant's; return how many."""
        if tenant is not None:
            query, deletes = self.tables.query(sql.MESSAGES_OF, tenant, SLICE), sql.DELETE_MESSAGES
        else:
            query, deletes = self.tables.query(sql.OLD_MESSAGES, self.keep, SLICE), sql.DELETE_OLD_MESSAGES
        (rows,) = yield from self.tables.execute(query, patient=True)
        if rows:
            gone = encode([{"seq": seq} for (seq,) in rows]).decode()
            yield from self.tables.execute(*(self.tables.query(delete, gone) for delete in deletes), patient=True)
        return len(rows)


class Deliveries:
    """The deliveries of all endpoints.  Each method has an awaited form: `alist` for `list`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def list(
        self,
        *,
        endpoint: str | None = None,
        tenant: str | None = None,
        state: DeliveryState | None = None,
        type: str | None = None,
        limit: int = 100,
        after: str = "0",
    ) -> Sequence[WebhookDelivery]:
        """Return up to *limit* deliveries, the oldest first.  The next page begins *after* an id."""
        return run(self._list(endpoint, tenant, state, type, limit, after))

    async def alist(
        self,
        *,
        endpoint: str | None = None,
        tenant: str | None = None,
        state: DeliveryState | None = None,
        type: str | None = None,
        limit: int = 100,
        after: str = "0",
    ) -> Sequence[WebhookDelivery]:
        """Return a page of deliveries, as `list` does."""
        return await arun(self._list(endpoint, tenant, state, type, limit, after))

    def _list(
        self, endpoint: str | None, tenant: str | None, state: str | None, type: str | None, limit: int, after: str
    ) -> Plan[Sequence[WebhookDelivery]]:
        if state is not None and state not in STATES:
            raise ConfigurationError(f"state = {state!r}: write one of {', '.join(map(repr, STATES))}")
        asked = {"endpoint": endpoint, "tenant": tenant, "type": type}
        given = {column: value for column, value in asked.items() if value is not None}
        statement = sql.list_deliveries(tuple(given), state)
        query = self._tables.query(statement, read_delivery_id(after), check_positive("limit", limit), *given.values())
        (rows,) = yield from self._tables.execute(query)
        return [read_delivery(row) for row in rows]

    def get(self, delivery: str) -> WebhookDelivery:
        """Return the delivery, or raise NotFound."""
        return run(self._find(delivery))

    async def aget(self, delivery: str) -> WebhookDelivery:
        """Return the delivery, or raise NotFound."""
        return await arun(self._find(delivery))

    def _find(self, delivery: str) -> Plan[WebhookDelivery]:
        query = self._tables.query(sql.FIND_DELIVERY, read_delivery_id(delivery))
        (rows,) = yield from self._tables.execute(query)
        if not rows:
            raise NotFound(f"There is no delivery {delivery!r}")
        return read_delivery(rows[0])

    def attempts(self, delivery: str) -> Sequence[DeliveryAttempt]:
        """Return the attempts of a delivery, the first one first."""
        return run(self._attempts(delivery))

    async def aattempts(self, delivery: str) -> Sequence[DeliveryAttempt]:
        """Return the attempts of a delivery, the first one first."""
        return await arun(self._attempts(delivery))

    def _attempts(self, delivery: str) -> Plan[Sequence[DeliveryAttempt]]:
        (rows,) = yield from self._tables.execute(self._tables.query(sql.ATTEMPTS, read_delivery_id(delivery)))
        return [
            DeliveryAttempt(number=number, at=at, status=status, duration=took, response=response, error=error)
            for number, at, status, took, response, error in rows
        ]


def read_delivery(row: Sequence[Any]) -> WebhookDelivery:
    """Return the delivery in a row of DELIVERY_COLUMNS, which are in the order of its fields."""
    found = dict(zip(WebhookDelivery.__struct_fields__, row, strict=True))
    if found["state"] != "pending" or found["next_at"] > WAITS_FROM:
        found["next_at"] = None
    return WebhookDelivery(**{**found, "id": str(found["id"])})


def read_delivery_id(id: str) -> int:
    if not isinstance(id, str) or not id.isascii() or not id.isdigit() or len(id) > 18:
        raise NotFound(f"{id!r} is not the id of a delivery")
    return int(id)


def order_key_of(endpoint: Endpoint, subject: str | None) -> str | None:
    """Return the order key of a delivery, or None if the endpoint may get it in any order."""
    if endpoint.order == "fifo":
        return ""
    return subject if endpoint.order == "subject" else None


def new_delivery(
    message: int, endpoint: Endpoint, key: str | None, sequence: int | None, *, waits: bool
) -> dict[str, Any]:
    """Return a row for ADD_DELIVERIES."""
    state = "pending" if endpoint.state == "enabled" else "parked"
    return {
        "message": message,
        "endpoint": endpoint.id,
        "order_key": key,
        "sequence": sequence,
        "state": state,
        "waits": waits,
    }


def pack_data(data: Any) -> bytes:
    try:
        packed = msgspec.json.encode(data)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidPayload(f"The data of a webhook cannot be written as JSON: {error}") from error
    if len(packed) > LARGEST:
        raise PayloadTooLarge(
            f"The data of a webhook has {len(packed):,} bytes, and at most {LARGEST:,} are sent: send a link instead"
        )
    return packed
