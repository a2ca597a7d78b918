"""Runs a batch of store calls: one statement for the rows of many callers, and each caller's own answer from its rows."""

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
MOST_BYTES = 8 * 1024 * 1024  # of outcomes or requests in one statement

# The answer for an item if another transaction has locked its record for longer than a batch waits.  Nothing was done.
LOCKED = object()

Answers = dict[Item, Any]  # an exception is that item's own; an item without an answer is asked about again
Ask = Callable[[list[Item], float], Plan[Answers]]  # one statement for a group of items, until a deadline


class Batches:
    """The plans that the store's batchers run."""

    def __init__(self, database: Database, wakeups: Wakeups, listener: PostgresListener) -> None:
        self.database = database
        self.sql = database.sql
        self.wakeups = wakeups
        self.listener = listener
        # Claims that may have been granted, though the server did not answer; of all threads and event loops.
        self._pending_undos: deque[Claim] = deque(maxlen=MOST_PENDING_UNDOS)

    def run_claims(self, items: list[Item]) -> Plan[list[Any]]:
        """For each item its Lease, or the Record that prevents it."""
        deadline, answers, left = self._deadline(items), Answers(), items
        while left:
            group = limit_bytes(first_of_each_record(left))
            found = yield from self._ask_or_split(self._claim, group, deadline)
            answers.update(found)
            if len(group) < len(left):
                share(found, left, answers)
            left = self._unanswered(left, answers, deadline)
        # A claim that failed may have been granted.  It is undone with the next batch, once the server answers again.
        lost = [item.subject for item in items if isinstance(answers[item], STORE_FAILURES)]
        if self._pending_undos and len(lost) < len(items):
            yield from self._undo_pending()
        self._pending_undos.extend(lost)
        return [answers[item] for item in items]

    def undo_claims(self, items: list[Item]) -> Plan[None]:
        """Undo claims, because their callers have gone; with the next batch, if the server does not answer now."""
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
            log.info("%d claims could not be undone yet: %s", len(claims), error)
        except OncemoreError as error:  # then their leases end by themselves
            log.warning("%d claims could not be undone: %s", len(claims), error)
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
        """For each item the answer to its verb; items of one verb are one statement."""
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
        """For each item the same answer as in a batch, but each is a statement of its own.

        Their records were locked when last seen, and none of them shall wait for the lock of another.
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
        """When the caller that has waited longest gives up; but there is always time for one short try."""
        timeout = self.database.timeout
        return max(items[0].asked + timeout, SYSTEM.monotonic() + timeout / 5)

    def _unanswered(self, left: list[Item], answers: Answers, deadline: float) -> list[Item]:
        locked = {item.id for item in left if answers.get(item) is LOCKED}
        left = [item for item in left if item not in answers]
        if locked:  # a later change of the same record must not overtake it
            answers.update((item, LOCKED) for item in left if item.id in locked)
            left = [item for item in left if item.id not in locked]
        if left and SYSTEM.monotonic() >= deadline:
            answers.update((item, StoreTimeout("Other callers were quicker, time and again; retry")) for item in left)
            return []
        return left

    def _ask_once(self, ask: Ask, items: list[Item], deadline: float) -> Plan[Answers]:
        """The items' answers; items that ask the same of the same record share one row."""
        if not items:
            return Answers()
        distinct = {(item.id, item.row.token): item for item in items}
        found = yield from self._ask_or_split(ask, list(distinct.values()), deadline)
        return {item: found[distinct[item.id, item.row.token]] for item in items}

    def _ask_or_split(self, ask: Ask, group: list[Item], deadline: float) -> Plan[Answers]:
        """The group's answers.  If PostgreSQL refuses the statement, each item is asked about alone: only the bad one fails.

        The statement is refused after a moment if another transaction has locked a record: that item's answer is LOCKED.
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
            # If this fails, only for these: the others have their leases.
            answers.update((yield from self._ask_or_split(self._find_blockers, prevented, deadline)))
        return answers

    def _find_blockers(self, group: list[Item], deadline: float) -> Plan[Answers]:
        """For each item the record in its way; no answer if the record has become claimable, so that it is claimed again."""
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
        """Why rows were not changed: the same change was applied before (its answer was lost), or the owner is too late."""
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
        """Whether each record is still running; only then will its owner send a message."""
        group = in_lock_order(group)
        rows = yield from self._rows(self.sql.watch, group, deadline)
        answers: Answers = dict.fromkeys(group, False)
        answers.update((group[n], True) for (n,) in rows)
        return answers

    def notify(self, ids: Iterable[Id], deadline: float | None = None) -> Plan[None]:
        """Send a message to the other processes.  If that fails, their waiters look for themselves after a while."""
        deadline = SYSTEM.monotonic() + self.database.timeout if deadline is None else deadline
        for message in self.listener.messages(ids):
            try:
                yield from self.database.rows(self.sql.notify, [self.listener.channel, message], deadline)
            except (OncemoreError, psycopg.Error) as error:
                log.info("No message about a change could be sent: %s", error)


def in_lock_order(items: list[Item]) -> list[Item]:
    """The items in the order in which all processes lock their rows, so that no two of them deadlock."""
    return sorted(items, key=lambda item: item.id) if len(items) > 1 else items


def first_of_each_record(items: list[Item]) -> list[Item]:
    """The first item for each record, because a statement can change a row only once."""
    return list({item.id: item for item in reversed(items)}.values()) if len(items) > 1 else items


def limit_bytes(items: list[Item]) -> list[Item]:
    """As many of the items as one statement should carry: large outcomes and requests go in small groups."""
    size = 0
    for n, item in enumerate(items):
        size += len(item.bytes or b"")
        if size > MOST_BYTES and n > 0:
            return items[:n]
    return items


def share(found: Answers, items: list[Item], answers: Answers) -> None:
    """Give the same answer to every claim of a record that nobody can claim now."""
    known = {item.id: answer for item, answer in found.items() if isinstance(answer, Record) and not is_free(answer)}
    for item in items:
        if item not in answers and item.id in known:
            answers[item] = known[item.id]
