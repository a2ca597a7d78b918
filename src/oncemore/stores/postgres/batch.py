"""How a group of items becomes one statement, and its rows each item's own answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import astuple

from ..._ledger.decisions import fenced, is_over
from ..._ledger.events import log
from ..._ledger.model import Lease, Record
from ..._ledger.states import RUNNING
from ..._runtime.batching import own_error
from ..._runtime.clock import SYSTEM
from ..._runtime.plan import Plan
from ..._runtime.wakeups import Id, Wakeups
from ...errors import OncemoreError, StoreError, StoreTimeout
from .connection import Rejected, Rows
from .line import Line
from .listener import Ear
from .rows import Found, Item, Moved, Touched, Watched, encode_rows, read_record
from .session import OPERATORS_PATIENCE, Database, translated
from .statements import Statement

MOST_LOST = 1000
MOST_BYTES = 8 * 1024 * 1024

Answers = dict[Item, Any]  # an exception is that item's own; one without an answer is asked about again
Errand = tuple[Statement, Sequence[Any]]
Fly = Callable[[list[Item], float], Plan[Answers]]


class Flights:
    """The plans by which the store's lanes fly."""

    def __init__(self, database: Database, wakeups: Wakeups, ear: Ear) -> None:
        self.database = database
        self.sql = database.sql
        self.wakeups = wakeups
        self.ear = ear
        # Claims that may have been granted, though their callers were told of a failure; those of all threads and loops.
        self._lost: deque[Item] = deque(maxlen=MOST_LOST)

    # What the lanes call

    def claims(self, items: list[Item]) -> Plan[list[Any]]:
        """For each item its Lease, or the Record that stopped it."""
        ends, answers, left = self._ends(items), Answers(), items
        try:
            while left:
                group = firsts(left)
                found = yield from self._fly(self._claim, group, ends)
                answers.update(found)
                if len(group) < len(left):
                    share(found, left, answers)
                left = self._left(left, answers, ends)
            if self._lost:
                yield from self._withdraw(ends)
        except BaseException:  # an interrupt, or a loop that is shut down: nobody gets an answer, whoever has won
            self._lost.extend(items)
            raise
        return [answers[item] for item in items]

    def undo_claims(self, items: list[Item]) -> Plan[None]:
        """Take back claims whose callers have gone; now, or with the next claims if the server does not answer."""
        self._lost.extend(items)
        yield from self._withdraw(SYSTEM.monotonic() + self.database.timeout)

    def writes(self, items: list[Item]) -> Plan[list[Any]]:
        """For each item what its kind of row is answered with; those of one kind are one statement."""
        ends, answers = self._ends(items), Answers()
        left = [item for item in items if type(item.row) is Moved]
        while left:
            answers.update((yield from self._fly(self._move, handful(firsts(left)), ends)))
            left = self._left(left, answers, ends)
        if len(answers) < len(items):
            for kind, fly in ((Touched, self._touch), (Watched, self._watch), (Found, self._find)):
                alike = [item for item in items if type(item.row) is kind]
                answers.update((yield from self._once(fly, alike, ends)))
        return [answers[item] for item in items]

    def errand(self, errands: list[Errand]) -> Plan[list[Any]]:
        """The rows of one statement of an operator's, which may take its time."""
        ((statement, values),) = errands
        ends = SYSTEM.monotonic() + self.database.timeout
        desk = self.database.desk
        try:
            return [(yield from self.database.rows(desk, statement, values, ends, patience=OPERATORS_PATIENCE))]
        except Rejected as error:
            return [translated(error)]

    def drop_errand(self, errands: list[Errand]) -> Plan[None]:
        """An operator's statement is not worth finishing once its caller has gone."""
        return
        yield

    # What they have in common

    def _ends(self, items: list[Item]) -> float:
        """When the first of them, who waits longest, gives up; after a flight that failed, there is time for a short try."""
        timeout = self.database.timeout
        return max(items[0].asked + timeout, SYSTEM.monotonic() + timeout / 5)

    def _left(self, left: list[Item], answers: Answers, ends: float) -> list[Item]:
        left = [item for item in left if item not in answers]
        if left and SYSTEM.monotonic() >= ends:
            answers.update((item, StoreTimeout("Others were quicker, time and again; retry later")) for item in left)
            return []
        return left

    def _once(self, fly: Fly, items: list[Item], ends: float) -> Plan[Answers]:
        """The items' answers, where the same question is asked once for all who ask it."""
        if not items:
            return Answers()
        asked = {(item.id, item.row.token): item for item in items}
        found = yield from self._fly(fly, list(asked.values()), ends)
        return {item: found[asked[item.id, item.row.token]] for item in items}

    def _fly(self, fly: Fly, group: list[Item], ends: float) -> Plan[Answers]:
        """The group's answers; where PostgreSQL refuses the group, each on its own, so that only the bad one fails."""
        try:
            return (yield from fly(group, ends))
        except Rejected as error:
            if len(group) == 1:
                return {group[0]: translated(error)}
        except OncemoreError as error:
            return {item: own_error(error) for item in group}
        answers = Answers()
        for item in group:
            answers.update((yield from self._fly(fly, [item], ends)))
        return answers

    def _ask(self, line: Line, statement: Statement, group: list[Item], ends: float, *more: Any) -> Plan[Rows]:
        for n, item in enumerate(group):
            item.row.n = n
        rows = encode_rows([item.row for item in group]).decode()
        return self.database.rows(line, statement, [rows, self.database.shift, *more], ends)

    def _ask_one(self, line: Line, statement: Statement, item: Item, ends: float, *more: Any) -> Plan[Rows]:
        _, *columns = astuple(item.row)
        return self.database.rows(line, statement, [*columns, self.database.shift, *more], ends)

    # One statement each

    def _claim(self, group: list[Item], ends: float) -> Plan[Answers]:
        try:
            if len(group) == 1:
                claim = self.sql.claim_one if group[0].met else self.sql.claim_new
                rows = yield from self._ask_one(self.database.lanes, claim, group[0], ends)
            else:
                rows = yield from self._ask(self.database.lanes, self.sql.claim, in_order(group), ends)
        except OncemoreError:  # what was rejected did not happen, but this may have
            self._lost.extend(group)
            raise
        mine = {item.row.holder: item for item in group}
        answers: Answers = {
            mine[holder]: Lease(mine[holder].what, token, until, attempts, lapsed)
            for holder, token, attempts, until, lapsed in rows
        }
        if len(answers) < len(group):
            beaten = [item for item in group if item not in answers]
            found = yield from self._fly(self._beaten, beaten, ends)  # whatever becomes of these, the others have won
            self._lost.extend(item for item, answer in found.items() if isinstance(answer, StoreError))
            answers.update(found)
        return answers

    def _beaten(self, group: list[Item], ends: float) -> Plan[Answers]:
        """For each item the Record in its way; none where the way has become free, so that it is claimed again."""
        rows = yield from self._ask(self.database.lanes, self.sql.find, group, ends)
        answers, expired = Answers(), []
        for n, lapsed, *columns in rows:
            item, record = group[n], read_record(columns)
            item.met = True
            if is_expired(record):
                expired.append(item)
            elif record.holder == item.row.holder:  # it was won, but the answer was lost
                answers[item] = Lease(item.what, record.token, record.lease_until, record.attempts, lapsed)
            elif not is_over(record) or record.fingerprint != item.what.fingerprint:
                answers[item] = record
        if expired:  # those that are audited make way
            yield from self._ask(self.database.lanes, self.sql.archive, expired, ends)
        return answers

    def _withdraw(self, ends: float) -> Plan[None]:
        """Take back the claims whose fate was unknown, now or when the server answers again."""
        lost = list(taken(self._lost))
        try:
            found = yield from self._fly(self._taken_back, lost, ends)
        except BaseException:
            self._lost.extend(lost)
            raise
        self._lost.extend(item for item in lost if isinstance(found.get(item), StoreError))

    def _taken_back(self, group: list[Item], ends: float) -> Plan[Answers]:
        group = in_order(group)
        rows = yield from self._ask(self.database.lanes, self.sql.withdraw, group, ends)
        for (n,) in rows:
            self.wakeups.notify(group[n].what.id)
        return dict.fromkeys(group)

    def _move(self, group: list[Item], ends: float) -> Plan[Answers]:
        group, line = in_order(group), self.database.lanes
        if len(group) == 1:
            rows = yield from self._ask_one(line, self.sql.move_one, group[0], ends, group[0].outcome)
        else:
            rows = yield from self._ask(line, self.sql.move, group, ends, [item.outcome for item in group])
        answers: Answers = {group[n]: until for n, _, until in rows}
        watched = [group[n].what.operation.id for n, watched, _ in rows if watched and group[n].row.ends]
        if len(answers) < len(group):
            missed = [item for item in group if item not in answers]
            answers.update((yield from self._said_before(missed, ends)))
        for item, answer in answers.items():
            if item.row.ends and not isinstance(answer, Exception):
                self.wakeups.notify(item.what.operation.id)
        if watched:
            yield from self._tell(watched, ends)
        return answers

    def _said_before(self, missed: list[Item], ends: float) -> Plan[Answers]:
        """What has become of rows that were not written to: the same was said before, or the owner comes too late."""
        records = yield from self._find(missed, ends)
        answers = Answers()
        for item, record in records.items():
            fits = record is not None and record.token == item.row.token
            if fits and record.state == RUNNING:
                continue
            answers[item] = None if fits and record.state == item.row.state else fenced(item.what)
        return answers

    def _find(self, group: list[Item], ends: float) -> Plan[Answers]:
        rows = yield from self._ask(self.database.lanes, self.sql.find, group, ends)
        records = ((group[n], read_record(columns)) for n, _, *columns in rows)
        return {**dict.fromkeys(group), **{item: record for item, record in records if not is_expired(record)}}

    def _touch(self, group: list[Item], ends: float) -> Plan[Answers]:
        yield from self._ask(self.database.lanes, self.sql.touch, group, ends)
        return dict.fromkeys(group)

    def _watch(self, group: list[Item], ends: float) -> Plan[Answers]:
        """Whether each is still running; only then will there be a message."""
        rows = yield from self._ask(self.database.lanes, self.sql.watch, group, ends)
        answers: Answers = dict.fromkeys(group, False)
        answers.update((group[n], True) for (n,) in rows)
        return answers

    def _tell(self, ids: Iterable[Id], ends: float) -> Plan[None]:
        """Send word to the other processes, after the fact; where that fails, they look for themselves in a while."""
        for message in self.ear.messages(ids):
            try:
                yield from self.database.rows(self.database.lanes, self.sql.notify, [self.ear.channel, message], ends)
            except (OncemoreError, Rejected) as error:
                log.info("No word of a change could be sent: %s", error)


