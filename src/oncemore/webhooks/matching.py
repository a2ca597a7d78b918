"""Matching: a delivery is made of each new message, for each endpoint that wants it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .._ledger.transactions import TransactionAdapter
from .._runtime.plan import Plan
from . import statements as sql
from .endpoints import Endpoint
from .webhooks import Webhooks, new_delivery, order_key_of

PAGE = 1000  # messages that are matched in one transaction
MOST_DELIVERIES = 10_000  # that a transaction adds, unless one message alone has more

OrderKey = tuple[str, str]  # of an endpoint
encode = msgspec.json.encode


class MatchingPass:
    """One pass over the new messages, page by page.

    An ordered endpoint gets a message only if no transaction is open that began before the message's own, because that may
    add an earlier one.  Until then the message waits, and so does each later one of the same endpoint and order key; all
    others go on.
    """

    def __init__(self, webhooks: Webhooks) -> None:
        self.webhooks = webhooks
        self.tables = webhooks.tables
        self.is_over = False
        self._after = 0
        self._limit: str | None = None  # of the transactions that were settled when the pass began
        self._held: set[OrderKey] = set()  # keys with a message that waits

    def match_page(self) -> Plan[int]:
        """Match the next page of messages; return how many there were.  One sender at a time does this."""
        tables = self.tables
        transaction = yield from tables.open()
        try:
            query = tables.query(sql.NEW_MESSAGES, self._after, PAGE, self._limit)
            new = yield from transaction.begin(tables.query(sql.FAN_OUT_LOCK), query)
            if not new:
                yield from transaction.rollback()
                self.is_over = True
                return 0
            taken, matched = yield from self._match(transaction, new)
            done = encode([{"seq": seq} for seq in matched]).decode()
            yield from transaction.commit(tables.query(sql.FANNED_OUT, done))
        except BaseException:
            self.is_over = True
            yield from transaction.rollback()
            raise
        self._after, self._limit = new[taken - 1][0], new[0][5]
        self.is_over = taken == len(new) < PAGE
        return len(matched) if self.is_over else taken

    def _match(self, transaction: TransactionAdapter, new: Sequence[Sequence[Any]]) -> Plan[tuple[int, list[int]]]:
        """Add the deliveries of the messages that can be matched now; return how far it went, and these messages."""
        by_tenant = yield from self._endpoints(transaction, {row[1] for row in new})
        wanted: dict[int, list[tuple[Endpoint, str | None]]] = {}
        count = 0
        for seq, tenant, type, subject, *_ in new:
            wanting = [endpoint for endpoint in by_tenant.get(tenant, ()) if endpoint.wants(type)]
            count += len(wanting)
            if wanted and count > MOST_DELIVERIES:
                break
            wanted[seq] = [(endpoint, order_key_of(endpoint, subject)) for endpoint in wanting]
        keys = {(endpoint.id, key) for each in wanted.values() for endpoint, key in each if key is not None}
        sequences, busy = yield from self._order(transaction, keys)
        before = dict(sequences)
        matched: list[int] = []
        deliveries: list[dict[str, Any]] = []
        for seq, _, _, _, is_settled, _ in new[: len(wanted)]:
            own = {(endpoint.id, key) for endpoint, key in wanted[seq] if key is not None}
            if own and (not is_settled or own & self._held):
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
        """The latest sequence numbers of ordered endpoints, and the keys of which a delivery is pending.

        The endpoints stay locked until the commit, so that no delivery of theirs ends meanwhile.
        """
        if not keys:
            return {}, set()
        ids = encode([{"id": id} for id in {id for id, _ in keys}]).decode()
        rows = yield from transaction.execute(self.tables.query(sql.ORDERED_ENDPOINTS, ids))
        pairs = encode([{"endpoint": id, "order_key": key} for id, key in keys]).decode()
        busy = yield from transaction.execute(self.tables.query(sql.BUSY_KEYS, pairs))
        return dict(map(tuple, rows)), {(id, key) for id, key in busy}
