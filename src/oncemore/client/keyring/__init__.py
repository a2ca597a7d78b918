"""Keyrings: where keys and request bytes wait for their answers, so that a killed process can ask once more."""

from __future__ import annotations

import threading
from typing import Any, cast
from urllib.parse import unquote

from msgspec.structs import replace

from ..._ledger.connect import connect, hide_password, take_options
from ..._ledger.guard import Guard
from ..._ledger.store import Store
from ..._runtime.forks import reset_in_child
from ..._runtime.plan import Call, Plan
from ...errors import ConfigurationError
from .entry import Entry, Keyring, check_reuse, is_sendable

# Settled keys are remembered for longer than a server would, so that their reuse is noticed; then they are dropped.
RETENTION = 7 * 86400.0

# What a transport takes as its keyring.
KeyringPlace = str | Store | Guard | Keyring


def open_keyring(place: KeyringPlace) -> Keyring:
    """The keyring in *place*: a URL, a ledger's store or its guard, or a keyring, which is returned as it is.

    `sqlite:///keys.db` (four slashes for an absolute path) is a file of its own and `memory://` this process, both with one
    option: `?retention=7d`.  Every other URL names a ledger's store, with one more: `lease=15s`.
    """
    if isinstance(place, str):
        return _at_url(place)
    if isinstance(place, Guard):
        place = place.store
    # A store and a keyring have some verbs in common, but only a keyring adopts.
    if hasattr(place, "adopt"):
        return cast("Keyring", place)
    if hasattr(place, "claim"):
        return _in_ledger(place)
    raise no_keyring(place)


def _at_url(url: str) -> Keyring:
    scheme, mark, _ = url.partition("://")
    if scheme in ("memory", "sqlite"):
        return _of_ours(scheme, url)
    if not mark:
        raise no_keyring(url)
    place, options = take_options(url, {"lease": 15.0, "retention": RETENTION})
    return _in_ledger(connect(place), own_store=True, **options)


def _of_ours(scheme: str, url: str) -> Keyring:
    """In memory, or in a file of its own."""
    rest, options = take_options(url, {"retention": RETENTION})
    place, _, unknown = rest.partition("?")
    if unknown:
        raise ConfigurationError(f"keyring {url!r}: {unknown!r} is unknown; the only option is ?retention=7d")
    if scheme == "memory":
        return MemoryKeyring(**options)
    path = unquote(place.removeprefix("sqlite:///"))
    if path in ("", place, ":memory:"):
        raise no_keyring(url)
    from .sqlite import SqliteKeyring

    return SqliteKeyring(path, **options)


def no_keyring(place: object) -> ConfigurationError:
    named = hide_password(place) if isinstance(place, str) else place
    return ConfigurationError(
        f"keyring {named!r}: write sqlite:///keys.db, sqlite:////absolute/keys.db, memory://, "
        "or the URL of a ledger such as postgresql://host/database; or give a guard or a store"
    )


def _in_ledger(store: Store, **options: Any) -> Keyring:
    from .ledger import LedgerKeyring

    return LedgerKeyring(store, **options)


class MemoryKeyring:
    """Keys for as long as the process lives: their reuse is noticed, but nothing survives a crash."""

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

    def adopt(self, *, opened: bool = False) -> Plan[list[Entry]]:
        # Whoever could have been interrupted took the memory along; only those are left whose callers were told.
        entries: list[Entry] = yield Call(self._pending if opened else list)
        return entries

    def release(self, entry: Entry) -> Plan[None]:
        # Adopting has changed nothing.
        return
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

    def _change(self, entry: Entry, state: str, status: int) -> None:
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
        with self._lock:
            return [entry for entry in self._entries.values() if entry.state == "open"]

    def _purge(self, oldest: float) -> None:
        if len(self._entries) < self._purge_at:
            return
        old = [name for name, entry in self._entries.items() if entry.state == "settled" and entry.created_at < oldest]
        for name in old:
            del self._entries[name]
        self._purge_at = 2 * len(self._entries) + 1024
