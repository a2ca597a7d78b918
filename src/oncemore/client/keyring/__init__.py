"""Keyrings: they store keys and requests until the final answer, so that the next process can send them again."""

from __future__ import annotations

from typing import cast
from urllib.parse import unquote

from ..._ledger.connect import connect, hide_password, take_options
from ..._ledger.guard import Guard
from ..._ledger.store import Store
from ...errors import ConfigurationError
from .entry import RETENTION, Keyring
from .ledger import LEASE, LedgerKeyring, MemoryKeyring

__all__ = ["KeyringPlace", "MemoryKeyring", "open_keyring"]

# The values that a transport accepts as its keyring.
KeyringPlace = str | Store | Guard | Keyring


def open_keyring(place: KeyringPlace) -> Keyring:
    """Open the keyring in *place*: a URL, a ledger's store or its guard, or a keyring, which is returned unchanged.

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
        return LedgerKeyring(place)
    raise _not_a_keyring(place)


def _open_url(url: str) -> Keyring:
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise _not_a_keyring(url)
    if scheme not in ("memory", "sqlite"):
        place, options = take_options(url, {"lease": LEASE, "retention": RETENTION})
        return LedgerKeyring(connect(place), own_store=True, **options)
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


def _not_a_keyring(place: object) -> ConfigurationError:
    named = hide_password(place) if isinstance(place, str) else place
    return ConfigurationError(
        f"keyring {named!r}: write sqlite:///keys.db, sqlite:////absolute/keys.db, memory://, "
        "or the URL of a ledger such as postgresql://host/database; or give a guard or a store"
    )
