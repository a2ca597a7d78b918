"""One guarded request: what the app sends is kept back until its outcome is durable, then goes to the client.

The guard's plan is driven from here in two halves.  The first, up to the effect, runs before the app is called; the
second runs inside the app's own last `send`, so that background tasks start only after the outcome is settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any

from ..core.contract import Match
from ..core.heartbeat import Beat, LoopBeats, Perform
from ..core.judge import Answer, keeps
from ..core.model import Operation, Outcome
from ..core.op import Op
from ..core.plan import Effect, Ended, Plan, arun, arun_to
from ..errors import OncemoreError, PreconditionFailed, StoreError
from .current import CURRENT
from .headers import value_of
from .http import Door, Request
from .problem import Response
from .turn import ELSEWHERE, NotKept, RunAgain, SentElsewhere, matches, never_called

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Exchange:
    """The app's messages on one side, the client's on the other, and the guard's plan between them."""

    def __init__(
        self,
        door: Door,
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
        self.performed = False
        self.settled = False
        self.passing = False  # a stream, or too large: each message goes straight to the client
        self.over = asyncio.Event()  # set when the client's leaving can no longer change what is kept
        self.abandoned = False
        self.farewell: Message | None = None
        self.start: Message = {}
        self.headers: list[tuple[str, str]] = []
        self.chunks: list[bytes] = []
        self.size = 0
        self.answer: Answer | None = None
        self.transacted = door.policy(match.rule).effect == "transaction"
        self.untouched: dict[str, Any] = {}  # the scope as it was, before the app wrote into it
        self.again: Perform | None = None  # the database refused the transaction, and the app must perform once more
        self.reruns = 0
        self.retell = False
        self.failure: Outcome | None = None  # a 5xx that may yet turn out to be the database's refusal
        self.failure_body = b""
        self.plan: Plan[Answer]
        self.beating: LoopBeats
        self.beats: tuple[Beat, ...]

    async def run(self, wait: float | None) -> None:
        """Claim, let the app perform, settle, answer; or answer from the ledger."""
        policy = self.door.policy(self.rule)
        self.plan = self.door.guard.guarded(self.operation, never_called, policy, wait)
        found = await arun_to(Perform, self.plan, lambda: next(self.plan))
        if isinstance(found, Ended):
            return await respond(self.send, self.door.replayed(self.rule, found.value))
        self.untouched = dict(self.request.native) if self.transacted else {}
        performing: Perform | None = found
        while performing is not None:
            performing = await self._perform(performing)
        return None

    async def _perform(self, effect: Perform) -> Perform | None:
        """Have the app perform; what it is to perform again, where the database refused the whole transaction."""
        token = CURRENT.set(effect.op)
        self.beating, self.beats = effect.heart.on_loop(), effect.beats
        self.beating.add(self.beats)
        try:
            if self.rule.rate is not None or self.rule.if_match:
                await self._check(effect.op)
            self.performed = True
            await self.app(self._app_scope(), self._heard, self._from_app)
            if self.failure is not None:
                await self._settle(self.failure)
                await self._send_whole(self.failure_body)
            if not self.settled and self.again is None:
                raise RuntimeError("The application ended without a complete response")
        except BaseException as error:
            try:
                if not self.settled and self.again is None:
                    await self._throw(NotKept() if self.passing else error)
            except StoreError as given_up:
                await respond(self.send, self.door.refused(given_up, self.match, self.operation))
                return None
            if self.again is None:
                if self.failure is not None and self.answer is None:
                    self.answer = Answer(self.failure, "released")
                    await self._send_whole(self.failure_body)
                raise
        finally:
            CURRENT.reset(token)
        return self._afresh()

    def _afresh(self) -> Perform | None:
        """What is to be performed again, with the same request, and a response of which nothing is left."""
        again, self.again = self.again, None
        if again is not None:
            self.performed, self.retell, self.reruns = False, True, self.reruns + 1
            self.start, self.headers, self.chunks, self.size = {}, [], [], 0
            self.failure, self.failure_body = None, b""
        return again

    def abandon(self) -> bool:
        """Whoever asked has given up, and may say other things on its channel.  True where nothing is left to be kept."""
        self.send, self.abandoned = nowhere, True
        return self.over.is_set()

    async def _check(self, op: Op) -> None:
        """What the rule asks before the app is called: the rate of new keys, and the state of the resource."""
        if not self.reruns:
            await arun(self.door.admit(self.rule, op, self.request))
        if self.rule.if_match and not matches(value_of(self.request.headers, "if-match"), *await self._look()):
            raise PreconditionFailed("The resource has changed since; read it again, and send its new ETag")

    async def _look(self) -> tuple[int, str]:
        """The resource's status and ETag now, from the app's own answer to a GET."""
        found: dict[Any, Any] = {}
        asked: list[bool] = []

        async def receive() -> Message:
            if asked:  # someone listens for the client to leave, which it does not
                await asyncio.Event().wait()
            asked.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                found.update(
                    {name.lower(): value for name, value in message.get("headers", ())}, status=message["status"]
                )

        scope = {**self.request.native, "method": "GET"}
        scope["headers"] = [
            (n, v) for n, v in scope["headers"] if n not in (b"content-length", b"content-type", b"if-match")
        ]
        await self.app(scope, receive, send)
        return found.get("status", 500), found.get(b"etag", b"").decode("latin-1")

    def _app_scope(self) -> MutableMapping[str, Any]:
        """The scope without those extensions by which a response would go around us."""
        scope: MutableMapping[str, Any] = dict(self.untouched) if self.reruns else self.request.native
        extensions = scope.get("extensions")
        if extensions:
            kept = {name: value for name, value in extensions.items() if not name.startswith("http.response.")}
            scope = {**scope, "extensions": kept}
        return scope

    # What the app hears and sends

    async def _heard(self) -> Message:
        """What the client says; that it has left only at the end, or the app might not give its whole response."""
        if self.retell:
            self.retell = False
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        message = self.farewell or await self.receive()
        if message["type"] == "http.disconnect":
            self.farewell = message
            await self.over.wait()
        return message

    async def _from_app(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            self.headers = [
                (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in message.get("headers", ())
            ]
            if self.settled:  # cut off while it was being settled; what the app says instead is not the outcome
                await self._start_passing()
        elif message["type"] == "http.response.body":
            await self._body(message.get("body", b""), more=message.get("more_body", False))
        else:
            await self.send(message)

    async def _body(self, chunk: bytes, *, more: bool) -> None:
        if self.passing:
            await self._pass(chunk, more=more)
            return
        self.chunks.append(chunk)
        self.size += len(chunk)
        if not more:
            body = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
            outcome = self.door.outcome(self.rule, self.start["status"], self.headers, body)
            if (
                self.start["status"] in ELSEWHERE
            ):  # the same request, with the same key, is about to come by another path
                await self._throw(SentElsewhere())
                self.answer = Answer(outcome, "released")
            elif self.transacted and self.start["status"] >= 500:
                self.failure, self.failure_body = outcome, body  # the app may raise what led to it in a moment
                return
            else:
                await self._settle(outcome)
            await self._send_whole(body)
        elif not self._can_wait():
            await self._begin_passing()

    def _can_wait(self) -> bool:
        """Whether the response may be held back until it is whole: its length is known, or the rule buffers streams."""
        length = value_of(self.headers, "content-length")
        if length.isdecimal():
            return int(length) <= self.rule.max_response and self.size <= self.rule.max_response
        return self.rule.streams == "store" and self.size <= self.rule.max_response

    async def _begin_passing(self) -> None:
        """From here on, chunk by chunk.  That it happened is settled first; how it ended cannot be replayed."""
        tombstone = Outcome("tombstone", self.start["status"])
        if self.rule.streams != "release" and keeps(self.door.policy(self.rule), tombstone):
            await self._settle(tombstone)
        elif self.transacted:
            await self._throw(NotKept())  # rolled back before the client hears a word
        body, self.chunks = b"".join(self.chunks), []
        self.over.set()
        await self._start_passing()
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

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
        found: Answer | Perform | None = None
        try:
            found = await finish(self.plan, lambda: self.plan.send(outcome), lasts=not self.transacted)
        except OncemoreError as error:  # taken over by another, whose outcome counts: this one reaches nobody
            await respond(self.send, self.door.refused(error, self.match, self.operation))
            self.send = nowhere
        finally:
            if not isinstance(found, Perform):
                self.over.set()
        if isinstance(found, Perform):
            self.again, self.settled = found, False
            raise RunAgain
        self.answer = found

    async def _throw(self, error: BaseException) -> None:
        """End the plan by *error*, which it passes on once the ledger knows of it."""
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
                self.over.set()

    def _close(self) -> None:
        """The operation is over, though the app may not be: it may have a stream to send, or tasks to do."""
        self.settled = True
        self.beating.beats.difference_update(self.beats)  # a renewal after this would be refused, and look like a loss

    # What the client gets

    async def _send_whole(self, body: bytes) -> None:
        if self.answer is None:
            return
        if self.answer.how == "replayed":  # a late owner: what counts is what the other one settled
            await respond(self.send, self.door.replayed(self.rule, self.answer))
            return
        await self.send(self._start(self.door.headers(self.rule, self.answer)))
        await self.send({"type": "http.response.body", "body": body})

    def _start(self, added: list[tuple[str, str]]) -> Message:
        """The app's own start of the response, with ours added; the first client gets all of its headers."""
        extra = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in added if name and value]
        return {**self.start, "headers": [*self.start.get("headers", ()), *extra]}


async def nowhere(message: Message) -> None:
    """A send for an app whose client has had its answer."""


async def finish(plan: Plan[Answer], resume: Callable[[], Effect[Any]], *, lasts: bool = True) -> Answer | Perform:
    """The plan's end, or what is to be performed once more.

    Cancelled on the way, a task of its own goes on from there: the outcome is known, and is kept.  Unless nothing *lasts*
    of what was done without it, as in a transaction: that is rolled back.
    """
    try:
        effect = resume()
        while not isinstance(effect, Perform):
            try:
                result = await effect.arun()
            except asyncio.CancelledError as error:
                if not lasts:
                    effect = plan.throw(error)
                    continue
                with suppress(OncemoreError):  # the same effect again: every verb may safely be sent twice
                    await asyncio.shield(lasting(finish(plan, lambda: effect)))  # noqa: B023 (this loop is over)
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


async def respond(send: Send, response: Response) -> None:
    """Send a whole response."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    if response.status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(response.body)))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
