"""The inbox: each message or webhook event is handled once, and its record commits with the handler's effect."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from .._contract.keys import check_name, join
from .._contract.policy import duration
from .._fingerprint.fingerprint import fingerprint_of
from .._ledger.context import Op
from .._ledger.guard import Guard, check_guard
from .._ledger.model import Lease, Operation, Outcome, Record
from .._ledger.steps import LARGEST, pack_request
from .._ledger.store import Filter, Page
from .._ledger.values import Types, replayed, value_outcome
from .._runtime.plan import Plan, arun, run
from ..errors import (
    ConfigurationError,
    Duplicate,
    NotResolvable,
    OutcomeNotKept,
    PayloadMismatch,
    Refusal,
    StoreError,
)

log = logging.getLogger("oncemore.messages")

How = Literal["processed", "duplicate", "flagged", "dead"]
DEAD = "dead letter"
WEEK, DAY = 7 * 86400.0, 86400.0
NOT_OURS = {
    "ttl": "say retention, for how long an event's id is remembered",
    "keep": "whatever the handler gives is final, and what it raises is not, unless it is one of errors",
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

    *retention* is for how long an id is remembered; *sender_span* is for how long the sender may repeat it.  After
    *attempts* failures an event is a dead letter.  With `effect="lease"` the handler's effect need not be in the ledger's
    database, and is then as safe as any leased operation.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        retention: float | str = WEEK,
        sender_span: float | str = DAY,
        attempts: int = 10,
        **settings: Any,
    ) -> None:
        if not isinstance(attempts, int) or attempts < 1:
            raise ConfigurationError(f"attempts = {attempts!r}: an event needs one at least")
        self.guard = check_guard(guard)
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
        return run(self._received(self.operation(event_id, source, payload), payload, handler, delivery))

    async def ahandle(
        self, event_id: str, source: str, payload: Any, handler: Callable[[Op, Any], Any], *, delivery: int = 1
    ) -> Received:
        """Handle the event as `handle` does, with a handler that may be awaited."""
        return await arun(self._received(self.operation(event_id, source, payload), payload, handler, delivery))

    def operation(self, event_id: str, source: str, payload: Any) -> Operation:
        """The operation that handles an event: the source owns the id, and the payload's digest is the fingerprint."""
        if not isinstance(source, str):
            raise ConfigurationError(
                f"The event's source is {source!r}; it must be a text: handle(id, source, payload, handler)"
            )
        key = check_name(event_id, "The event's id")
        return Operation(join("inbox", source), key, fingerprint_of(payload), name=f"inbox.{source}")

    def _received(
        self, operation: Operation, payload: Any, handler: Callable[[Op, Any], Any], delivery: int
    ) -> Plan[Received]:
        begun: list[Op] = []

        @functools.wraps(handler)  # its name is in error messages
        def perform(op: Op) -> Any:
            begun.append(op)
            return handler(op, payload)

        try:
            if delivery > self.attempts and (yield from self._bury(operation, payload, f"delivery {delivery}")):
                return Received("dead", attempt=delivery)
            answer = yield from self.guard.guarded(operation, perform, self.policy)
        except Refusal as refusal:
            if begun:  # the handler raised it
                raise
            return (yield from self._refused(operation, refusal))
        except StoreError:
            raise
        except Exception as error:
            if not begun:  # a guard that cannot lend, say: no event is to die of that
                raise
            failures = yield from self._failed(operation, self.policy.ttl)
            if failures < self.attempts or not (yield from self._bury(operation, payload, repr(error))):
                raise
            log.error("The event %r of %s has failed %d times", operation.key, operation.name, self.attempts)
            return Received("dead", attempt=self.attempts)
        if answer.how == "replayed":
            return Received("duplicate", self._value(answer.outcome), answer.attempt)
        return Received("processed", answer.value, answer.attempt)

    def _refused(self, operation: Operation, refusal: Refusal) -> Plan[Received]:
        """The result for the sender if the ledger refuses the event; raises if the sender should repeat it."""
        if isinstance(refusal, PayloadMismatch):
            log.warning("The event %r of %s came again with another payload", operation.key, operation.name)
            return Received("flagged")
        if isinstance(refusal, Duplicate | OutcomeNotKept):
            return Received("duplicate")
        record = yield from self.guard.store.find(*operation.id)
        if record is None or not is_dead(record):
            raise refusal
        return Received("dead", attempt=record.attempts)

    def _value(self, outcome: Outcome) -> Any:
        """The handler's value, or the error that is its outcome; None if it was not kept."""
        try:
            return replayed(outcome, self.policy.errors, self.policy.types)
        except self.policy.errors as error:
            return error
        except OutcomeNotKept:
            return None

    # Dead letters: held records with a note

    def _failed(self, operation: Operation, retention: float) -> Plan[int]:
        """How often it has failed: a small record's claims, for the event's own also count what was refused for its time.

        Without *retention* the count begins anew.
        """
        count = Operation(f"failed|{operation.scope}", operation.key, name="oncemore.failed")
        found = yield from self.guard.store.claim(count, lease=self.policy.lease)
        if isinstance(found, Record):  # another delivery's failure is being counted
            return found.attempts
        yield from self.guard.store.release(found, retention=retention)
        return found.attempt

    def _bury(self, operation: Operation, payload: Any, why: str) -> Plan[bool]:
        """Make the event a dead letter.  Its record keeps the payload until it is handled after all."""
        types = self.policy.types
        if self.policy.effect == "steps":  # as its next attempt reads it
            request = pack_request(msgspec.structs.replace(operation, request=lambda: payload), None, types)
        else:
            request = packed(payload, types)
        lease = yield from self.guard.store.claim(operation, lease=self.policy.lease, request=request)
        if not isinstance(lease, Lease):
            return False
        if lease.lapsed and self.policy.on_unknown != "retry" and self.policy.effect != "steps":
            yield from self.guard.lapse(lease)  # its last holder may have handled it, so it is no dead letter
            return False
        yield from self.guard.store.hold(lease, note=f"{DEAD}: {why}"[:500])
        yield from self._failed(operation, 0.0)  # one that is requeued has as many attempts as a new one
        self.guard.emit("held", operation, token=lease.token, detail=DEAD)
        return True

    def dead(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        """The dead letters of a source: one page, and the cursor of the next."""
        return only_dead(self.guard.list(where(source), limit=limit, cursor=cursor))

    async def adead(self, source: str, *, limit: int = 100, cursor: str | None = None) -> Page:
        return only_dead(await self.guard.alist(where(source), limit=limit, cursor=cursor))

    def requeue(self, event_id: str, source: str) -> Record:
        """Let a dead letter be handled when it is delivered again, under the same id."""
        return run(self._requeued(event_id, source))

    async def arequeue(self, event_id: str, source: str) -> Record:
        return await arun(self._requeued(event_id, source))

    def _requeued(self, event_id: str, source: str) -> Plan[Record]:
        scope = join("inbox", source)
        record = yield from self.guard.store.find(scope, event_id)
        if record is not None and not is_dead(record):
            raise NotResolvable(
                f"It is {record.state}, and not a dead letter; if nobody knows whether it was handled, find out, and "
                "say so with guard.resolve()"
            )
        if record is not None:  # the process that made it a dead letter may have crashed right after
            yield from self._failed(Operation(scope, event_id), 0.0)
        return (yield from self.guard.store.resolve(scope, event_id, None, retention=self.policy.ttl))


def packed(payload: Any, types: Types) -> bytes:
    """The payload as a record keeps it; nothing if it is too large, or of a kind that cannot be read back."""
    outcome = value_outcome(payload, types)
    return outcome.body if outcome.kind == "value" and len(outcome.body) <= LARGEST else b""


def is_dead(record: Record) -> bool:
    """Whether it has failed too often, rather than that nobody knows whether it was handled."""
    return record.state == "held" and record.note.startswith(DEAD)


def only_dead(page: Page) -> Page:
    return Page(tuple(filter(is_dead, page.records)), page.cursor)


def where(source: str) -> Filter:
    return Filter(state="held", scope=join("inbox", source))
