"""A request's attempt, for the integrations that are called and return a response (WSGI, Django).

The ledger is asked by plans, so that threads run them and event loops await them.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from .._contract.contract import Match
from .._ledger.decisions import Answer
from .._ledger.model import Operation, Outcome
from .._runtime.plan import Plan
from .current import CURRENT, GUARDED
from .door import Door, Request
from .etag import Etag, check_if_match
from .headers import Headers

# The same request, with the same key, is to be sent to another address: what was asked has not been done here.
ELSEWHERE = (307, 308)


class NotKept(Exception):
    """Ends an attempt without an outcome, where a stream is not to be remembered."""


class Turn:
    """One guarded request, from its claim until its outcome is durable: *begin*, then *whole*, *live* or *fail*."""

    def __init__(self, door: Door, match: Match, operation: Operation) -> None:
        self.door = door
        self.rule = match.rule
        self.operation = operation
        self.policy = door.policy(match.rule)
        self.attempt = door.guard.attempt(operation, self.policy)
        self.performed = False

    @property
    def over(self) -> bool:
        return self.attempt.ended

    def begin(self, wait: float | None) -> Plan[Answer | None]:
        """What the ledger answers; or None, and the app may perform: its lease is kept alive from here on."""
        return self.attempt.begin(wait)

    def check(self, request: Request, current_etag: Plan[Etag]) -> Plan[None]:
        """Refuse what the rule refuses before the app runs: too many new keys, or a resource that has changed."""
        yield from self.door.admit(self.rule, self.attempt.op, request)
        if self.rule.if_match:
            yield from check_if_match(request.headers, current_etag)

    @contextmanager
    def current(self, place: MutableMapping[str, Any] | None = None) -> Iterator[None]:
        """While the app's code runs, the operation is the current one; *place* is where a door within may see it."""
        self.performed = True
        if place is not None:
            place[GUARDED] = self.attempt.op
        token = CURRENT.set(self.attempt.op)
        try:
            yield
        finally:
            CURRENT.reset(token)

    def whole(self, status: int, headers: Headers, body: bytes) -> Plan[Answer]:
        """Settle a response that is there in full; when this returns, it is durable (or said not to be)."""
        outcome = self.door.outcome(self.rule, status, headers, body)
        if status in ELSEWHERE:
            yield from self.attempt.withdraw()
            return Answer(outcome, "released")
        return (yield from self.attempt.settle(outcome))

    def live(self, status: int, *, stream: bool = True) -> Plan[Answer]:
        """Before the first byte of a *stream*, or of what is too large: that it happened is settled, and no more.

        Where that is not to be remembered, the lease is kept until the response has ended, by `fail(NotKept())`; but a
        transaction is rolled back at once.
        """
        tombstone = Outcome("tombstone", status)
        if (stream and self.rule.streams == "release") or not self.attempt.keeps(tombstone):
            if self.policy.effect == "transaction":
                yield from self.attempt.release()
            return Answer(tombstone, "unstored")
        return (yield from self.attempt.settle(tombstone))

    def fail(self, error: BaseException) -> Plan[None]:
        """End the turn by *error*, once; what it means for the ledger is for the attempt to say."""
        if isinstance(error, NotKept):
            yield from self.attempt.release()
        elif self.performed:
            yield from self.attempt.fail(error)
        else:
            yield from self.attempt.withdraw(error)

    def refuses(self, error: BaseException) -> bool:
        """Whether the error is the database's refusal of a transaction that may work next time."""
        lender = self.door.guard.store.lender
        return self.policy.effect == "transaction" and lender is not None and lender.again(error)
