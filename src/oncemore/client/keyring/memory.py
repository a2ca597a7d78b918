"""The keyring in memory, for tests and for short-lived programs."""

from __future__ import annotations

import threading

from msgspec.structs import replace

from ..._runtime.forks import reset_in_child
from ..._runtime.plan import Call, Plan
from .entry import RETENTION, Entry, State, check_reuse, is_sendable


class MemoryKeyring:
    """Keys for as long as the process lives: a key used for two requests is noticed, but nothing survives a crash."""

    def __init__(self, *, retention: float = RETENTION) -> None:
        self.retention = retention
        self._entries: dict[tuple[str, str], Entry] = {}
        self._purge_at = 1024
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        held: Entry = yield Call(self._claim, entry, oldest)
        return held

    def settle(self, entry: Entry, status: int) -> Plan[None]:
        yield Call(self._change, entry, "settled", status)

    def leave(self, entry: Entry) -> Plan[None]:
        yield Call(self._change, entry, "open", 0)

    def forget(self, entry: Entry) -> Plan[None]:
        yield Call(self._forget, entry)

    def pending(self) -> Plan[list[Entry]]:
        entries: list[Entry] = yield Call(self._pending)
        return entries

    def adopt(self, entry: Entry) -> Plan[Entry | None]:
        return entry if entry in (yield from self.pending()) else None

    def release(self, entry: Entry) -> Plan[None]:
        return  # adopting has changed nothing
        yield

    def close(self) -> None:
        """Nothing to close."""

    async def aclose(self) -> None:
        """Nothing to close."""

    def _claim(self, entry: Entry, oldest: float) -> Entry:
        with self._lock:
            known = self._entries.get((entry.scope, entry.key))
            if known:
                check_reuse(known, entry)
                if not is_sendable(known, entry, oldest):
                    return known
                entry = replace(entry, created_at=known.created_at)
            self._entries[entry.scope, entry.key] = entry
            self._purge(entry.created_at - self.retention)
            return entry

    def _change(self, entry: Entry, state: State, status: int) -> None:
        with self._lock:
            known = self._entries.get((entry.scope, entry.key))
            if known and (state == "settled" or (known.token == entry.token and known.state == "sending")):
                body = None if state == "settled" else known.body
                self._entries[entry.scope, entry.key] = replace(known, state=state, status=status, body=body)

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            known = self._entries.get((entry.scope, entry.key))
            if known and known.token == entry.token:
                del self._entries[entry.scope, entry.key]

    def _pending(self) -> list[Entry]:
        # An interruption ends the process and its memory; the entries left are open: their callers were told.
        with self._lock:
            return [entry for entry in self._entries.values() if entry.state == "open"]

    def _purge(self, oldest: float) -> None:
        if len(self._entries) < self._purge_at:
            return
        old = [name for name, entry in self._entries.items() if entry.state == "settled" and entry.created_at < oldest]
        for name in old:
            del self._entries[name]
        self._purge_at = 2 * len(self._entries) + 1024
