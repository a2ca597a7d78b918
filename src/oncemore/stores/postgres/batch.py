"""Runs a batch of store calls: one statement for the items of many callers, and an answer for each from its rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from ..._ledger.decisions import fenced, is_free
from ..._ledger.events import log
from ..._ledger.model import Claim, Lease, Record
from ..._ledger.states import RUNNING
from ..._ledger.store import STORE_FAILURES
from ..._runtime.batching import own_error
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan
from ..._runtime.wakeups import Id, Wakeups
from ...errors import ConfigurationError, OncemoreError, StoreTimeout, StoreUnavailable
from .listener import PostgresListener
from .rows import Item, encode_rows, is_expired, read_record
from .session import NO_LOCK, Database, translate_error
from .statements import Rows, Statement

MOST_PENDING_UNDOS = 1000
MOST_BYTES = 8 * 1024 * 1024  # the most bytes of outcomes or requests in one statement

# The answer for an item if another transaction has locked its record for longer than a batch waits.  Nothing was done.
LOCKED = object()

Answers = dict[Item, Any]  # an exception is raised only in that item's caller; an item without an answer is sent again
Ask = Callable[[list[Item], float], Plan[Answers]]  # sends one statement for a group of items, until a deadline


class Batches:
    """The plans that the store's batchers run."""

    def __init__(self, database: Database, wakeups: Wakeups, listener: PostgresListener) -> None:
        self.database = database
        self.sql = database.sql
        self.wakeups = wakeups
        self.listener = listener
        # The claims of all threads and event loops that may have been granted although the server did not answer.
        self._pending_undos: deque[Claim] = deque(maxlen=MOST_PENDING_UNDOS)

    def run_claims(self, items: list[Item]) -> Plan[list[Any]]:
        """Return each item's Lease, or the Record that prevents the claim."""
        deadline, answers, left = self._deadline(items), Answers(), items
        while left:
            group = limit_bytes(first_of_each_record(left))
            found = yield from self._ask_or_split(self._claim, group, deadline)
            answers.update(found)
            if len(group) < len(left):
                share(found, left, answers)
            left = self._unanswered(left, answers, deadline)
        # A failed claim may have been granted.  The next batch that the server answers undoes it.
        lost = [item.subject for item in items if isinstance(answers[item], STORE_FAILURES)]
        if self._pending_undos and len(lost) < len(items):
            yield from self._undo_pending()
        self._pending_undos.extend(lost)
        return [answers[item] for item in items]

    def undo_claims(self, items: list[Item]) -> Plan[None]:
        """Undo claims whose callers have gone.  If the server does not answer now, a later batch undoes them."""
        self._pending_undos.extend(item.subject for item in items)
        yield from self._undo_pending()

    def _undo_pending(self) -> Plan[None]:
        claims: list[Claim] = []
        with suppress(IndexError):  # another thread may take some of them
            while True:
                claims.append(self._pending_undos.popleft())
        try:
            yield from self.unclaim(claims)
        except (StoreTimeout, StoreUnavailable, ConfigurationError) as error:
            self._pending_undos.extend(claims)
            log.info("%d claims could not be undone yet, and are tried again: %s", len(claims), error)
        except OncemoreError as error:
            log.warning("%d claims could not be undone and keep their leases until they end: %s", len(claims), error)
        except BaseException:
            self._pending_undos.extend(claims)
            raise

    def unclaim(self, claims: Sequence[Claim]) -> Plan[None]:
        items = in_lock_order([Item("unclaim", claim.operation.id, claim, holder=claim.holder) for claim in claims])
        if not items:
            return
        deadline = self._deadline(items)
        try:
            rows = yield from self._rows(self.sql.unclaim, items, deadline)
        except psycopg.Error as error:
            raise translate_error(error) from error
        for n, _ in rows:
            self.wakeups.notify(items[n].subject.operation.id)
        yield from self.notify([items[n].subject.operation.id for n, watched in rows if watched], deadline)

    def run_writes(self, items: list[Item]) -> Plan[list[Any]]:
        """Return the answer to each item's verb.  Items of one verb are sent as one statement."""
        deadline, answers = self._deadline(items), Answers()
        left = [item for item in items if item.verb == "change"]
        while left:
            group = limit_bytes(first_of_each_record(left))
            answers.update((yield from self._ask_or_split(self._change, group, deadline)))
            left = self._unanswered(left, answers, deadline)
        if len(answers) < len(items):
            for verb, ask in (("touch", self._touch), ("watch", self._watch), ("find", self._find)):
                same_verb = [item for item in items if item.verb == verb]
                answers.update((yield from self._ask_once(ask, same_verb, deadline)))
        return [answers[item] for item in items]

    def run_locked(self, items: list[Item]) -> Plan[list[Any]]:
        """Return the same answers as a batch would, but send each item as its own statement.

        The items' records were locked when last seen, and no item shall wait for another one's lock.
        """
        answers: list[Any] = []
        locked: set[Id] = set()
        for item in items:
            if item.id in locked:
                answers.append(LOCKED)
                continue
            answers += yield from (self.run_claims if item.verb == "claim" else self.run_writes)([item])
            if answers[-1] is LOCKED:
                locked.add(item.id)
        return answers

    # Parts that batches have in common

    def _deadline(self, items: list[Item]) -> float:
        """Return the time when the caller that has waited longest gives up, but leave time for one short try."""
        timeout = self.database.timeout
        return max(items[0].asked + timeout, SYSTEM.monotonic() + timeout / 5)

    def _unanswered(self, left: list[Item], answers: Answers, deadline: float) -> list[Item]:
        """Return the items to be sent again.  After *deadline*, answer them with StoreTimeout instead."""
        locked = {item.id for item in left if answers.get(item) is LOCKED}
        left = [item for item in left if item not in answers]
        if locked:  # a later change of the same record must not overtake the locked one
            answers.update((item, LOCKED) for item in left if item.id in locked)
            left = [item for item in left if item.id not in locked]
        if left and SYSTEM.monotonic() >= deadline:
            answers.update((item, StoreTimeout("Other callers were faster at every try; retry later")) for item in left)
            return []
        return left

    def _ask_once(self, ask: Ask, items: list[Item], deadline: float) -> Plan[Answers]:
        """Return the items' answers.  Items with the same record and token share one row."""
        if not items:
            return Answers()
        distinct = {(item.id, item.row.token): item for item in items}
        found = yield from self._ask_or_split(ask, list(distinct.values()), deadline)
        return {item: found[distinct[item.id, item.row.token]] for item in items}

    def _ask_or_split(self, ask: Ask, group: list[Item], deadline: float) -> Plan[Answers]:
        """Return the group's answers.  If PostgreSQL refuses the statement, send the items singly: only bad ones fail.

        PostgreSQL also refuses it if another transaction keeps a record locked.  That item's answer is LOCKED.
        """
        try:
            return (yield from ask(group, deadline))
        except psycopg.Error as error:
            if len(group) == 1:
                return {group[0]: LOCKED if error.sqlstate == NO_LOCK else translate_error(error)}
        except OncemoreError as error:
            return {item: own_error(error) for item in group}
        answers = Answers()
        for item in group:
            answers.update((yield from self._ask_or_split(ask, [item], deadline)))
        return answers

    def _rows(self, statement: Statement, group: list[Item], deadline: float, *more: Any) -> Plan[Rows]:
        for n, item in enumerate(group):
            item.row.n = n
        rows = encode_rows([item.row for item in group]).decode()
        return self.database.rows(statement, [rows, self.database.shift, *more], deadline)

    # One statement each

    def _claim(self, group: list[Item], deadline: float) -> Plan[Answers]:
        group = in_lock_order(group)
        requests = [item.bytes for item in group] if any(item.bytes for item in group) else None
        rows = yield from self._rows(self.sql.claim, group, deadline, requests)
        by_holder = {item.row.holder: item for item in group}
        answers: Answers = {
            by_holder[holder]: Lease(by_holder[holder].subject.operation, token, until, attempts, lapsed)
            for holder, token, attempts, until, lapsed in rows
        }
        if len(answers) < len(group):
            prevented = [item for item in group if item not in answers]
            # If this fails, it fails only for these items, because the others have their leases.
            answers.update((yield from self._ask_or_split(self._find_blockers, prevented, deadline)))
        return answers

    def _find_blockers(self, group: list[Item], deadline: float) -> Plan[Answers]:
        """Return the record that prevents each item.  An item gets no answer if its record has become claimable."""
        rows = yield from self._rows(self.sql.find, group, deadline)
        answers, expired = Answers(), []
        for n, lapsed, *columns in rows:
            item, record = group[n], read_record(columns)
            operation = item.subject.operation
            if is_expired(record):
                expired.append(item)
            elif record.holder == item.row.holder:  # the claim was granted, but the answer was lost
                answers[item] = Lease(operation, record.token, record.lease_until, record.attempts, lapsed)
            elif not is_free(record) or record.fingerprint != operation.fingerprint:
                answers[item] = record
        if expired:  # audited records must go to the archive first
            yield from self._rows(self.sql.archive, expired, deadline)
        return answers

    def _change(self, group: list[Item], deadline: float) -> Plan[Answers]:
        group = in_lock_order(group)
        outcomes = [item.bytes for item in group]
        rows = yield from self._rows(self.sql.change, group, deadline, outcomes)
        answers: Answers = {group[n]: until for n, _, until in rows}
        watched = [group[n].subject.operation.id for n, watched, _ in rows if watched and group[n].wakes]
        if len(answers) < len(group):
            missed = [item for item in group if item not in answers]
            answers.update((yield from self._already_applied(missed, deadline)))
        for item, answer in answers.items():
            if item.wakes and not isinstance(answer, Exception):
                self.wakeups.notify(item.subject.operation.id)
        yield from self.notify(watched, deadline)
        return answers

    def _already_applied(self, missed: list[Item], deadline: float) -> Plan[Answers]:
        """Answer items whose rows were not changed: None if the same change was applied before, or Fenced."""
        records = yield from self._find(missed, deadline)
        answers = Answers()
        for item, record in records.items():
            fits = record is not None and record.token == item.row.token
            if fits and record.state == RUNNING:
                continue
            answers[item] = None if fits and record.state == item.row.state else fenced(item.subject)
        return answers

    def _find(self, group: list[Item], deadline: float) -> Plan[Answers]:
        rows = yield from self._rows(self.sql.find, group, deadline)
        records = ((group[n], read_record(columns)) for n, _, *columns in rows)
        return {**dict.fromkeys(group), **{item: record for item, record in records if not is_expired(record)}}

    def _touch(self, group: list[Item], deadline: float) -> Plan[Answers]:
        yield from self._rows(self.sql.touch, in_lock_order(group), deadline)
        return dict.fromkeys(group)

    def _watch(self, group: list[Item], deadline: float) -> Plan[Answers]:
        """Answer whether each record is still running.  Only then will its owner send a message."""
        group = in_lock_order(group)
        rows = yield from self._rows(self.sql.watch, group, deadline)
        answers: Answers = dict.fromkeys(group, False)
        answers.update((group[n], True) for (n,) in rows)
        return answers

    def notify(self, ids: Iterable[Id], deadline: float | None = None) -> Plan[None]:
        """Send a message to the other processes.  If that fails, their waiters look by themselves after a while."""
        deadline = SYSTEM.monotonic() + self.database.timeout if deadline is None else deadline
        for message in self.listener.messages(ids):
            try:
                yield from self.database.rows(self.sql.notify, [self.listener.channel, message], deadline)
            except (OncemoreError, psycopg.Error) as error:
                log.info("A message about a change could not be sent; other processes look by themselves: %s", error)


def in_lock_order(items: list[Item]) -> list[Item]:
    """Return the items in the order in which all processes lock rows, so that they never deadlock."""
    return sorted(items, key=lambda item: item.id) if len(items) > 1 else items


def first_of_each_record(items: list[Item]) -> list[Item]:
    """Return the first item for each record, because a statement can change a row only once."""
    return list({item.id: item for item in reversed(items)}.values()) if len(items) > 1 else items


def limit_bytes(items: list[Item]) -> list[Item]:
    """Return the first items whose outcomes and requests together fit into one statement; at least one item."""
    size = 0
    for n, item in enumerate(items):
        size += len(item.bytes or b"")
        if size > MOST_BYTES and n > 0:
            return items[:n]
    return items


def share(found: Answers, items: list[Item], answers: Answers) -> None:
    """Answer further claims of the same records with the records that prevented the first ones."""
    known = {item.id: answer for item, answer in found.items() if isinstance(answer, Record) and not is_free(answer)}
    for item in items:
        if item not in answers and item.id in known:
            answers[item] = known[item.id]