def taken(items: deque[Item]) -> Iterator[Item]:
    """All that are there, each taken by one alone, however many come for them at once."""
    with suppress(IndexError):
        while True:
            yield items.popleft()


def in_order(items: list[Item]) -> list[Item]:
    """The items in the order in which all processes lock their rows, so that none wait for each other in a circle."""
    return sorted(items, key=lambda item: item.id) if len(items) > 1 else items


def firsts(items: list[Item]) -> list[Item]:
    """The first item of each record; a statement can change a row only once."""
    return list({item.id: item for item in reversed(items)}.values()) if len(items) > 1 else items


def handful(items: list[Item]) -> list[Item]:
    """As many of the items as can be sent at once: large outcomes fly in small groups."""
    size = 0
    for n, item in enumerate(items):
        size += len(item.outcome or b"")
        if size > MOST_BYTES and n > 0:
            return items[:n]
    return items


def share(found: Answers, items: list[Item], answers: Answers) -> None:
    """Answer every claim of a record alike once it is known to be nobody's to take."""
    known = {item.id: answer for item, answer in found.items() if isinstance(answer, Record) and not is_over(answer)}
    for item in items:
        if item not in answers and item.id in known:
            answers[item] = known[item.id]


def is_expired(record: Record) -> bool:
    return record.expires_at is not None and record.expires_at <= record.now
