"""From a library's request to its answer: name the operation, write it down, attempt it, remember how it ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from .._runtime.plan import Call, Plan
from ..errors import ConfigurationError, InvalidKey, OncemoreError
from .attempts import World, attempts
from .effects import Unbroken
from .errors import CredentialsMissing, OutcomeUnknown
from .exchange import Exchange, Wire
from .keyring import KeyringPlace, open_keyring
from .keyring.entry import CREDENTIALS, FINGERPRINTS, Entry, Keyring, Resumed, asked, scope_of, without_credentials
from .keys import new_key
from .retry import Retry
from .story import RetryObserver, log
from .verdict import Reply

UNSAFE_METHODS = frozenset({"POST", "PATCH", "PUT", "DELETE"})

# Written down beside the body.  Nothing that could be a credential: resuming goes through the client, which has those.
REMEMBERED_HEADERS = ("Content-Type", "Content-Encoding", "Accept")

RESUMING: ContextVar[Entry | None] = ContextVar("oncemore_resuming", default=None)


class Engine:
    """What every transport shares: the policy, the keyring, and how keys are named and sent.

    *header* carries the key; *quoted* writes it as the IETF draft wants it; *make_key* makes one where the caller sent
    none (None: only the caller's own keys are used).  *remember* names further headers that a resumed request needs.
    *timeout_header* tells the server how long the caller will wait for a keyed operation; None keeps it silent.
    """

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        header: str = "Idempotency-Key",
        quoted: bool = False,
        make_key: Callable[[], str] | None = new_key,
        remember: Sequence[str] = (),
        timeout_header: str | None = "X-Request-Timeout",
        observers: Sequence[RetryObserver] = (),
    ) -> None:
        if not isinstance(retry, Retry | None):
            raise ConfigurationError(
                f"retry is {retry!r}: make a Retry, as in Retry(attempts=3) or Retry.user_facing()"
            )
        self.retry = retry or Retry()
        self.keyring = None if keyring is None else open_keyring(keyring)
        self.header = header
        self.quoted = quoted
        self.make_key = make_key
        self.remembered = (*REMEMBERED_HEADERS, *remember)
        self.timeout_header = timeout_header
        self.world = World(observers=tuple(observers))

    def exchange(self, wire: Wire, retry: Retry | None = None) -> Exchange:
        """The request with its key, if it is to have one."""
        return Exchange(wire, retry or self.retry, self.name(wire.method, wire.headers), self.timeout_header)

    def perform(self, exchange: Exchange) -> Plan[Reply]:
        """The final (or the last) answer to the request; the exchange then tells how it came."""
        if exchange.wire.ready and (self.keyring is None or exchange.key is None):
            return attempts(exchange, exchange.retry, self.world)
        return self._prepared(exchange)

    def _prepared(self, exchange: Exchange) -> Plan[Reply]:
        body = yield from exchange.wire.body()
        if exchange.key is not None and self.keyring is not None:
            return (yield from self._written_down(exchange, self.keyring, body))
        reply: Reply = yield from attempts(exchange, exchange.retry, self.world)
        return reply

    def resume(self, send: Callable[[Entry], Any], *, opened: bool = False) -> Plan[list[Resumed]]:
        """What came of each interrupted operation, now sent again through *send*, under its own key."""
        resumed: list[Resumed] = []
        ring = self.ring()
        waiting = yield from ring.adopt(opened=opened)
        while waiting:
            try:
                resumed.append((yield from self._resume(ring, send, waiting[0])))
                yield from _logged(ring.release(waiting[0]))  # which changes nothing, if it was sent
            except GeneratorExit:
                raise
            except BaseException:
                yield from _logged(_released(ring, waiting))
                raise
            waiting.pop(0)
        return resumed

    def _resume(self, ring: Keyring, send: Callable[[Entry], Any], entry: Entry) -> Plan[Resumed]:
        RESUMING.set(entry)
        try:
            if entry.body is None:
                raise OutcomeUnknown(f"{entry.scope}: the body under key {entry.key} was not kept")
            return Resumed(entry, response=(yield Call(send, entry)))
        except OutcomeUnknown as error:  # it cannot be resumed any more, and whoever called is told so, once
            yield from _logged(ring.leave(entry))
            return Resumed(entry, error=error)
        except Exception as error:
            return Resumed(entry, error=error)
        finally:
            RESUMING.set(None)  # not reset: a plan that is dropped may be ended in another context

    def name(self, method: str, headers: MutableMapping[str, str]) -> str | None:
        """The operation's key, now on the request: the caller's own, or one made now; none for safe methods."""
        if method not in UNSAFE_METHODS:
            return None
        # Mostly there is none, and to httpx that is quicker said than what it is.
        own = headers.get(self.header) if self.header in headers else None
        if own is not None:
            if not own.strip('" \t'):
                raise InvalidKey(f"{self.header} is empty: leave it out, or give the operation a name")
            return own
        if self.make_key is None:
            return None
        made = self.make_key()
        headers[self.header] = key = f'"{made}"' if self.quoted else made
        return key

    def _written_down(self, exchange: Exchange, keyring: Keyring, body: bytes | None) -> Plan[Reply]:
        """Attempts between a durable claim and its settling; whatever interrupts them leaves the operation pending."""
        started, retry = self.world.now(), exchange.retry
        entry = self._entry(exchange, body)
        check_credentials(entry)
        held = yield from self._claim(keyring, entry, retry.sendable)
        if held.token != entry.token:
            raise exchange.forgotten(held)
        exchange.lasts = retry.sendable - (entry.created_at - held.created_at)
        new = held.created_at == entry.created_at
        try:
            reply: Reply = yield from attempts(exchange, retry, self.world, started)
        except GeneratorExit:
            raise
        except Exception:
            yield from self._note(exchange, keyring, entry, new)
            raise
        except BaseException:  # interrupted in an attempt that no story tells of
            yield from _logged(keyring.leave(entry))
            raise
        yield from self._note(exchange, keyring, entry, new, reply.status)
        return reply

    def _claim(self, keyring: Keyring, entry: Entry, sendable: float) -> Plan[Entry]:
        try:
            return (yield from keyring.claim(entry, oldest=entry.created_at - sendable))
        except (GeneratorExit, OncemoreError):
            raise
        except BaseException:  # cancelled, when it may have been written
            yield from _logged(keyring.leave(entry))
            raise

    def _note(self, exchange: Exchange, keyring: Keyring, entry: Entry, new: bool, status: int = 0) -> Plan[None]:
        """Remember how it ended: settled, still open, or, if nothing was ever sent, not at all."""
        if status and exchange.settled:
            yield from _logged(keyring.settle(entry, status))
        elif new and exchange.story is not None and exchange.story.known == "not_performed":
            yield from _logged(keyring.forget(entry))
        else:
            yield from _logged(keyring.leave(entry))

    def _entry(self, exchange: Exchange, body: bytes | None) -> Entry:
        wire = exchange.wire
        content_type = wire.headers.get("Content-Type") or ""
        fingerprint = (
            "" if body is None else FINGERPRINTS.fingerprint(*asked(wire.method, wire.url, content_type, body))
        )
        kept = [(name, wire.headers.get(name)) for name in (*self.remembered, self.header)]
        written = {name.lower() for name, value in kept if value is not None}
        kept += [(name, "") for name in CREDENTIALS if name in wire.headers and name.lower() not in written]
        return Entry(
            scope=scope_of(wire.method, wire.url),
            key=exchange.key or "",
            fingerprint=fingerprint,
            method=wire.method,
            url=without_credentials(wire.url),
            headers=tuple((name, value) for name, value in kept if value is not None),
            body=body,
            created_at=time.time(),
            token=secrets.randbits(62),
        )

    def close(self) -> None:
        """Let go of the keyring's files and connections."""
        if self.keyring is not None:
            self.keyring.close()

    async def aclose(self) -> None:
        """As `close`, for what belongs to the running event loop too."""
        if self.keyring is not None:
            await self.keyring.aclose()

    def ring(self) -> Keyring:
        """The keyring, which must have been given."""
        if self.keyring is None:
            raise ConfigurationError("there is no keyring: give one, such as keyring='sqlite:///keys.db'")
        return self.keyring


def check_credentials(entry: Entry) -> None:
    """Refuse to send what is resumed without the credentials that it had: to the server it would be someone else's."""
    resumed = RESUMING.get()
    if resumed is None or (resumed.scope, resumed.key) != (entry.scope, entry.key):
        return
    sent = {name.lower() for name, _ in entry.headers}
    if missing := [name for name in resumed.credentials if name.lower() not in sent]:
        raise CredentialsMissing(
            f"{entry.scope}: key {entry.key} was sent with {' and '.join(missing)}, which is not written down, and a server "
            "may take it for another caller's without; nothing was sent: resume it through a client that has it"
        )


def _released(ring: Keyring, entries: list[Entry]) -> Plan[None]:
    for entry in entries:
        yield from ring.release(entry)


def _logged(plan: Plan[None]) -> Plan[None]:
    """Carry out *plan*, whoever is cancelled; if it fails the answer is still the caller's, and the entry stays pending."""
    yield Unbroken(_tried(plan))


def _tried(plan: Plan[None]) -> Plan[None]:
    try:
        yield from plan
    except OncemoreError:
        log.exception("The keyring could not note the outcome; the operation stays pending")
