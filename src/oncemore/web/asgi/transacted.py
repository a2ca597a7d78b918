"""A guarded request whose effect commits with its outcome: what the database refuses, the app performs once more.

With the same request, and a response of which nothing is left.  A 5xx waits until the app has returned: some frameworks
make an error page first and raise what led to it afterwards, which may be the database's refusal.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

from ..._ledger.decisions import Answer
from ..._ledger.heartbeat import Perform
from ..._ledger.model import Outcome
from ..._runtime.plan import arun_to
from ...errors import OncemoreError, StoreError
from ..request import CURRENT
from ..turn import NotKept, RunAgain
from .response import Exchange, Message, decoded, finish, nowhere, respond


class Transacted(Exchange):
    """An exchange with a transaction around the app."""

    again: Perform | None = None  # what is to be performed once more
    failure: tuple[Outcome, bytes] | None = None  # a 5xx that may yet turn out to be the database's refusal

    async def _perform(self, effect: Perform) -> None:
        untouched = Untouched(self.request.native)
        performing: Perform | None = effect
        while performing is not None:
            CURRENT.set(performing.op)
            self.beating, self.beats = performing.heart.on_loop(), performing.beats
            try:
                await self._call(performing.op)
            except BaseException as error:
                if not await self._was_refused(error):
                    raise
            performing, self.again = self.again, None
            if performing is not None:
                untouched.restore()
                self.performed = self.told = False
                self.start, self.chunks, self.size, self.failure = {}, [], 0, None

    async def _was_refused(self, error: BaseException) -> bool:
        """Whether *error* was the database's, and not the app's own: it is performed again, or the client is told."""
        if not self.settled and self.again is None:
            try:
                await self._throw(NotKept() if self.passing else error)
            except StoreError as given_up:
                await respond(self.send, self.door.refusal(given_up, self.match, self.operation))
                return True
        if self.again is None and self.failure is not None and self.answer is None:
            outcome, body = self.failure
            self.answer = Answer(outcome, "released")
            await self._answer(body)
        return self.again is not None

    async def _from_app(self, message: Message) -> None:
        if self.again is None:  # else the app has not let RunAgain out, and what it says now is of no run
            await super()._from_app(message)

    async def _whole(self, body: bytes) -> None:
        if self.start["status"] < 500:
            return await super()._whole(body)
        self.failure = (self.door.outcome(self.rule, self.start["status"], decoded(self.start), body), body)
        return None

    async def _returned(self) -> None:
        if self.failure is not None:
            outcome, body = self.failure
            await self._settle(outcome)
            await self._answer(body)
        elif self.again is None:
            await super()._returned()

    async def _stay_unsettled(self) -> None:
        await self._throw(NotKept())  # rolled back before the client hears a word

    async def _settle(self, outcome: Outcome) -> None:
        self._close()
        found: Answer | Perform | None = None
        try:
            found = await finish(self.plan, self.plan.send(outcome), lasts=False)
        except OncemoreError as error:
            await respond(self.send, self.door.refusal(error, self.match, self.operation))
            self.send = nowhere
        finally:
            if not isinstance(found, Perform):
                self._end()
        if isinstance(found, Perform):
            self.again, self.settled = found, False
            raise RunAgain
        self.answer = found

    async def _throw(self, error: BaseException) -> None:
        self._close()
        try:
            found = await arun_to(Perform, self.plan, lambda: self.plan.throw(error))
            if isinstance(found, Perform):  # it was the database's refusal
                self.again, self.settled = found, False
        except BaseException as passed:
            if passed is not error:
                raise
        finally:
            if self.again is None:
                self._end()


class Untouched:
    """A scope as it was before the app wrote into it, with its session and state, which outer middleware keeps there."""

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self.scope = scope
        self.said = dict(scope)
        self.session = held_by(scope.get("session"))
        self.state = dict(scope.get("state") or {})

    def restore(self) -> None:
        self.scope.clear()
        self.scope.update(self.said)
        for name, before in (("session", held_by(self.session)), ("state", self.state)):
            there = self.scope.get(name)
            if isinstance(there, MutableMapping):
                there.clear()
                there.update(before)


def held_by(session: Any) -> dict[str, Any]:
    """A copy of what is in the session: as deep as there is one, for it may hold anything, and need be no dictionary."""
    found = dict(session) if isinstance(session, MutableMapping) else {}
    try:
        return copy.deepcopy(found)
    except Exception:
        return found
