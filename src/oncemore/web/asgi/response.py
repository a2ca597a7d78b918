"""One guarded request: what the app sends is kept back until its outcome is durable, then goes to the client.

The guard's plan is driven from here in two halves.  The first, up to the effect, runs before the app is called; the
second runs inside the app's own last `send`, so that background tasks start only after the outcome is settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, cast

from ..._contract.contract import Match
from ..._ledger.context import Op
from ..._ledger.decisions import Answer, keeps
from ..._ledger.heartbeat import Beat, LoopBeats, Perform, end, tried
from ..._ledger.model import Operation, Outcome
from ..._runtime.plan import Effect, Ended, Plan, arun, arun_to
from ...errors import OncemoreError, PreconditionFailed
from ..door import Door, wait_of
from ..problem import Response
from ..request import CURRENT, GUARDED, Request, value_of
from ..turn import ELSEWHERE, NotKept, SentElsewhere, matches, never_called
from .look import look

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("oncemore.web")


class Exchange:
    """The app's messages on one side, the client's on the other, and the guard's plan between them."""

    begun = False  # the task that performs is under way
    admitted = False
    performed = False
    settled = False
    passing = False  # a stream, or too large: each message goes straight to the client
    over = False  # the client's leaving can no longer change what is kept
    abandoned = False
    told = False  # the app has been told of the request's body
    farewell: Message | None = None
    answer: Answer | None = None
    size = 0
    _leaving: asyncio.Event | None = None  # set when it is over, where the app waits for that

    def __init__(
        self,
        door: Door[Any],
        app: Callable[[Any, Any, Any], Awaitable[None]],
        match: Match,
        operation: Operation,
        request: Request,
        receive: Receive,
        send: Send,
    ) -> None:
        self.door = door
        self.app = app
        self.match = match
        self.rule = match.rule
        self.operation = operation
        self.request = request
        self.receive = receive
        self.send = send
        self.start: Message = {}
        self.chunks: list[bytes] = []
        self.plan: Plan[Answer]
        self.beating: LoopBeats
        self.beats: tuple[Beat, ...]

    async def run(self) -> None:
        """Claim, let the app perform, settle, answer; or answer from the ledger."""
        wait = wait_of(self.request.headers)
        plan = self.plan = self.door.guard.guarded(self.operation, never_called, self.door.policy(self.rule), wait)
        try:
            effect = next(plan)
            if not isinstance(effect, Perform):  # it is the claim; whoever gives up before its answer has none
                try:
                    answer = await effect.arun()
                except BaseException as error:
                    effect = plan.throw(error)
                else:
                    effect = plan.send(answer)
        except StopIteration as end:
            return await respond(self.send, self.door.replay(end.value, self.rule))
        # From here on the outcome is to be kept, also when the server or an outer middleware gives up on the client.  In a
        # task from the start: what the app begins there (a timeout, a task group) could not be carried over to one later.
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()  # as asyncio.shield does, with less ado
        task = loop.create_task(self._go_on(effect))
        TASKS.add(task)
        task.add_done_callback(partial(ended, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            await self._abandon(task, effect)
            raise
        return task.result()

    async def _abandon(self, task: asyncio.Task[None], effect: Effect[Any]) -> None:
        """Whoever asked has given up, and may say other things on its channel; what has begun goes on without it."""
        self.send, self.abandoned = nowhere, True
        if self.over or not self.begun:  # nothing is left to be kept, or nothing has happened yet
            task.cancel()
        task.add_done_callback(self._report)
        if not self.begun:
            error = SentElsewhere() if isinstance(effect, Perform) else asyncio.CancelledError()
            with suppress(SentElsewhere, asyncio.CancelledError):
                await arun_to(Perform, self.plan, lambda: self.plan.throw(error))

    def _report(self, task: asyncio.Task[None]) -> None:
        """Tell of a failure after everyone who would have heard of it had left; a refusal is none."""
        error = None if task.cancelled() else task.exception()
        if error is not None and (self.performed or not isinstance(error, OncemoreError)):
            log.error("A guarded request failed after it was abandoned", exc_info=error)

    async def _go_on(self, effect: Effect[Any]) -> None:
        """Perform, when it is our turn; until then the guard may have to wait, or to look twice."""
        self.begun = True
        if not isinstance(effect, Perform):
            found = await arun_to(Perform, self.plan, lambda: effect)
            if isinstance(found, Ended):
                return await respond(self.send, self.door.replay(found.value, self.rule))
            effect = found
        return await self._perform(effect)

    async def _perform(self, effect: Perform) -> None:
        """Have the app perform, while the lease is kept alive."""
        CURRENT.set(effect.op)  # in this task, and those that it starts
        self.beating, self.beats = effect.heart.on_loop(), effect.beats
        self.beating.add(self.beats)
        try:
            await self._call(effect.op)
        except BaseException as error:
            if not self.settled:
                if self.performed:
                    tried(self.beats)
                await self._throw(NotKept() if self.passing else error)
            raise

    async def _call(self, op: Op) -> None:
        """Let the app have the request; when this returns, its response was whole."""
        if self.rule.rate is not None or self.rule.if_match:
            await self._check(op)
        self.performed = True
        scope = self.request.native
        scope[GUARDED] = op
        if scope.get("extensions"):
            scope["extensions"] = without_ways_around(scope["extensions"])
        await self.app(scope, self._heard, self._from_app)
        await self._returned()

    async def _returned(self) -> None:
        """The app has returned, and must have said all."""
        if not self.settled:
            raise RuntimeError("The application ended without a complete response")

    async def _check(self, op: Op) -> None:
        """What the rule asks before the app is called: the rate of new keys, and the state of the resource."""
        if not self.admitted:
            await arun(self.door.admit(self.rule, op, self.request))
            self.admitted = True
        if not self.rule.if_match:
            return
        wanted = value_of(self.request.headers, "if-match")
        if not matches(wanted, *await look(self.app, self.request.native)):
            raise PreconditionFailed("The resource has changed since; read it again, and send its new ETag")

    # What the app hears and sends

    async def _heard(self) -> Message:
        """The body, and then what the client says; that it has left only at the end, or the app might not finish."""
        if not self.told:
            self.told = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        message = self.farewell or await self.receive()
        if message["type"] == "http.disconnect":
            self.farewell = message
            if not self.over:
                self._leaving = self._leaving or asyncio.Event()
                await self._leaving.wait()
        return message

    async def _from_app(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            chunk, more = bytes(message.get("body", b"")), message.get("more_body", False)  # some send a memoryview
            if self.passing:
                await self._pass(chunk, more=more)
            elif more or self.chunks:
                await self._piece(chunk, more=more)
            else:
                await self._whole(chunk)
        elif kind == "http.response.start":
            # What was held is of the response that this one replaces.
            self.start, self.chunks, self.size = message, [], 0
            if (
                self.settled or self.passing
            ):  # cut off while it was settled, or sent: what is said instead is no outcome
                await self._start_passing()
        else:
            await self.send(message)

    async def _piece(self, chunk: bytes, *, more: bool) -> None:
        self.chunks.append(chunk)
        self.size += len(chunk)
        if not more:
            await self._whole(b"".join(self.chunks))
        elif not self._can_wait():
            await self._begin_passing()

    async def _whole(self, body: bytes) -> None:
        """Settle, and send.  What the client gets is the app's own response, with all of its headers."""
        start = self.start
        outcome = self.door.outcome(self.rule, start["status"], decoded(start), body)
        if start["status"] in ELSEWHERE:  # the same request, with the same key, is about to come by another path
            await self._throw(SentElsewhere())
            self.answer = Answer(outcome, "released")
        else:
            await self._settle(outcome)
        await self._answer(body)

    async def _answer(self, body: bytes) -> None:
        """Send the app's own response, now that its outcome is known; or what counts instead."""
        if self.answer is None:
            return
        if self.answer.how == "replayed":  # a late owner: what counts is what the other one settled
            await respond(self.send, self.door.replay(self.answer, self.rule))
            return
        await self.send(self._start(self.door.headers(self.rule, self.answer)))
        await self.send({"type": "http.response.body", "body": body})

    def _can_wait(self) -> bool:
        """Whether the response may be held back until it is whole: its length is known, or the rule buffers streams."""
        length = value_of(decoded(self.start), "content-length")
        if length.isdecimal():
            return int(length) <= self.rule.max_response and self.size <= self.rule.max_response
        return self.rule.streams == "store" and self.size <= self.rule.max_response

    async def _begin_passing(self) -> None:
        """From here on, chunk by chunk.  That it happened is settled first; how it ended cannot be replayed."""
        tombstone = Outcome("tombstone", self.start["status"])
        if self.rule.streams != "release" and keeps(self.door.policy(self.rule), tombstone):
            await self._settle(tombstone)
        else:
            await self._stay_unsettled()
        body, self.chunks = b"".join(self.chunks), []
        self._end()
        if self.answer is not None and self.answer.how == "replayed":  # a late owner, as in _answer
            await respond(self.send, self.door.replay(self.answer, self.rule))
            self.send = nowhere
        await self._start_passing()
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def _stay_unsettled(self) -> None:
        """A stream that is not to be remembered keeps its lease until it ends."""

    async def _start_passing(self) -> None:
        if self.abandoned:
            raise OSError("Nobody is left to stream to")
        self.passing = True
        await self.send(self._start([(self.rule.status_header.name, self.rule.status_header.unstored)]))

    async def _pass(self, chunk: bytes, *, more: bool) -> None:
        if not more and not self.settled:
            await self._throw(NotKept())
        await self.send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def _settle(self, outcome: Outcome) -> None:
        """Drive the plan to its end: when this returns, the outcome is durable (or said not to be)."""
        self._close()
        try:
            self.answer = cast("Answer", await finish(self.plan, self.plan.send(outcome)))
        except StopIteration as end:  # a store that answers at once
            self.answer = end.value
        except OncemoreError as error:  # taken over by another, whose outcome counts: this one reaches nobody
            await respond(self.send, self.door.refusal(error, self.match, self.operation))
            self.send = nowhere
        finally:
            self._end()

    async def _throw(self, error: BaseException) -> None:
        """End the plan by *error*, which it passes on once the ledger knows of it."""
        self._close()
        try:
            await arun_to(Perform, self.plan, lambda: self.plan.throw(error))
        except BaseException as passed:
            if passed is not error:
                raise
        finally:
            self._end()

    def _close(self) -> None:
        """The operation is over, though the app may not be: it may have a stream to send, or tasks to do."""
        self.settled = True
        end(self.beating.beats, self.beats)  # a renewal after this would be refused, and look like a loss

    def _end(self) -> None:
        """Nothing is left to be kept: the app may hear that its client has left."""
        self.over = True
        if self._leaving is not None:
            self._leaving.set()

    def _start(self, added: list[tuple[str, str]]) -> Message:
        """The app's own start of the response, with ours added."""
        return {**self.start, "headers": [*self.start.get("headers", ()), *encoded(tuple(added))]}


def without_ways_around(extensions: Mapping[str, Any]) -> dict[str, Any]:
    """The server's extensions but for those by which a response would go around us."""
    return {name: value for name, value in extensions.items() if not name.startswith("http.response.")}


def decoded(start: Message) -> list[tuple[str, str]]:
    """The headers that the app's response starts with."""
    return [(str(name, "latin-1").lower(), str(value, "latin-1")) for name, value in start.get("headers", ())]


@lru_cache(maxsize=1024)
def encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    """Headers of ours; within a second, they are the same for all responses of a rule."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers if name and value]


async def nowhere(message: Message) -> None:
    """A send for an app whose client has had its answer."""


async def finish(plan: Plan[Answer], effect: Effect[Any], *, lasts: bool = True) -> Answer | Perform:
    """The plan's end, or what is to be performed once more.

    Cancelled on the way, a task of its own goes on from there: the outcome is known, and is kept.  Unless nothing *lasts*
    of what was done without it, as in a transaction: that is rolled back.
    """
    try:
        while not isinstance(effect, Perform):
            try:
                result = await effect.arun()
            except asyncio.CancelledError as error:
                if not lasts:
                    effect = plan.throw(error)
                    continue
                with suppress(OncemoreError):  # the same effect again: every verb may safely be sent twice
                    await asyncio.shield(lasting(finish(plan, effect)))
                raise
            except Exception as error:
                effect = plan.throw(error)
            else:
                effect = plan.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return effect


TASKS: set[asyncio.Task[Any]] = set()  # the loop's own references to them are weak


def lasting(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that lives until it is done, also when whoever waits for it gives up."""
    task = asyncio.get_running_loop().create_task(coroutine)
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)
    return task


def ended(waiter: asyncio.Future[None], task: asyncio.Task[None]) -> None:
    TASKS.discard(task)
    if not waiter.done():
        waiter.set_result(None)


async def respond(send: Send, response: Response) -> None:
    """Send a whole response."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    if response.status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(response.body)))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
