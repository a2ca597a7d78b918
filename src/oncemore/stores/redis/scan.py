"""Scans all records of a Redis store, for operators: list, stats and purge.  Each step is short, so claims are not delayed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from ..._ledger.model import Record
from ..._ledger.store import Filter, Page, Stats
from ..._runtime.plan import Plan
from ...errors import CorruptRecord, InvalidPayload, StoreError
from .commands import CommandRunner, ScriptItem
from .records import NOBODY, read_record
from .scripts import FIND, PURGE, STATES, Script

CURSOR = re.compile(r"([0-9]{0,9})\.([0-9]{1,20})\.([0-9a-f,]*)")
RECORD = "{" + 40 * "[0-9a-f]" + "}"  # as a pattern for SCAN
STEP = 50  # keys at a time; a claim that arrives meanwhile waits until the server has scanned them


class ScanCursor(msgspec.Struct, frozen=True):
    """The position of a scan: the server (None: all are done), SCAN's position there, and records found but not returned."""

    server: int | None = 0
    position: int = 0
    pending: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.server is None and not self.pending

    def __str__(self) -> str:
        return f"{'' if self.server is None else self.server}.{self.position}.{','.join(self.pending)}"

    @classmethod
    def read(cls, cursor: str) -> ScanCursor:
        """From the text of a page's cursor."""
        match = CURSOR.fullmatch(cursor)
        if match is None:
            raise InvalidPayload(f"{cursor[:40]!r} is not a cursor that this store has given")
        server, position, pending = match.groups()
        return cls(int(server) if server else None, int(position), tuple(filter(None, pending.split(","))))


class Scan:
    """The scans of one store.  They are not batched with claims, so that neither waits for the other."""

    def __init__(self, runner: CommandRunner, prefix: str) -> None:
        self.runner = runner
        self.prefix = prefix
        self._purged = ScanCursor()

    def _run(self, script: Script, keys: Sequence[str]) -> Plan[list[Any]]:
        """One result per key; None for a key that holds something else than a record."""
        results = (yield from self.runner.run([ScriptItem(script, key) for key in keys])) if keys else []
        return [result_or_raise(result) for result in results]

    def _step(self, cursor: ScanCursor, pattern: str = RECORD) -> Plan[tuple[list[str], ScanCursor]]:
        """The next keys, and the cursor behind them."""
        if cursor.pending or cursor.server is None:
            pending = [f"{self.prefix}:{{{name}}}" for name in cursor.pending]
            return pending, msgspec.structs.replace(cursor, pending=())
        words = ("SCAN", cursor.position, "MATCH", f"{self.prefix}:{pattern}", "COUNT", STEP)
        (result,) = yield from self.runner.run([ScriptItem(None, "", words, server=cursor.server)])
        position, keys = result_or_raise(result)
        after = ScanCursor(cursor.server, int(position))
        if after.position == 0:
            last = cursor.server + 1 >= len(self.runner.topology.primaries())
            after = ScanCursor(None if last else cursor.server + 1)
        return [key.decode(errors="replace") for key in dict.fromkeys(keys)], after

    def page(self, where: Filter, limit: int, start: str | None) -> Plan[Page]:
        cursor = ScanCursor.read(start) if start else ScanCursor()
        found: dict[str, Record] = {}
        while len(found) < limit and not cursor.over:
            keys, cursor = yield from self._step(cursor)
            answers = yield from self._run(FIND, keys)
            records = {key: read_record(NOBODY, *answer) for key, answer in zip(keys, answers, strict=True) if answer}
            # An unreadable record does not tell its operation, and is left out.
            found |= {key: each for key, each in records.items() if each.id != NOBODY and where.matches(each)}
        pending = tuple(key.partition("{")[2].rstrip("}") for key in tuple(found)[limit:])
        cursor = msgspec.structs.replace(cursor, pending=pending)
        return Page(tuple(found.values())[:limit], None if cursor.over else str(cursor))

    def purge(self, batch: int) -> Plan[int]:
        """Continue the scan of the last purge, so that batch after batch scans the keys once."""
        cursor, fresh, gone = self._purged, self._purged == ScanCursor(), 0
        while gone < batch and not (cursor.over and (gone or fresh)):
            if cursor.over:
                cursor, fresh = ScanCursor(), True
            keys, after = yield from self._step(cursor)
            old = [key for key, state in (yield from self._states(keys)) if state[1] == b"absent"]
            purged = yield from self._run(PURGE, old[: batch - gone])
            cursor = cursor if len(old) > batch - gone else after
            gone += sum(filter(None, purged))
        self._purged = ScanCursor() if cursor.over else cursor
        return gone

    def stats(self) -> Plan[Stats]:
        counts: Counter[str] = Counter()
        cursor = ScanCursor()
        while not cursor.over:
            keys, cursor = yield from self._step(cursor)
            for _, (stored, state) in (yield from self._states(keys)):
                counts[stored.decode()] += 1
                counts["expired"] += state == b"absent"
                counts["lapsed"] += state == b"lapsed"
        cursor = ScanCursor()
        while not cursor.over:
            keys, cursor = yield from self._step(cursor, RECORD + ":*")
            counts["archived"] += len(keys)
        return Stats(**{name: counts[name] for name in Stats.__struct_fields__})

    def _states(self, keys: list[str]) -> Plan[list[tuple[str, list[bytes]]]]:
        """The stored and the actual state of each key that holds a record."""
        states = yield from self._run(STATES, keys)
        return [(key, state) for key, state in zip(keys, states, strict=True) if state and state[0] != b"deleted"]


def result_or_raise(result: Any) -> Any:
    """The result, unless it is an error; None if something that is no record lies under the key."""
    if isinstance(result, CorruptRecord):
        return None
    if isinstance(result, StoreError):
        raise result
    return result
