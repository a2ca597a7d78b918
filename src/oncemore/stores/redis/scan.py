"""Walks through all records of a Redis store, for operators: list, stats and purge.  Each step is short, for others' sake."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from ..._ledger.model import Record
from ..._ledger.store import Filter, Page, Stats
from ..._runtime.batching import Batcher, Submit
from ..._runtime.plan import Plan
from ...errors import CorruptRecord, InvalidPayload, StoreError
from .anyones import LOOK, SWEEP, TALLY
from .commands import Flights, Item, Plain
from .records import NOBODY, read_record
from .scripts import Script

Bundle: TypeAlias = list[Item | Plain]  # what one step of a walk asks for

CURSOR = re.compile(r"([0-9]{0,9})\.([0-9]{1,20})\.([0-9a-f,]*)")
RECORD = "{" + 40 * "[0-9a-f]" + "}"  # as a pattern for SCAN
STEP = 50  # keys at a time: the server does them in one go, and a claim that comes meanwhile waits for all of them


class Trail(msgspec.Struct, frozen=True):
    """How far a walk has come: which server (None: all are done), where in its keys, and what was found but not told."""

    server: int | None = 0
    position: int = 0
    pending: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.server is None and not self.pending

    def __str__(self) -> str:
        return f"{'' if self.server is None else self.server}.{self.position}.{','.join(self.pending)}"

    @classmethod
    def read(cls, cursor: str) -> Trail:
        """The trail that a page's cursor stands for."""
        match = CURSOR.fullmatch(cursor)
        if match is None:
            raise InvalidPayload(f"{cursor[:40]!r} is not a cursor that this store has given")
        server, position, pending = match.groups()
        return cls(int(server) if server else None, int(position), tuple(filter(None, pending.split(","))))


class Walk:
    """The walks of one store, over a connection of their own: they never hold up a claim."""

    def __init__(self, flights: Flights, prefix: str) -> None:
        self.flights = flights
        self.prefix = prefix
        self.lane: Batcher[Bundle] = Batcher(self._fly, limit=4, undo=self._drop)
        self._swept = Trail()

    def _fly(self, bundles: list[Bundle]) -> Plan[list[list[Any]]]:
        answers = iter((yield from self.flights.fly([item for bundle in bundles for item in bundle])))
        return [[next(answers) for _ in bundle] for bundle in bundles]

    def _drop(self, bundles: list[Bundle]) -> Plan[None]:
        """A step of a walk is not worth finishing once its caller has gone."""
        return
        yield

    def _ask(self, script: Script, keys: Sequence[str]) -> Plan[list[Any]]:
        """One answer per key; a key that holds something else than a record has none."""
        bundle: Bundle = [Item(script, key) for key in keys]
        answers = (yield Submit(self.lane, bundle)) if keys else []
        return [told(answer) for answer in answers]

    def _step(self, trail: Trail, count: int, pattern: str = RECORD) -> Plan[tuple[list[str], Trail]]:
        """The next keys, and the trail from there."""
        if trail.pending or trail.server is None:
            pending = [f"{self.prefix}:{{{name}}}" for name in trail.pending]
            return pending, msgspec.structs.replace(trail, pending=())
        words = ("SCAN", trail.position, "MATCH", f"{self.prefix}:{pattern}", "COUNT", count)
        bundle: Bundle = [Plain(words, trail.server)]
        position, keys = told((yield Submit(self.lane, bundle))[0])
        after = Trail(trail.server, int(position))
        if after.position == 0:
            last = trail.server + 1 >= len(self.flights.places.primaries())
            after = Trail(None if last else trail.server + 1)
        return [key.decode(errors="replace") for key in dict.fromkeys(keys)], after

    def page(self, where: Filter, limit: int, cursor: str | None) -> Plan[Page]:
        trail = Trail.read(cursor) if cursor else Trail()
        found: dict[str, Record] = {}
        count = min(limit, STEP)
        while len(found) < limit and not trail.over:
            keys, trail = yield from self._step(trail, count)
            answers = yield from self._ask(LOOK, keys)
            records = {key: read_record(NOBODY, *answer) for key, answer in zip(keys, answers, strict=True) if answer}
            fitting = {key: record for key, record in records.items() if fits(record, where)}
            found.update(fitting)
            if 2 * len(fitting) < count:  # few are wanted: look at more at a time
                count = min(2 * count, STEP)
        pending = tuple(key.partition("{")[2].rstrip("}") for key in tuple(found)[limit:])
        trail = msgspec.structs.replace(trail, pending=pending)
        return Page(tuple(found.values())[:limit], None if trail.over else str(trail))

    def purge(self, batch: int) -> Plan[int]:
        """Goes on where the last one stopped, so that batch after batch passes over the keys once."""
        trail, fresh, gone = self._swept, self._swept == Trail(), 0
        while gone < batch and not (trail.over and (gone or fresh)):
            if trail.over:
                trail, fresh = Trail(), True
            keys, after = yield from self._step(trail, STEP)
            old = [key for key, state in (yield from self._states(keys)) if state[1] == b"absent"]
            swept = yield from self._ask(SWEEP, old[: batch - gone])
            trail = trail if len(old) > batch - gone else after
            gone += sum(filter(None, swept))
        self._swept = Trail() if trail.over else trail
        return gone

    def stats(self) -> Plan[Stats]:
        counts: Counter[str] = Counter()
        trail = Trail()
        while not trail.over:
            keys, trail = yield from self._step(trail, STEP)
            for _, (stored, state) in (yield from self._states(keys)):
                counts[stored.decode()] += 1
                counts["expired"] += state == b"absent"
                counts["lapsed"] += state == b"lapsed"
        trail = Trail()
        while not trail.over:
            keys, trail = yield from self._step(trail, STEP, RECORD + ":*")
            counts["archived"] += len(keys)
        return Stats(**{name: counts[name] for name in Stats.__struct_fields__})

    def _states(self, keys: list[str]) -> Plan[list[tuple[str, list[bytes]]]]:
        """The stored and the actual state of each key that holds a record."""
        states = yield from self._ask(TALLY, keys)
        return [(key, state) for key, state in zip(keys, states, strict=True) if state and state[0] != b"deleted"]


def told(answer: Any) -> Any:
    """The answer, unless it is an error; something that is no record is none of ours."""
    if isinstance(answer, CorruptRecord):
        return None
    if isinstance(answer, StoreError):
        raise answer
    return answer


def fits(record: Record, where: Filter) -> bool:
    """Whether the record is one that the filter asks for."""
    if record.id == NOBODY:  # it could not be read
        return False
    lapsed = record.state == "running" and record.lease_until <= record.now
    wanted = (
        (where.state, record.state),
        (where.scope, record.scope),
        (where.key, record.key),
        (where.name, record.name),
        (where.lapsed, lapsed),
    )
    return all(want is None or want == is_ for want, is_ in wanted)
