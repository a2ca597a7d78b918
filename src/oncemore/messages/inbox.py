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
FLAGGED = "flagged|"  # before the scope of an event's own record
DEFAULT_NAME = "inbox"
WEEK, DAY = 7 * 86400.0, 86400.0
LONGEST_NOTE = 500  # characters of a dead letter's reason
# Why an event cannot be requeued, by the state of its record.
NOT_DEAD = {
    "running": "it is being handled",
    "settled": "it was handled",
    "released": "it waits already for its next delivery, a running Consumer, or run_requeued",
    "held": "nobody knows whether it was handled; find out, and say so with guard.resolve()",
}
NOT_OURS = {
    "ttl": "say retention, for how long an event's id is remembered",
    "keep": "the handler's value is final, and an error that it raises is not, unless errors names it",
}


class Received(msgspec.Struct, frozen=True):
    """The result of a delivery; each of these is acknowledged to the sender.

    *processed* now; a *duplicate*, with the first one's value; *flagged*: this id came before with another payload, and
    was not handled; *dead*: it has failed too often, and waits for `requeue`.
    """

    how: How
    value: Any = None
    attempt: int = 1


class Inbox:
    """Handles each event of each source once.

    *name* tells apart the inboxes of several services in one database: each handles every event.  It is also the name of
    a consumer's group, unless the broker's URL has another.  *retention* is for how long an id is remembered;
    *sender_span* is for how long the sender may repeat it.  After *attempts* failures an event is a dead letter.  With
    `effect="lease"` the handler's effect need not be in the ledger's database, and is then as safe as any leased operation.
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
            raise ConfigurationError(f"attempts = {attempts!r}: an event needs one at least")
        self.guard = check_guard(guard)
        self.name = check_name(name, "The inbox's name")
        self.attempts = attempts
        for name in settings.keys() & NOT_OURS.keys():
            raise ConfigurationError(f"An inbox has no {name}: {NOT_OURS[name]}")
        settings = {"effect": "transaction", **settings, "ttl": retention, "keep": "all"}
        self.policy = guard.policy.but(**settings)
        if self.policy.ttl < duration(sender_span):
            warnings.warn(
                f"The inbox forgets an event after {self.policy.ttl:g} s, but its sender repeats it for "
                f"{duration(sender_span):g} s: make retention at least as long, or it is handled twice",
                stacklevel=2,
            )

    def handle(
        self, event_id: str, source: str, payload: Any, handler: Callable[[Op, Any], Any], *, delivery: int = 1
    ) -> Received:
        """Have *handler* called with the operation and the payload, unless the event was handled before.

        If the handler raises, the error comes out: the event is not processed, and its sender should repeat it.
        *delivery* is the sender's or broker's own count: it also counts deliveries that killed their process.
        """
        return run(self.received(self.operation(event_id, source, payload), payload, handler, delivery))

    async def ahandle(
        self, event_id: str, source: str, payload: Any, handler: Callable[[Op, Any], Any], *, delivery: int = 1
    ) -> Received:
        """Handle the event as `handle` does, with a handler that may be awaited."""
        return await arun(self.received(self.operation(event_id, source, payload), payload, handler, delivery))

    def operation(self, event_id: str, source: str, payload: Any) -> Operation:
        """The operation that handles an event: the source owns the id, and the payload's digest is the fingerprint."""
        if not isinstance(source, str):
            raise ConfigurationError(
                f"The event's source is {source!r}; it must be a text: handle(id, source, payload, handler)"
            )
        key = check_name(event_id, "The event's id")
        return Operation(self.scope(source), key, fingerprint_of(payload), name=f"inbox.{source}")

    def scope(self, source: str) -> str:
        """The scope of a source's events."""
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
            payload: Is given to the handler.
            handler: Is called with the operation and the payload.
            delivery: The broker's count.
            kept: Is kept in a dead letter, instead of the payload.
            policy: The inbox's own by default.
            on_dead: Is called with the payload and the reason by the delivery that makes the event a dead letter.
        """
        try:
            received = yield from self._received(operation, payload, handler, delivery, kept, policy, on_dead)
        except InProgress:  # another delivery of it is being handled: that one will tell
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

        @functools.wraps(handler)  # its name is in error messages
        def perform(op: Op) -> Any:
            begun.append(op)
            return handler(op, payload)

        try:
            if delivery > self.attempts and (yield from self.bury(operation, kept, why := f"delivery {delivery}")):
                yield from tell_dead(on_dead, payload, why)
                return Received("dead", attempt=delivery)
            answer = yield from self.guard.guarded(operation, perform, policy)
        except Refusal as refusal:
            if begun:  # the handler raised it
                raise
            return (yield from self._refused(operation, kept, refusal))
        except StoreError:
            raise
        except Exception as error:
            if not begun:  # a guard that cannot lend, say: no event is to die of that
                raise
            failures = yield from self._failed(operation, self.policy.ttl)
            if failures < self.attempts or not (yield from self.bury(operation, kept, repr(error))):
                raise
            log.error("The event %r of %s has failed %d times", operation.key, operation.name, self.attempts)
            yield from tell_dead(on_dead, payload, repr(error))
            return Received("dead", attempt=self.attempts)
        if answer.how == "replayed":
            return Received("duplicate", self._value(operation, answer.outcome), answer.attempt)
        return Received("processed", answer.value, answer.attempt)

    def _refused(self, operation: Operation, payload: Any, refusal: Refusal) -> Plan[Received]:
        """The result for the sender if the ledger refuses the event; raises if the sender should repeat it."""
        if isinstance(refusal, PayloadMismatch):
            log.warning("The event %r of %s came again with another payload", operation.key, operation.name)
            yield from self._flag(operation, payload)
            return Received("flagged")
        if isinstance(refusal, Duplicate | OutcomeNotKept):
            return Received("duplicate")
        record = yield from self.guard.store.find(*operation.id)
        if record is None or not (is_dead(record) or (record.state == "held" and self.policy.effect == "transaction")):
            raise refusal
        if not is_dead(record):
            # A transaction leaves no doubt, so a process has died while it made the event a dead letter; or while it
            # handled the event under a lease, before the inbox had this level: then it is not repeated either.
            yield from self.guard.store.resolve(*operation.id, None, retention=self.policy.ttl)
            yield from self.bury(operation, payload, record.note)
        return Received("dead", attempt=record.attempts)

    def _value(self, operation: Operation, outcome: Outcome) -> Any:
        """The handler's value, or the error that is its outcome; None if it was not kept, or cannot be read any more.

        The event was handled, whatever its value: if this raised, the sender would repeat it for ever.
        """
        try:
            return self.guard.value_of(operation, self.policy, outcome)
        except (OutcomeNotKept, CorruptRecord):
            return None

    # Flagged events: settled records beside the events' own, whose outcome is the other payload

    def _flag(self, operation: Operation, payload: Any) -> Plan[None]:
        """Keep the other payload for `flagged`; of several under one id, the first."""
        beside = Operation(f"{FLAGGED}{operation.scope}", operation.key, operation.fingerprint, name="oncemore.flagged")
        found = yield from self.guard.store.claim(beside, lease=self.policy.lease)
        if isinstance(found, Lease):
            outcome = value_outcome(payload, self.policy.types)
            kept = outcome if len(outcome.body) <= LARGEST else Outcome("tombstone")
            yield from self.guard.store.settle(found, kept, retention=self.policy.ttl)

    def flagged(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The events of a source that came again with another payload, which is their records' outcome: one page."""
        return self.guard.list(self._where_flagged(source), limit=limit, cursor=cursor)

    async def aflagged(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The awaited form of `flagged`."""
        return await self.guard.alist(self._where_flagged(source), limit=limit, cursor=cursor)

    def _where_flagged(self, source: str) -> Filter:
        return Filter(state="settled", scope=FLAGGED + self.scope(source))

    # Dead letters: held records with a note

    def _failed(self, operation: Operation, retention: float) -> Plan[int]:
        """Count a failure, and return how many there are: the claims of a small record beside the event's.

        The event's own claims would not do, because they include deliveries that were refused for coming too early.

        Without *retention* the count begins anew.
        """
        count = Operation(f"failed|{operation.scope}", operation.key, name="oncemore.failed")
        found = yield from self.guard.store.claim(count, lease=self.policy.lease)
        if isinstance(found, Record):  # another delivery's failure is being counted
            return found.attempts
        yield from self.guard.store.release(found, retention=retention)
        return found.attempt

    def bury(self, operation: Operation, payload: Any, why: str) -> Plan[bool]:
        """Make the event a dead letter; False if it is one already, or is being handled, or was.

        Its record keeps the payload until it is handled after all.
        """
        types = self.policy.types
        if self.policy.effect == "steps":  # as its next attempt reads it
            request = pack_request(msgspec.structs.replace(operation, request=lambda: payload), None, types)
        else:
            request = packed(payload, types)
        return (yield from self._bury(operation, request, why))

    def _bury(self, operation: Operation, request: bytes, why: str) -> Plan[bool]:
        lease = yield from self.guard.store.claim(operation, lease=self.policy.lease, request=request)
        if not isinstance(lease, Lease):
            return False
        if lease.lapsed and self.policy.on_unknown != "retry" and self.policy.effect == "lease":
            yield from self.guard.lapse(lease)  # its last holder may have handled it, so it is no dead letter
            return False
        yield from self.guard.store.hold(lease, note=storable(f"{DEAD}: {why}"[:LONGEST_NOTE]))
        yield from self._failed(operation, 0.0)  # one that is requeued has as many attempts as a new one
        self.guard.emit("held", operation, token=lease.token, detail=DEAD)
        return True

    def dead(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The dead letters of a source: one page, and the cursor of the next."""
        return self._only_dead(self.guard.list(self._where(source), limit=limit, cursor=cursor))

    async def adead(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The awaited form of `dead`."""
        return self._only_dead(await self.guard.alist(self._where(source), limit=limit, cursor=cursor))

    def _where(self, source: str) -> Filter:
        return Filter(state="held", scope=self.scope(source))

    def _only_dead(self, page: Page) -> Page:
        return Page(tuple(filter(is_dead, page.records)), page.cursor)

    def requeue(self, event_id: str, source: str) -> Record:
        """Let a dead letter be handled after all, under the same id: by a running Consumer, `run_requeued`, or a delivery."""
        return run(self._requeued(event_id, source))

    async def arequeue(self, event_id: str, source: str) -> Record:
        """The awaited form of `requeue`."""
        return await arun(self._requeued(event_id, source))

    def _requeued(self, event_id: str, source: str) -> Plan[Record]:
        scope = self.scope(source)
        record = yield from self.guard.store.find(scope, event_id)
        if record is not None and not is_dead(record):
            raise NotResolvable(f"The event {event_id!r} of {source!r} is not a dead letter: {NOT_DEAD[record.state]}")
        if record is not None:  # the process that made it a dead letter may have crashed right after
            yield from self._failed(Operation(scope, event_id), 0.0)
            yield from self._mark_requeued(event_id, source)
        return (yield from self.guard.store.resolve(scope, event_id, None, retention=self.policy.ttl))

    # Requeued letters.  A small record for each says that there is one; it is written before the letter is released, so
    # that a crash in between loses nothing, and is deleted when the letter has been handled.

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
        """Handle the requeued dead letters with the payloads that they keep, and return how many were handled.

        *handlers* are those of a Consumer, by type; or one function, if you call `handle` yourself.  A letter whose handler
        fails stays requeued until it has failed too often.
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
        """The requeued letters, each with the key of the record that says so."""
        store, scope = self.guard.store, self._requeued_scope
        found: list[tuple[str, Record]] = []
        cursor: str | None = None
        while True:
            page = yield from store.list(Filter(scope=scope, state="released"), limit=100, cursor=cursor)
            for marker in page.records:
                event_id, source = msgspec.msgpack.decode(marker.request)
                letter = yield from store.find(self.scope(source), event_id)
                if letter is None or letter.state == "settled":  # it was delivered again, and handled
                    yield from store.delete(scope, marker.key)
                elif letter.state == "released":  # otherwise it runs, or `requeue` has not released it yet
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
        """Handle one requeued letter; False if it must be tried again, here or by a consumer that has a handler for it."""
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
        except CorruptRecord as error:  # it stays released, so that its next delivery is handled
            log.error("The requeued event %r of %s cannot be handled: %s", letter.key, letter.name, error.detail)
            return True
        except InvalidPayload as error:
            log.error("The requeued event %r of %s is a dead letter again: %s", letter.key, letter.name, error.detail)
            yield from self._bury(operation, letter.request, f"requeued, but {error.detail}")
            return True
        except LookupError as error:  # another consumer of this inbox may have one, or the next release of this one
            log.warning("The requeued event %r of %s waits: there is %s", letter.key, letter.name, error)
            return False
        try:
            received = yield from self.received(operation, payload, handler, 1, kept=kept, on_dead=on_dead)
        except Exception as error:
            log.warning("The requeued event %r of %s has failed again: %r", letter.key, letter.name, error)
            return False
        log.info("The requeued event %r of %s is %s", letter.key, letter.name, received.how)
        return True

    def requeued_event(
        self, kept: Any, handlers: EventHandler | Mapping[str, EventHandler]
    ) -> tuple[Any, EventHandler]:
        """The payload and the handler of a requeued letter; LookupError if *handlers* has none for it."""
        if not isinstance(handlers, Mapping):
            return kept, handlers
        if not isinstance(kept, bytes):  # the payload of `handle`, and no envelope
            raise LookupError("no handler by type for it: call run_requeued with the function that you give to handle")
        envelope = parse_structured(kept)
        return envelope, handler_for(handlers, envelope)

    def kept(self, letter: Record) -> Any:
        """The payload that a dead letter keeps."""
        types = self.policy.types
        if self.policy.effect != "steps" and letter.request:
            return replayed(Outcome("value", body=letter.request), types=types)
        kept = unpack_request(letter.request, types)["request"]
        if kept is None:
            raise CorruptRecord(
                "its payload was too large for an operation in steps, or of a kind that cannot be read back: have it sent again"
            )
        return kept

    # For people who bring their own consumer

    def consumer(
        self,
        source: str | None = None,
        *,
        id: Callable[[Any], str] | None = None,
        delivery: Callable[[Any], int] | None = None,
    ) -> Callable[[EventHandler], Callable[[Any], Any]]:
        """Decorate a handler `(op, message)`: it becomes a function of the message alone, which handles each one once.

        The function returns a `Received`, and is async if the handler is.  Acknowledge the message if it returns; if it
        raises, have it delivered again.

        Args:
            source: Who sends the messages; by default the message's own `source`, as CloudEvents have it.
            id: Finds the id that the sender gave a message; by default the message's own `id`.
            delivery: Finds the broker's count of deliveries, if it has one.
        """

        def decorate(handler: EventHandler) -> Callable[[Any], Any]:
            def plan(message: Any) -> Plan[Received]:
                event_id = member(message, "id") if id is None else id(message)
                sender = member(message, "source") if source is None else source
                count = 1 if delivery is None else delivery(message)
                compared, kept = message, None
                if isinstance(message, Envelope):  # compared by the same members as a Consumer's
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
    """The message's member or attribute of this name."""
    found = message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)
    if found is None:
        raise ConfigurationError(
            f"A message has no {name!r}; tell @inbox.consumer where to find it: "
            + ("consumer('payments')" if name == "source" else "consumer('payments', id=lambda message: ...)")
        )
    return found


def handler_for(handlers: Mapping[str, EventHandler], envelope: Envelope) -> EventHandler:
    """The first handler whose pattern matches the envelope's type; `*` matches any characters."""
    for pattern, handler in handlers.items():
        if matches(pattern, envelope.type):
            return handler
    raise LookupError(f"no handler for the type {envelope.type!r}")


def matches(pattern: str, type: str) -> bool:
    """Whether *pattern* is for events of the *type*; `*` stands for any characters.

    Not by a regular expression: customers choose the patterns of webhooks, and one with many `*` would take hours.
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
    """Whether the event has failed too often, rather than that nobody knows whether it was handled."""
    return record.state == "held" and record.note.startswith(DEAD)


def storable(text: str) -> str:
    """The text of an error in a form that each database can store: half characters and NULs are written out."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def tell_dead(on_dead: OnDead | None, payload: Any, why: str) -> Plan[None]:
    """Tell the user's function that a message was given up; its own error changes nothing about that."""
    if on_dead is None:
        return
    try:
        yield Call(on_dead, payload, why)
    except Exception:
        log.exception("on_dead failed")


def packed(payload: Any, types: Types) -> bytes:
    """The payload as a record keeps it, however large it is; nothing if it is of a kind that cannot be read back."""
    outcome = value_outcome(payload, types)
    return outcome.body if outcome.kind == "value" else b""
