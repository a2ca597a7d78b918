"""A request's turn: the guard's plan in two halves, with the app's own work between them.

For the doors that are called and return a response (WSGI, Django).  What asks the ledger is a plan, so that threads run it
and event loops await it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from .._contract.contract import Match
from .._ledger.decisions import Answer, keeps
from .._ledger.heartbeat import Heartbeat, LoopBeats, Perform, ThreadBeats, end, tried
from .._ledger.model import Operation, Outcome
from .._runtime.plan import Effect, Ended, Plan, arun_to, run_to
from ..errors import OncemoreError, Refusal, StoreUnavailable
from .door import Door
from .etag import Etag, check_if_match, matches
from .request import CURRENT, GUARDED, Headers, Request

# The same request, with the same key, is to be sent to another address: what was asked has not been done here.
ELSEWHERE = (307, 308)


__all__ = ["ELSEWHERE", "NotKept", "RunAgain", "SentElsewhere", "Turn", "matches", "never_called"]


class NotKept(Exception):
    """Thrown into the plan to have the lease released, where a stream is not to be remembered."""


class SentElsewhere(Refusal):
    """Thrown into the plan to have the key forgotten, where the app redirects the whole request."""


class RunAgain(BaseException):
    """Raised through the app where the database has refused its transaction: it is to perform once more, afresh.

    Not an Exception, for it is none of the app's business: nobody should report it, or answer with an error page.
    """


class Half:
    """The effect of driving a plan up to where the app performs, or to its end."""

    __slots__ = ("plan", "resume")

    def __init__(self, plan: Plan[Answer], resume: Callable[[], Effect[Any]]) -> None:
        self.plan = plan
        self.resume = resume

    def run(self) -> Perform | Ended[Answer]:
        return run_to(Perform, self.plan, self.resume)

    def arun(self) -> Awaitable[Perform | Ended[Answer]]:
        return arun_to(Perform, self.plan, self.resume)


class Beats:
    """The effect of finding the beats of this thread's kind, or of this loop."""

    __slots__ = ("heart",)

    def __init__(self, heart: Heartbeat) -> None:
        self.heart = heart

    def run(self) -> ThreadBeats:
        return self.heart.threads

    async def arun(self) -> LoopBeats:
        return self.heart.on_loop()


class Turn:
    """One guarded request, from its claim until its outcome is durable: *begin*, then *whole*, *live* or *fail*."""

    def __init__(self, door: Door[Any], match: Match, operation: Operation) -> None:
        self.door = door
        self.rule = match.rule
        self.operation = operation
        self.policy = door.policy(match.rule)
        self.over = False
        self.performed = False
        self._plan: Plan[Answer]
        self._effect: Perform
        self._beats: ThreadBeats | LoopBeats

    def begin(self, wait: float | None) -> Plan[Answer | None]:
        """What the ledger answers; or None, and the app may perform: its lease is kept alive from here on."""
        self._plan = self.door.guard.guarded(self.operation, never_called, self.policy, wait)
        found = yield Half(self._plan, lambda: next(self._plan))
        if isinstance(found, Ended):
            return found.value  # type: ignore[no-any-return]
        self._effect = found
        self._beats = yield Beats(found.heart)
        self._beats.add(found.beats)
        return None

    def check(self, request: Request, current_etag: Plan[Etag]) -> Plan[None]:
        """Refuse what the rule refuses before the app runs: too many new keys, or a resource that has changed."""
        yield from self.door.admit(self.rule, self._effect.op, request)
        if self.rule.if_match:
            yield from check_if_match(request.headers, current_etag)

    @contextmanager
    def current(self, place: MutableMapping[str, Any] | None = None) -> Iterator[None]:
        """While the app's code runs, the operation is the current one; *place* is where a door within may see it."""
        self.performed = True
        if place is not None:
            place[GUARDED] = self._effect.op
        token = CURRENT.set(self._effect.op)
        try:
            yield
        finally:
            CURRENT.reset(token)

    def whole(self, status: int, headers: Headers, body: bytes) -> Plan[Answer]:
        """Settle a response that is there in full; when this returns, it is durable (or said not to be)."""
        outcome = self.door.outcome(self.rule, status, headers, body)
        if status in ELSEWHERE:
            yield from self.fail(SentElsewhere())
            return Answer(outcome, "released")
        return (yield from self._settle(outcome))

    def live(self, status: int, *, stream: bool = True) -> Plan[Answer]:
        """Before the first byte of a *stream*, or of what is too large: that it happened is settled, and no more.

        Where that is not to be remembered, the lease is kept until the response has ended, by `fail(NotKept())`; but a
        transaction is rolled back at once.
        """
        tombstone = Outcome("tombstone", status)
        if (stream and self.rule.streams == "release") or not keeps(self.policy, tombstone):
            if self.policy.effect == "transaction":
                yield from self.fail(NotKept())
            return Answer(tombstone, "unstored")
        return (yield from self._settle(tombstone))

    def fail(self, error: BaseException) -> Plan[None]:
        """End the turn by *error*, once; what it means for the ledger is for the guard to say.

        Raises StoreUnavailable if *error* is the database's refusal of the app's transaction: the app is not run again,
        the key is released, and the caller's retry is safe.
        """
        if self.over:
            return
        if self.performed and not isinstance(error, SentElsewhere):
            tried(self._effect.beats)
        self._end()
        if self.refuses(error):
            yield from self._give_up(str(error))
        try:
            yield Half(self._plan, lambda: self._plan.throw(error))
        except BaseException as passed:
            if passed is not error:
                raise

    def refuses(self, error: BaseException) -> bool:
        """Whether the error is the database's refusal of a transaction that may work next time."""
        lender = self.door.guard.store.lender
        return self.policy.effect == "transaction" and lender is not None and lender.again(error)

    def _settle(self, outcome: Outcome) -> Plan[Answer]:
        self._end()
        found = yield Half(self._plan, lambda: self._plan.send(outcome))
        if isinstance(found, Perform):  # the database refused the commit, and the plan asks for a second run
            yield from self._give_up("at its commit")
        return found.value  # type: ignore[no-any-return]

    def _give_up(self, why: str) -> Plan[None]:
        """End the plan by a StoreUnavailable, which this raises.  It has no cause: that would count as a refusal itself."""
        error = StoreUnavailable(f"The database refused the transaction ({why}); retry", retry_after=1.0)
        yield Half(self._plan, lambda: self._plan.throw(error))

    def _end(self) -> None:
        self.over = True
        end(self._beats.beats, self._effect.beats)


def never_called(op: object) -> None:
    raise OncemoreError("The app performs, not the plan")
