"""The inbox: each message or webhook event is handled once, and its record commits with the handler's effect."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from .._contract.keys import check_name, join
from .._contract.policy import Policy, duration
from .._fingerprint.fingerprint import fingerprint_of
from .._ledger.context import Op
from .._ledger.guard import Guard, check_guard
from .._ledger.model import Lease, Operation, Outcome, Record
from .._ledger.steps import LARGEST, pack_request, unpack_request
from .._ledger.store import Filter, Page
from .._ledger.values import Types, replayed, value_outcome
from .._runtime.plan import Call, Plan, arun, run
from ..errors import (
    ConfigurationError,
    CorruptRecord,
    Duplicate,
    InProgress,
    InvalidPayload,
    NotResolvable,
    OutcomeNotKept,
    PayloadMismatch,
    Refusal,
    StoreError,
)
from .envelope import Envelope, parse_structured, structured

log = logging.getLogger("oncemore.messages")

How = Literal["processed", "duplicate", "flagged", "dead"]
EventHandler = Callable[[Op, Any], Any]
OnDead = Callable[[Any, str], Any]
DEAD = "dead letter"
FLAGGED = "flagged|"  # begins the scope of a flagged event; the event's own scope follows
DEFAULT_NAME = "inbox"
WEEK, DAY = 7 * 86400.0, 86400.0
LONGEST_NOTE = 500  # characters of the reason that a dead letter keeps
# Why an event cannot be requeued, by the state of its record.
NOT_DEAD = {
    "running": "it is being handled",
    "settled": "it was handled",
    "released": "it already waits for its next delivery, a running Consumer, or run_requeued",
    "held": "nobody knows whether it was handled; find out, and call guard.resolve()",
}
NOT_OURS = {
    "ttl": "use retention, for how long an event's id is remembered",
    "keep": "a value of the handler is always kept, and an error only if errors names it",
}


class Received(msgspec.Struct, frozen=True):
    """The result of a delivery, which can be acknowledged to the sender.

    *how* is "processed" if the handler was called; "duplicate" if the event was handled before, with that *value*;
    "flagged" if the id came before with another payload, so the handler was not called; "dead" for a dead letter.
    """

    how: How
    value: Any = None
    attempt: int = 1


class Inbox:
    """Handles each event of each source once.

    Args:
        guard: The guard with the ledger that records the events.
        name: Tells apart the inboxes of several services in one database: each handles every event.  It is also the
            name of a consumer's group, unless the broker's URL has another.
        retention: For how long an id is remembered.
        sender_span: For how long the sender may repeat an event.
        attempts: How many failures make an event a dead letter.
        settings: The settings of `Policy`.  With `effect="lease"`, the handler's effect need not be in the ledger's
            database, and is as safe as any leased operation.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        name: str = DEFAULT_NAME,
        retention: float | str = WEEK,
        sender_span: float | str = DAY,
        attempts: int = 10,
        **settings: Any,
    ) -> None:
        if not isinstance(attempts, int) or attempts < 1:
            raise ConfigurationError(f"attempts = {attempts!r}: it must be an integer, at least 1")
        self.guard = check_guard(guard)
        self.name = check_name(name, "The inbox's name")
        self.attempts = attempts
        for name in settings.keys() & NOT_OURS.keys():
            raise ConfigurationError(f"An inbox has no {name}: {NOT_OURS[name]}")
        settings = {"effect": "transaction", **settings, "ttl": retention, "keep": "all"}
        self.policy = guard.policy.but(**settings)
        if self.policy.ttl < duration(sender_span):
            warnings.warn(
                f"The inbox forgets an event after {self.policy.ttl:g} s, but its sender may repeat it for "
                f"{duration(sender_span):g} s and have it handled twice: make retention at least as long",
                stacklevel=2,
            )

    def handle(
        self, event_id: str, source: str, payload: Any, handler: Callable[[Op, Any], Any], *, delivery: int = 1
    ) -> Received:
        """Call *handler* with the operation and the payload, unless the event was handled before.

        If the handler raises, the error is raised here: the event is not processed, and its sender should repeat it.
        *delivery* is the sender's or broker's own count, which includes deliveries that killed their process.
        """
        return run(self.received(self.operation(event_id, source, payload), payload, handler, delivery))

    async def ahandle(
        self, event_id: str, source: str, payload: Any, handler: Callable[[Op, Any], Any], *, delivery: int = 1
    ) -> Received:
        """The awaited form of `handle`.  The handler may be async."""
        return await arun(self.received(self.operation(event_id, source, payload), payload, handler, delivery))

    def operation(self, event_id: str, source: str, payload: Any) -> Operation:
        """Return the operation that handles an event: its scope has the source, its fingerprint the payload."""
        if not isinstance(source, str):
            raise ConfigurationError(
                f"The event's source is {source!r}: it must be a text, as in handle(id, source, payload, handler)"
            )
        key = check_name(event_id, "The event's id")
        return Operation(self.scope(source), key, fingerprint_of(payload), name=f"inbox.{source}")

    def scope(self, source: str) -> str:
        """Return the scope of a source's events."""
        return join("inbox", source) if self.name == DEFAULT_NAME else join("inbox", self.name, source)

    def received(
        self,
        operation: Operation,
        payload: Any,
        handler: EventHandler,
        delivery: int,
        *,
        kept: Any = None,
        policy: Policy | None = None,
        on_dead: OnDead | None = None,
    ) -> Plan[Received]:
        """The plan behind `handle` and `ahandle`.

        Args:
            operation: The operation that handles the event.
            payload: The value to pass to the handler.
            handler: The function to call with the operation and the payload.
            delivery: The broker's count of deliveries.
            kept: The value to keep in a dead letter instead of the payload.
            policy: The policy to use instead of the inbox's own.
            on_dead: The function to call with the payload and the reason if the event becomes a dead letter.
        """
        try:
            received = yield from self._received(operation, payload, handler, delivery, kept, policy, on_dead)
        except InProgress:  # another delivery of the event is being handled, and emits its result
            raise
        except Exception:
            self.guard.emit("received", operation, attempt=delivery, detail="failed")
            raise
        self.guard.emit("received", operation, attempt=received.attempt, detail=received.how)
        return received

    def _received(
        self,
        operation: Operation,
        payload: Any,
        handler: EventHandler,
        delivery: int,
        kept: Any,
        policy: Policy | None,
        on_dead: OnDead | None,
    ) -> Plan[Received]:
        begun: list[Op] = []
        policy = policy or self.policy
        kept = payload if kept is None else kept

        @functools.wraps(handler)  # error messages have its name
        def perform(op: Op) -> Any:
            begun.append(op)
            return handler(op, payload)

        try:
            if delivery > self.attempts and (yield from self.bury(operation, kept, why := f"delivery {delivery}")):
                yield from call_on_dead(on_dead, payload, why)
                return Received("dead", attempt=delivery)
            answer = yield from self.guard.guarded(operation, perform, policy)
        except Refusal as refusal:
            if begun:  # the handler raised it
                raise
            return (yield from self._refused(operation, kept, refusal))
        except StoreError:
            raise
        except Exception as error:
            if not begun:  # the guard has failed, not the handler, so it is not counted
                raise
            failures = yield from self._failed(operation, self.policy.ttl)
            if failures < self.attempts or not (yield from self.bury(operation, kept, repr(error))):
                raise
            why = storable(repr(error))
            log.error("The event %r of %s is a dead letter: %s; see inbox.dead()", operation.key, operation.name, why)
            yield from call_on_dead(on_dead, payload, repr(error))
            return Received("dead", attempt=self.attempts)
        if answer.how == "replayed":
            return Received("duplicate", self._value(operation, answer.outcome), answer.attempt)
        return Received("processed", answer.value, answer.attempt)

    def _refused(self, operation: Operation, payload: Any, refusal: Refusal) -> Plan[Received]:
        """Return the result if the ledger refuses the event.  Raises the refusal if the sender should repeat it."""
        if isinstance(refusal, PayloadMismatch):
            log.warning(
                "%s: the event %r came again with another payload; see inbox.flagged()", operation.name, operation.key
            )
            yield from self._flag(operation, payload)
            return Received("flagged")
        if isinstance(refusal, Duplicate | OutcomeNotKept):
            return Received("duplicate")
        record = yield from self.guard.store.find(*operation.id)
        if record is None or not (is_dead(record) or (record.state == "held" and self.policy.effect == "transaction")):
            raise refusal
        if not is_dead(record):
            # A transaction leaves nothing in doubt.  So a process has died while it made the event a dead letter, or
            # while it handled the event before this inbox's effect was changed from "lease": do not handle it again.
            yield from self.guard.store.resolve(*operation.id, None, retention=self.policy.ttl)
            yield from self.bury(operation, payload, record.note)
        return Received("dead", attempt=record.attempts)

    def _value(self, operation: Operation, outcome: Outcome) -> Any:
        """Return the handler's value, or the error that is its outcome; None if that was not kept or is unreadable.

        The event was handled in any case.  If this method raised, the sender would repeat the event for ever.
        """
        try:
            return self.guard.value_of(operation, self.policy, outcome)
        except (OutcomeNotKept, CorruptRecord):
            return None

    # Flagged events: a settled record beside the event's own; its outcome is the other payload

    def _flag(self, operation: Operation, payload: Any) -> Plan[None]:
        """Keep the other payload for `flagged`.  Only the first one under each id is kept."""
        beside = Operation(f"{FLAGGED}{operation.scope}", operation.key, operation.fingerprint, name="oncemore.flagged")
        found = yield from self.guard.store.claim(beside, lease=self.policy.lease)
        if isinstance(found, Lease):
            outcome = value_outcome(payload, self.policy.types)
            kept = outcome if len(outcome.body) <= LARGEST else Outcome("tombstone")
            yield from self.guard.store.settle(found, kept, retention=self.policy.ttl)

    def flagged(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """Return a page of a source's events that came again with another payload, which is the records' outcome."""
        return self.guard.list(self._where_flagged(source), limit=limit, cursor=cursor)

    async def aflagged(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The awaited form of `flagged`."""
        return await self.guard.alist(self._where_flagged(source), limit=limit, cursor=cursor)

    def _where_flagged(self, source: str) -> Filter:
        return Filter(state="settled", scope=FLAGGED + self.scope(source))

    # Dead letters: held records whose note begins with DEAD

    def _failed(self, operation: Operation, retention: float) -> Plan[int]:
        """Count a failure of the event, and return how many there are.  With *retention* 0.0, reset the count.

        The count is the number of claims of a second record.  The event's own also counts claims that did not fail.
        """
        count = Operation(f"failed|{operation.scope}", operation.key, name="oncemore.failed")
        found = yield from self.guard.store.claim(count, lease=self.policy.lease)
        if isinstance(found, Record):  # the failure of another delivery is being counted now
            return found.attempts
        yield from self.guard.store.release(found, retention=retention)
        return found.attempt

    def bury(self, operation: Operation, payload: Any, why: str) -> Plan[bool]:
        """Make the event a dead letter.  Return False if it is one already, is being handled, or was or may have been.

        The record keeps the payload until the event is handled.
        """
        types = self.policy.types
        if self.policy.effect == "steps":  # the form that the next attempt reads
            request = pack_request(msgspec.structs.replace(operation, request=lambda: payload), None, types)
        else:
            request = packed(payload, types)
        return (yield from self._bury(operation, request, why))

    def _bury(self, operation: Operation, request: bytes, why: str) -> Plan[bool]:
        lease = yield from self.guard.store.claim(operation, lease=self.policy.lease, request=request)
        if not isinstance(lease, Lease):
            return False
        if lease.lapsed and self.policy.on_unknown != "retry" and self.policy.effect == "lease":
            yield from self.guard.lapse(lease)  # the last attempt may have handled it, so `on_unknown` decides
            return False
        yield from self.guard.store.hold(lease, note=storable(f"{DEAD}: {why}"[:LONGEST_NOTE]))
        yield from self._failed(operation, 0.0)  # a requeued letter has all its attempts again
        self.guard.emit("held", operation, token=lease.token, detail=DEAD)
        return True

    def dead(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """Return a page of a source's dead letters, with the cursor of the next page."""
        return self._only_dead(self.guard.list(self._where(source), limit=limit, cursor=cursor))

    async def adead(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The awaited form of `dead`."""
        return self._only_dead(await self.guard.alist(self._where(source), limit=limit, cursor=cursor))

    def _where(self, source: str) -> Filter:
        return Filter(state="held", scope=self.scope(source))

    def _only_dead(self, page: Page) -> Page:
        return Page(tuple(filter(is_dead, page.records)), page.cursor)

    def requeue(self, event_id: str, source: str) -> Record:
        """Have a dead letter handled, under the same id, by a running Consumer, `run_requeued` or the next delivery."""
        return run(self._requeue(event_id, source))

    async def arequeue(self, event_id: str, source: str) -> Record:
        """The awaited form of `requeue`."""
        return await arun(self._requeue(event_id, source))

    def _requeue(self, event_id: str, source: str) -> Plan[Record]:
        scope = self.scope(source)
        record = yield from self.guard.store.find(scope, event_id)
        if record is not None and not is_dead(record):
            raise NotResolvable(f"The event {event_id!r} of {source!r} is not a dead letter: {NOT_DEAD[record.state]}")
        if record is not None:  # the process may have crashed before it reset the count
            yield from self._failed(Operation(scope, event_id), 0.0)
            yield from self._mark_requeued(event_id, source)
        return (yield from self.guard.store.resolve(scope, event_id, None, retention=self.policy.ttl))

    # Requeued letters.  Each has a marker: a second record, by which the letter is found.  The marker is written before
    # the letter is released, so that a crash in between loses nothing, and is deleted after the letter was handled.

    @property
    def _requeued_scope(self) -> str:
        return join("requeued", self.name)

    def _mark_requeued(self, event_id: str, source: str) -> Plan[None]:
        marker = Operation(self._requeued_scope, join(source, event_id), name="oncemore.requeued")
        note = msgspec.msgpack.encode([event_id, source])
        lease = yield from self.guard.store.claim(marker, lease=self.policy.lease, request=note)
        if isinstance(lease, Lease):
            yield from self.guard.store.release(lease, retention=self.policy.ttl)

    def run_requeued(self, handlers: EventHandler | Mapping[str, EventHandler]) -> int:
        """Handle the requeued dead letters with the payloads that they keep, and return how many are done.

        *handlers* maps types to functions, as for a Consumer, or is one function, as for `handle`.  A letter whose
        handler fails stays requeued until it has failed too often.
        """
        return run(self._handle_requeued(handlers))

    async def arun_requeued(self, handlers: EventHandler | Mapping[str, EventHandler]) -> int:
        """The awaited form of `run_requeued`."""
        return await arun(self._handle_requeued(handlers))

    def _handle_requeued(self, handlers: EventHandler | Mapping[str, EventHandler]) -> Plan[int]:
        done = 0
        for marker, letter in (yield from self.requeued()):
            done += yield from self.handle_dead(marker, letter, handlers)
        return done

    def requeued(self) -> Plan[list[tuple[str, Record]]]:
        """Return the requeued letters, each with the key of its marker."""
        store, scope = self.guard.store, self._requeued_scope
        found: list[tuple[str, Record]] = []
        cursor: str | None = None
        while True:
            page = yield from store.list(Filter(scope=scope, state="released"), limit=100, cursor=cursor)
            for marker in page.records:
                event_id, source = msgspec.msgpack.decode(marker.request)
                letter = yield from store.find(self.scope(source), event_id)
                if letter is None or letter.state == "settled":  # it was deleted, or a delivery was handled
                    yield from store.delete(scope, marker.key)
                elif letter.state == "released":  # if not, it is being handled, or `requeue` has not released it yet
                    found.append((marker.key, letter))
            cursor = page.cursor
            if cursor is None:
                return found

    def handle_dead(
        self,
        marker: str,
        letter: Record,
        handlers: EventHandler | Mapping[str, EventHandler],
        on_dead: OnDead | None = None,
    ) -> Plan[bool]:
        """Handle one requeued letter.  Return False if it must be tried again, here or by another consumer."""
        done = yield from self._handle_dead(letter, handlers, on_dead)
        if done:
            yield from self.guard.store.delete(self._requeued_scope, marker)
        return done

    def _handle_dead(
        self, letter: Record, handlers: EventHandler | Mapping[str, EventHandler], on_dead: OnDead | None
    ) -> Plan[bool]:
        operation = Operation(letter.scope, letter.key, letter.fingerprint, name=letter.name)
        try:
            kept = self.kept(letter)
            payload, handler = self.requeued_event(kept, handlers)
        except CorruptRecord as error:  # the next delivery handles it
            log.error("The requeued event %r of %s cannot be handled: %s", letter.key, letter.name, error.detail)
            return True
        except InvalidPayload as error:
            log.error("The requeued event %r of %s is a dead letter again: %s", letter.key, letter.name, error.detail)
            yield from self._bury(operation, letter.request, f"requeued, but {error.detail}")
            return True
        except LookupError as error:  # another consumer of this inbox, or the next release, may have a handler
            log.warning("The requeued event %r of %s waits: there is %s", letter.key, letter.name, error)
            return False
        try:
            received = yield from self.received(operation, payload, handler, 1, kept=kept, on_dead=on_dead)
        except Exception as error:
            log.warning("The requeued event %r of %s has failed again: %r", letter.key, letter.name, error)
            return False
        log.info("The requeued event %r of %s: %s", letter.key, letter.name, received.how)
        return True

    def requeued_event(
        self, kept: Any, handlers: EventHandler | Mapping[str, EventHandler]
    ) -> tuple[Any, EventHandler]:
        """Return the payload and the handler of a requeued letter.  Raises LookupError if no handler matches."""
        if not isinstance(handlers, Mapping):
            return kept, handlers
        if not isinstance(kept, bytes):  # the payload was passed to `handle`, and is no envelope
            raise LookupError("no handler by type for it: call run_requeued with the function that you pass to handle")
        envelope = parse_structured(kept)
        return envelope, handler_for(handlers, envelope)

    def kept(self, letter: Record) -> Any:
        """Return the payload that a dead letter keeps.  Raises CorruptRecord if it cannot be read."""
        types = self.policy.types
        if self.policy.effect != "steps" and letter.request:
            return replayed(Outcome("value", body=letter.request), types=types)
        kept = unpack_request(letter.request, types)["request"]
        if kept is None:
            raise CorruptRecord(
                "its payload was too large for an operation in steps, or of a type that cannot be read back: "
                "ask its sender to repeat it"
            )
        return kept

    # For your own consumer

    def consumer(
        self,
        source: str | None = None,
        *,
        id: Callable[[Any], str] | None = None,
        delivery: Callable[[Any], int] | None = None,
    ) -> Callable[[EventHandler], Callable[[Any], Any]]:
        """Decorate a handler `(op, message)`: make it a function of the message, which handles each message once.

        The function returns a `Received`, and is async if the handler is.  If it returns, acknowledge the message; if
        it raises, have the message delivered again.

        Args:
            source: The sender of all messages; by default each message's own `source`, as in CloudEvents.
            id: Returns the sender's id of a message; by default its own `id`.
            delivery: Returns the broker's count of deliveries, if the broker counts them.
        """

        def decorate(handler: EventHandler) -> Callable[[Any], Any]:
            def plan(message: Any) -> Plan[Received]:
                event_id = member(message, "id") if id is None else id(message)
                sender = member(message, "source") if source is None else source
                count = 1 if delivery is None else delivery(message)
                compared, kept = message, None
                if isinstance(message, Envelope):  # compare the same members as a Consumer does
                    compared, kept = [message.type, message.subject, message.data], structured(message)
                operation = self.operation(event_id, sender, compared)
                return self.received(operation, message, handler, count, kept=kept)

            if inspect.iscoroutinefunction(handler):

                @functools.wraps(handler)
                async def ahandle(message: Any) -> Received:
                    return await arun(plan(message))

                return ahandle

            @functools.wraps(handler)
            def handle(message: Any) -> Received:
                return run(plan(message))

            return handle

        return decorate


def member(message: Any, name: str) -> Any:
    """Return the member or attribute of this name."""
    found = message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)
    if found is None:
        raise ConfigurationError(
            f"A message has no {name!r}: pass it to the decorator, as in @inbox."
            + ("consumer('payments')" if name == "source" else "consumer('payments', id=lambda message: ...)")
        )
    return found


def handler_for(handlers: Mapping[str, EventHandler], envelope: Envelope) -> EventHandler:
    """Return the first handler whose pattern matches the envelope's type.  Raises LookupError if none does."""
    for pattern, handler in handlers.items():
        if matches(pattern, envelope.type):
            return handler
    raise LookupError(f"no handler for the type {envelope.type!r}")


def matches(pattern: str, type: str) -> bool:
    """Whether *pattern* matches the *type*; `*` stands for any characters.

    A regular expression could take hours for many `*`, and customers choose the patterns of webhooks.
    """
    first, *others = pattern.split("*")
    if not others:
        return pattern == type
    *inner, last = others
    at, end = len(first), len(type) - len(last)
    if at > end or not type.startswith(first) or not type.endswith(last):
        return False
    for part in inner:
        found = type.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def is_dead(record: Record) -> bool:
    """Whether the record is a dead letter.  Other held records have an unknown outcome."""
    return record.state == "held" and record.note.startswith(DEAD)


def storable(text: str) -> str:
    """Return the text with lone surrogates and NULs escaped, so that every database can store it."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def call_on_dead(on_dead: OnDead | None, payload: Any, why: str) -> Plan[None]:
    """Call the user's function for a message that has become a dead letter.  Its errors are only logged."""
    if on_dead is None:
        return
    try:
        yield Call(on_dead, payload, why)
    except Exception:
        log.exception("on_dead failed; the message is a dead letter all the same")


def packed(payload: Any, types: Types) -> bytes:
    """Return the payload as a record keeps it, of any size; empty if its type cannot be read back."""
    outcome = value_outcome(payload, types)
    return outcome.body if outcome.kind == "value" else b""
