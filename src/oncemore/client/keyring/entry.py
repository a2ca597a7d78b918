"""What the keyring remembers of an operation: its key, what was asked, and how far it came."""

from __future__ import annotations

from typing import Any, Literal, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ..._fingerprint.fingerprint import Fingerprinter
from ..._runtime.plan import Plan
from ..errors import KeyReused

State = Literal["sending", "open", "settled"]

# sending   persisted before the first byte; if its process is gone, nobody was told what came of it
# open      the caller was told that the outcome is not known, and may continue under the same key
# settled   the server's final answer was seen


# They let their bearer in, so they are not written down.  Servers tell callers apart by them: without, the same key would be
# a stranger's, and the operation happen again.
CREDENTIALS = ("Authorization", "Proxy-Authorization", "X-API-Key", "API-Key")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on the ring.  *body* is None once it is settled, and where it was too large to keep.

    *headers* are those that are sent again; of credentials only the names are there, with nothing behind them.
    *created_at* is wall-clock time, before the first attempt.  *owner* is the process at work, *token* its one run.
    """

    scope: str
    key: str
    fingerprint: str
    method: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    state: State = "sending"
    status: int = 0
    created_at: float = 0.0
    owner: int = 0
    token: int = 0

    @property
    def kept_headers(self) -> dict[str, str]:
        """What is sent again as it was."""
        return {name: value for name, value in self.headers if value or name not in CREDENTIALS}

    @property
    def credentials(self) -> list[str]:
        """The names of those headers that whoever resumes it must bring."""
        return [name for name, value in self.headers if name in CREDENTIALS and not value]


class Resumed(msgspec.Struct, frozen=True):
    """What came of continuing an interrupted operation: the library's response, or the error."""

    entry: Entry
    response: Any = None
    error: Exception | None = None


class Keyring(Protocol):
    """A place that keeps keys and request bytes; each verb is atomic, and `claim` is durable when it returns."""

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        """The entry now on the ring under (scope, key): a new one, or the known one with its first *created_at*.

        It bears this *token* unless it was created before *oldest*, or lies in the future: those are left as they are.
        A known one with another fingerprint raises KeyReused.
        """
        ...

    def settle(self, entry: Entry, status: int) -> Plan[None]:
        """Remember the final answer; the body is dropped."""
        ...

    def leave(self, entry: Entry) -> Plan[None]:
        """The caller has been told that the outcome is unknown; a newer run under the same key is not disturbed."""
        ...

    def forget(self, entry: Entry) -> Plan[None]:
        """Nothing was ever sent, or a person has decided: remove the entry."""
        ...

    def pending(self) -> Plan[list[Entry]]:
        """Entries without a final answer that no living process is working on, oldest first."""
        ...

    def adopt(self, *, opened: bool = False) -> Plan[list[Entry]]:
        """Those of the pending that were interrupted (`sending`), now owned by this process and by no other.

        With *opened*, also those whose callers were told that the outcome is unknown.  The next claim of the same key sends
        one of them; whatever is not sent must be released.
        """
        ...

    def release(self, entry: Entry) -> Plan[None]:
        """An adopted entry was not sent after all: it is pending as before.  One that was claimed since is left alone."""
        ...

    def close(self) -> None:
        """Let go of files, threads and connections; what was claimed stays."""
        ...

    async def aclose(self) -> None:
        """As `close`, for what belongs to the running event loop too."""
        ...


def scope_of(method: str, url: str) -> str:
    """Who owns the key: the method, origin and path.  The same key elsewhere is another operation."""
    parts = urlsplit(without_credentials(url))
    return f"{method} {parts.scheme}://{parts.netloc}{parts.path or '/'}"


def without_credentials(url: str) -> str:
    """The URL without a user's name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


FINGERPRINTS = Fingerprinter()


def fingerprinted_parts(method: str, url: str, content_type: str, body: bytes) -> tuple[str, str, str, str, bytes]:
    """Return the parts of a request that its fingerprint covers."""
    parts = urlsplit(url)
    return method, parts.path or "/", parts.query, content_type, body


# Between two processes of one machine, the wall clock may be corrected by so much without raising doubt.
CLOCK_TOLERANCE = 60.0


def check_reuse(known: Entry, entry: Entry) -> None:
    """Refuse a key that names another request; an empty fingerprint (of a body that cannot be read) fits any."""
    if known.fingerprint == entry.fingerprint or not known.fingerprint or entry.body is None:
        return
    content_type = dict(entry.headers).get("Content-Type", "")
    if not FINGERPRINTS.matches(
        known.fingerprint, *fingerprinted_parts(entry.method, entry.url, content_type, entry.body)
    ):
        raise KeyReused(
            f"{entry.scope}: key {entry.key} was used here for another request; a new operation needs a new key"
        )


def is_sendable(known: Entry, entry: Entry, oldest: float) -> bool:
    """Whether the server still knows the key; an entry from the future has an unknown age, and counts as too old."""
    return oldest <= known.created_at <= entry.created_at + CLOCK_TOLERANCE
