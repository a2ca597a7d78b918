"""Keyrings: they store keys and requests until the final answer, so that the next process can send them again."""

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
from .entry import RETENTION, Entry, Keyring, State, check_reuse, is_sendable

__all__ = ["KeyringPlace", "MemoryKeyring", "open_keyring"]

# The values that a transport accepts as its keyring.
KeyringPlace = str | Store | Guard | Keyring


def open_keyring(place: KeyringPlace) -> Keyring:
    """Open the keyring in *place*: a URL, a ledger's store or its guard, or a keyring, which is returned as it is.

    `sqlite:///keys.db` (four slashes for an absolute path) is a file of its own, and `memory://` is this process; both take one
    option, `?retention=7d`.  Every other URL names a ledger's store, with one more option: `lease=15s`.
    """
    if isinstance(place, str):
        return _open_url(place)
    if isinstance(place, Guard):
        place = place.store
    if hasattr(place, "adopt"):  # stores and keyrings have some methods in common, but only keyrings have this one
        return cast("Keyring", place)
    if hasattr(place, "claim"):
        return _open_ledger(place)
    raise _not_a_keyring(place)


def _open_url(url: str) -> Keyring:
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise _not_a_keyring(url)
    if scheme not in ("memory", "sqlite"):
        place, options = take_options(url, {"lease": 15.0, "retention": RETENTION})
        return _open_ledger(connect(place), own_store=True, **options)
    rest, options = take_options(url, {"retention": RETENTION})
    place, _, unknown = rest.partition("?")
    if unknown:
        raise ConfigurationError(f"keyring {url!r}: {unknown!r} is unknown; the only option is ?retention=7d")
    if scheme == "memory":
        return MemoryKeyring(**options)
    path = unquote(place.removeprefix("sqlite:///"))
    if path in ("", place, ":memory:"):
        raise _not_a_keyring(url)
    from .sqlite import SqliteKeyring

    return SqliteKeyring(path, **options)


def _open_ledger(store: Store, **options: Any) -> Keyring:
    from .ledger import LedgerKeyring

    return LedgerKeyring(store, **options)


def _not_a_keyring(place: object) -> ConfigurationError:
    named = hide_password(place) if isinstance(place, str) else place
    return ConfigurationError(
        f"keyring {named!r}: write sqlite:///keys.db, sqlite:////absolute/keys.db, memory://, "
        "or the URL of a ledger such as postgresql://host/database; or give a guard or a store"
    )


class MemoryKeyring:
    """Keys for as long as the process lives, for tests and short-lived programs.

    A key used for two requests is noticed, but nothing survives a crash.
    """

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
            return replace(entry, state=known.state) if known else entry

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
