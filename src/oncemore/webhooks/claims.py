"""Makes deliveries of new messages (matching), and takes due ones (claiming), so that no endpoint holds up another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from secrets import token_hex
from typing import Any, Literal

import msgspec

from .._ledger.transactions import Query, Rows, TransactionAdapter
from .._runtime.clock import SYSTEM
from .._runtime.plan import Plan
from . import statements as sql
from .bodies import WebhookMessage
from .endpoints import Endpoint, Registered
from .schedule import LATE
from .webhooks import Webhooks, new_delivery, order_key_of

PAGE = 1000  # the most messages that are matched in one transaction
MOST_DELIVERIES = 10_000  # the most that one transaction adds, unless a single message has more
ROUND = 500  # the most deliveries, or endpoints, in one transaction
FIRST_LIMIT, LARGEST_LIMIT = 2, 20  # requests at a time to one endpoint
MOST_LIMITS = 10_000  # if there are more, the limits of idle endpoints are forgotten
FOR_EVER = 9e11  # a time after all others, in seconds since 1970

OrderKey = tuple[str, str]  # an endpoint's id, and an order key of its deliveries
encode = msgspec.json.encode


class MatchingPass:
    """Makes a delivery of each new message for each endpoint that wants it.  One pass goes from page to page.

    An ordered endpoint gets a message only if no older transaction than the message's is open, because that one may add
    an earlier message.  Until then the message waits, for all its endpoints.  Each later message with the same ordered
    endpoint and order key waits, too.  All other messages are matched.
    """

    def __init__(self, webhooks: Webhooks) -> None:
        self.webhooks = webhooks
        self.tables = webhooks.tables
        self.is_over = False
        self._after = 0
        self._limit: str | None = None  # all transactions before this number had ended when the pass began
        self._held: set[OrderKey] = set()  # the keys of messages that wait

    def match_page(self) -> Plan[int]:
        """Match the next page of messages, unless another sender is matching; return how many were looked at.

        On the last page, messages that wait do not count, so that the sender pauses before it looks at them again.
        """
        tables = self.tables
        transaction = yield from tables.open()
        try:
            query = tables.query(sql.NEW_MESSAGES, self._after, PAGE, self._limit)
            new = yield from transaction.begin(tables.query(sql.MATCHING_LOCK), query)
            if not new:
                yield from transaction.rollback()
                self.is_over = True
                return 0
            taken, matched = yield from self._match(transaction, new)
            done = encode([{"seq": seq} for seq in matched]).decode()
            yield from transaction.commit(tables.query(sql.SET_MATCHED, done))
        except BaseException:
            self.is_over = True
            yield from transaction.rollback()
            raise
        self._after, self._limit = new[taken - 1][0], new[0][5]
        self.is_over = taken == len(new) < PAGE
        return len(matched) if self.is_over else taken

    def _match(self, transaction: TransactionAdapter, new: Sequence[Sequence[Any]]) -> Plan[tuple[int, list[int]]]:
        """Add deliveries of messages that can be matched; return how many were looked at, and which were matched."""
        by_tenant = yield from self._endpoints(transaction, {row[1] for row in new})

        @cache  # a page has many messages and few types, and other writers may have to wait for the transaction
        def endpoints_for(tenant: str, type: str) -> list[Endpoint]:
            return [endpoint for endpoint in by_tenant.get(tenant, ()) if endpoint.wants(type)]

        wanted: dict[int, list[tuple[Endpoint, str | None]]] = {}
        count = 0
        for seq, tenant, type, subject, *_ in new:
            wanting = endpoints_for(tenant, type)
            count += len(wanting)
            if wanted and count > MOST_DELIVERIES:
                break
            wanted[seq] = [(endpoint, order_key_of(endpoint, subject)) for endpoint in wanting]
        keys = {(endpoint.id, key) for each in wanted.values() for endpoint, key in each if key is not None}
        sequences, busy = yield from self._order(transaction, keys)
        before = dict(sequences)
        matched: list[int] = []
        deliveries: list[dict[str, Any]] = []
        for seq, _, _, _, is_orderable, _ in new[: len(wanted)]:
            own = {(endpoint.id, key) for endpoint, key in wanted[seq] if key is not None}
            if own and (not is_orderable or own & self._held):
                self._held |= own
                continue
            matched.append(seq)
            for endpoint, key in wanted[seq]:
                number, waits = None, False
                if key is not None:
                    number = sequences[endpoint.id] = sequences.get(endpoint.id, 0) + 1
                    waits = (endpoint.id, key) in busy
                    if endpoint.state == "enabled":
                        busy.add((endpoint.id, key))
                deliveries.append(new_delivery(seq, endpoint, key, number, waits=waits))
        changed = [{"id": id, "sequence": number} for id, number in sequences.items() if number != before.get(id)]
        for statement, rows in ((sql.ADD_DELIVERIES, deliveries), (sql.SET_SEQUENCES, changed)):
            if rows:
                yield from transaction.execute(self.tables.query(statement, encode(rows).decode()))
        return len(wanted), matched

    def _endpoints(self, transaction: TransactionAdapter, tenants: Iterable[str]) -> Plan[dict[str, list[Endpoint]]]:
        rows = yield from transaction.execute(
            self.tables.query(sql.ENDPOINTS_OF, encode([{"tenant": tenant} for tenant in tenants]).decode())
        )
        by_tenant: dict[str, list[Endpoint]] = {}
        for row in rows:
            endpoint = self.webhooks.endpoints.describe(row)
            by_tenant.setdefault(endpoint.tenant, []).append(endpoint)
        return by_tenant

    def _order(
        self, transaction: TransactionAdapter, keys: set[OrderKey]
    ) -> Plan[tuple[dict[str, int], set[OrderKey]]]:
        """Return the latest sequence number of each ordered endpoint, and the keys that have a pending delivery.

        This locks the endpoints until the commit, so that none of their deliveries ends meanwhile.
        """
        if not keys:
            return {}, set()
        ids = encode([{"id": id} for id in {id for id, _ in keys}]).decode()
        rows = yield from transaction.execute(self.tables.query(sql.LOCK_ENDPOINTS, ids))
        pairs = encode([{"endpoint": id, "order_key": key} for id, key in keys]).decode()
        busy = yield from transaction.execute(self.tables.query(sql.BUSY_KEYS, pairs))
        return dict(map(tuple, rows)), {(id, key) for id, key in busy}


class Claimed(msgspec.Struct):
    """A delivery that this sender has claimed."""

    seq: int
    attempts: int
    first_at: float
    next_at: float
    sequence: int | None
    former: str | None
    order_key: str | None
    message: WebhookMessage
    registered: Registered
    token: str
    claimed_at: float  # the time of the claim by the database's clock
    began: float  # the time just before it by this process's clock

    @property
    def now(self) -> float:
        """The time by the database's clock, estimated without asking the database."""
        return self.claimed_at + SYSTEM.monotonic() - self.began


