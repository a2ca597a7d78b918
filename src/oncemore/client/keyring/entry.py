"""The entries of a keyring (keys, requests and states of operations), and the protocol of all keyrings."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ..._fingerprint.fingerprint import Fingerprinter
from ..._runtime.loops import keep_task
from ..._runtime.plan import Plan, arun, run
from ..errors import KeyReused

State = Literal["sending", "open", "settled"]

# sending   stored before the first byte is sent; if its process is gone, nobody knows the outcome
# open      the caller knows that the outcome is unknown, and may continue under the same key
# settled   the server's final answer has arrived

# Settled keys are kept for longer than most servers keep them, so that their reuse is noticed.  Then they are removed.
RETENTION = 7 * 86400.0

# Headers that are not stored, because they are secret.  Servers tell callers apart by them: without them, the key would
# be another caller's, and the operation would happen again.
CREDENTIALS = ("Authorization", "Proxy-Authorization", "X-API-Key", "API-Key")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One operation in a keyring.

    *headers* are sent again; credentials have empty values.  *body* is None once the operation is settled, or if it was
    too large to store.  *created_at* is the wall-clock time before the first attempt.  *owner* is the process that sends
    the entry, and *token* identifies one call of the transport.
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
        """The headers that are sent again unchanged."""
        return {name: value for name, value in self.headers if value or name not in CREDENTIALS}

    @property
    def credentials(self) -> list[str]:
        """The names of the headers that the client must add when it resumes the operation."""
        return [name for name, value in self.headers if name in CREDENTIALS and not value]


class Resumed(msgspec.Struct, frozen=True):
    """The result of resuming an operation: the library's response, or the error."""

    entry: Entry
    response: Any = None
    error: Exception | None = None


class Keyring(Protocol):
    """A store of keys and requests.  Each method is atomic, and `claim` is durable when it returns."""

    def claim(self, entry: Entry, *, oldest: float) -> Plan[Entry]:
        """Store *entry* and return it.  If (scope, key) is known, it gets the first *created_at* and the former *state*.

        A known entry that is too old (see `is_sendable`) is returned unchanged: it must not be sent.  Raise KeyReused if
        the known entry is another request.
        """
        ...

    def settle(self, entry: Entry, status: int) -> Plan[None]:
        """Store the status of the final answer, and drop the body."""
        ...

    def leave(self, entry: Entry) -> Plan[None]:
        """Set the state to `open`: the caller knows that the outcome is unknown.  A newer call is not affected."""
        ...

    def forget(self, entry: Entry) -> Plan[None]:
        """Remove the entry, because nothing was sent, or a person has decided."""
        ...

    def pending(self) -> Plan[list[Entry]]:
        """Return the entries without a final answer that no living process is sending, oldest first."""
        ...

    def adopt(self, entry: Entry) -> Plan[Entry | None]:
        """Return the pending *entry* under a new token, owned by this process and by no other.

        Return None if another process was quicker.  A claim with the new token sends the entry.
        """
        ...

    def release(self, entry: Entry) -> Plan[None]:
        """Make an adopted entry pending again if it was not sent.  If it was settled or left since, change nothing."""
        ...

    def close(self) -> None:
        """Close files, threads and connections.  Entries stay."""
        ...

    async def aclose(self) -> None:
        """Close the keyring, including its connections on the running event loop."""
        ...


class FinishDespiteCancel:
    """Effect: run *plan* to its end, in the background if the awaiting task is cancelled."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan[Any]) -> None:
        self.plan = plan

    def run(self) -> Any:
        return run(self.plan)

    async def arun(self) -> Any:
        return await asyncio.shield(keep_task(arun(self.plan)))


def scope_of(method: str, url: str) -> str:
    """Return the scope of a key: method, origin and path.  The same key in another scope is another operation."""
    parts = urlsplit(without_credentials(url))
    return f"{method} {parts.scheme}://{parts.netloc}{parts.path or '/'}"


def without_credentials(url: str) -> str:
    """Return the URL without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


FINGERPRINTS = Fingerprinter()


def fingerprinted_parts(method: str, url: str, content_type: str, body: bytes) -> tuple[str, str, str, str, bytes]:
    """Return the parts of a request that its fingerprint covers."""
    parts = urlsplit(url)
    return method, parts.path or "/", parts.query, content_type, body


# Seconds by which the wall clock may be set back, or differ between machines, before an entry's age counts as unknown.
CLOCK_TOLERANCE = 60.0


def check_reuse(known: Entry, entry: Entry) -> None:
    """Raise KeyReused if the key names another request.  If a body could not be read, the requests count as equal."""
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
    """Whether the server still knows the key: *known* was created after *oldest*.

    An entry from the future has no known age, and counts as too old.
    """
    return oldest <= known.created_at <= entry.created_at + CLOCK_TOLERANCE