Experience = Literal["new", "proven", "failing"]


class EndpointLimit:
    """Limits the requests to one endpoint at a time.  A success raises the limit by one; a failure sets it to one.

    *experience* tells how this sender's latest request ended: "proven" or "failing".  Before the first has ended, it is
    "failing" if the endpoint has a `failing_since`, otherwise "new".
    """

    __slots__ = ("experience", "most", "running")

    def __init__(self, experience: Experience) -> None:
        self.most, self.running, self.experience = FIRST_LIMIT, 0, experience

    def record(self, *, success: bool) -> None:
        self.experience = "proven" if success else "failing"
        self.most = min(self.most + 1, LARGEST_LIMIT) if success else 1


class Claims:
    """Claims deliveries of *webhooks* that are due, for one sender.

    Failing endpoints may use a quarter of the *concurrency*, and new ones another quarter (at least one request each).
    The rest is left to proven endpoints.  New ones may wait for other new ones, until these have answered or timed out.
    """

    def __init__(self, webhooks: Webhooks, *, concurrency: int, lease: float) -> None:
        self.webhooks = webhooks
        self.tables = webhooks.tables
        self.concurrency = concurrency
        self.lease = lease
        self._limits: dict[str, EndpointLimit] = {}
        # The id of the endpoint that was served last: the next claim begins after it, so that each gets its turn.
        self._after = ""

    def claim(self, free: int, *, due_by: float = FOR_EVER) -> Plan[list[Claimed]]:
        """Claim and return at most *free* deliveries, and no more of an endpoint than its limit allows."""
        while True:
            began_after = self._after
            claimed = yield from self._claim_page(free, due_by)
            if claimed or not began_after:  # otherwise earlier endpoints may have some
                return claimed

    def end(self, endpoint: str, *, success: bool | None) -> None:
        """Record the end of a request; *success* is None if it was not sent, or was cancelled."""
        limit = self._limits[endpoint]
        limit.running -= 1
        if success is not None:
            limit.record(success=success)

    def forget_idle(self) -> None:
        """Forget the limits of endpoints without requests, if there are many limits."""
        if len(self._limits) > MOST_LIMITS:
            self._limits = {id: limit for id, limit in self._limits.items() if limit.running}

    def _claim_page(self, free: int, due_by: float) -> Plan[list[Claimed]]:
        tables, token, began = self.tables, token_hex(12), SYSTEM.monotonic()
        full = [{"id": id} for id, limit in self._limits.items() if limit.running >= limit.most]
        (rows,) = yield from tables.execute(tables.query(sql.DUE_ENDPOINTS, self._after, encode(full).decode(), ROUND))
        registered = {row[0]: self.webhooks.endpoints.read(row) for row in rows}
        is_open = {row[0]: bool(row[-2]) for row in rows}
        now = rows[0][-1] if rows else 0.0

        def choose() -> tuple[list[Query], dict[str, float]]:
            """Return the statements that claim, and the second result of `_quotas`."""
            quotas, paces = self._quotas(registered, min(free, ROUND), now)
            is_all = len(rows) < ROUND and len(quotas) == len(registered)
            self._after = "" if is_all or not rows else next(reversed(quotas), rows[-1][0])
            groups: dict[tuple[bool, int], list[dict[str, str]]] = {}
            for id, most in quotas.items():
                groups.setdefault((is_open[id], most), []).append({"id": id})
            values = (token, now + self.lease)
            claims = [
                tables.query(sql.CLAIM if all_ else sql.CLAIM_RESENT, *values, encode(group).decode(), most, due_by)
                for (all_, most), group in groups.items()
            ]
            return [*claims, tables.query(sql.CLAIMED, token)] if claims else [], paces

        found: Rows = ()
        if any(each.endpoint.rate is not None for each in registered.values()):
            found = yield from self._claim_at_rates(registered, choose)
        elif claims := choose()[0]:
            # If the answer is lost, the store sends the statements again, and CLAIMED finds the rows of both claims.
            *_, found = yield from tables.execute(*claims)
        return [self._claimed(row, registered, token, now, began) for row in found]

    def _claim_at_rates(
        self, registered: dict[str, Registered], choose: Callable[[], tuple[list[Query], dict[str, float]]]
    ) -> Plan[Rows]:
        """Run the statements of *choose* in a transaction that locks the endpoints with a rate: all senders share it.

        Endpoints that another sender has locked are left out.
        """
        tables = self.tables
        rated = [id for id, each in registered.items() if each.endpoint.rate is not None]
        ids = encode([{"id": id} for id in rated]).decode()
        transaction = yield from tables.open()
        try:
            rows = yield from transaction.begin(tables.query(sql.RATED_ENDPOINTS, ids))
            paced: dict[str, float | None] = dict(map(tuple, rows))
            for id in rated:
                if id in paced:
                    registered[id].paced_until = paced[id]
                else:
                    del registered[id]
            claims, paces = choose()
            found = (yield from transaction.execute(*claims)) if claims else ()
            until = [{"id": id, "until": until} for id, until in self._next_starts(found, registered, paces)]
            yield from transaction.commit(*([tables.query(sql.PACE, encode(until).decode())] if until else []))
        except BaseException:
            yield from transaction.rollback()
            raise
        return found

    def _quotas(
        self, registered: dict[str, Registered], free: int, now: float
    ) -> tuple[dict[str, int], dict[str, float]]:
        """Return how many deliveries each endpoint may start now, and the time from which each rate counts them."""
        quotas: dict[str, int] = {}
        paces: dict[str, float] = {}
        running = {"new": 0, "failing": 0, "proven": 0}
        for limit in self._limits.values():
            running[limit.experience] += limit.running
        quarter = max(1, self.concurrency // 4)
        shares = {"new": quarter, "failing": quarter, "proven": self.concurrency}
        for id, each in registered.items():
            if free <= 0:
                break
            if id not in self._limits:
                self._limits[id] = EndpointLimit("new" if each.endpoint.failing_since is None else "failing")
            limit = self._limits[id]
            share = shares[limit.experience] - running[limit.experience]
            most = min(limit.most - limit.running, share, free)
            if (rate := each.endpoint.rate) is not None:
                # After an idle time, the deliveries of one second may start together, and at least one.
                paces[id] = max(each.paced_until or 0.0, now - max(0.0, 1 - 1 / rate))
                most = min(most, int((now - paces[id]) * rate + 1e-6) + 1 if now >= paces[id] else 0)
            if most > 0:
                quotas[id] = most
                free -= most
                running[limit.experience] += most
        return quotas, paces

    def _next_starts(
        self, found: Sequence[Sequence[Any]], registered: dict[str, Registered], paces: dict[str, float]
    ) -> list[tuple[str, float]]:
        """Return the endpoints with a rate that got deliveries, each with the time at which its next one may start."""
        counts: dict[str, int] = {}
        for row in found:
            counts[row[1]] = counts.get(row[1], 0) + 1
        return [
            (id, since + counts[id] / (registered[id].endpoint.rate or 1.0))
            for id, since in paces.items()
            if id in counts
        ]

    def _claimed(
        self, row: Sequence[Any], registered: dict[str, Registered], token: str, now: float, began: float
    ) -> Claimed:
        seq, endpoint, attempts, first_at, next_at, sequence, former, *event, order_key = row
        id, tenant, type, subject, data, created_at = event
        self._limits[endpoint].running += 1
        if first_at < next_at < now - LATE:
            first_at += now - next_at  # no sender was running, or the endpoint paused: this time does not count
        message = WebhookMessage(id, type, msgspec.Raw(bytes(data)), created_at, tenant, subject)
        times = (now, began)
        return Claimed(
            seq, attempts, first_at, next_at, sequence, former, order_key, message, registered[endpoint], token, *times
        )
