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
from ..core.heartbeat import Beat, LoopBeats, Perform, end
from ..core.judge import Answer, keeps
from ..core.model import Operation, Outcome
from ..core.op import Op
from ..core.plan import Effect, Ended, Plan, arun, arun_to
from ..errors import OncemoreError, PreconditionFailed
from .current import CURRENT
from .headers import value_of
from .http import Door, Request
from .problem import Response
from .turn import ELSEWHERE, NotKept, SentElsewhere, matches, never_called

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
        return await self._perform(found)

    async def _perform(self, effect: Perform) -> None:
        token = CURRENT.set(effect.op)
        self.beating, self.beats = effect.heart.on_loop(), effect.beats
        self.beating.add(self.beats)
        try:
            if self.rule.rate is not None or self.rule.if_match:
                await self._check(effect.op)
            self.performed = True
            await self.app(self._app_scope(), self._heard, self._from_app)
            if not self.settled:
                raise RuntimeError("The application ended without a complete response")
        except BaseException as error:
            if not self.settled:
                await self._throw(NotKept() if self.passing else error)
            raise
        finally:
            CURRENT.reset(token)

    def abandon(self) -> bool:
        """Whoever asked has given up, and may say other things on its channel.  True where nothing is left to be kept."""
        self.send, self.abandoned = nowhere, True
        return self.over.is_set()

    async def _check(self, op: Op) -> None:
        """What the rule asks before the app is called: the rate of new keys, and the state of the resource."""
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
        scope: MutableMapping[str, Any] = self.request.native
        extensions = scope.get("extensions")
        if extensions:
            kept = {name: value for name, value in extensions.items() if not name.startswith("http.response.")}
            scope = {**scope, "extensions": kept}
        return scope

    # What the app hears and sends

    async def _heard(self) -> Message:
        """What the client says; that it has left only at the end, or the app might not give its whole response."""
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
        try:
            self.answer = await finish(self.plan, lambda: self.plan.send(outcome))
        except OncemoreError as error:  # taken over by another, whose outcome counts: this one reaches nobody
            await respond(self.send, self.door.refused(error, self.match, self.operation))
            self.send = nowhere
        finally:
            self.over.set()

    async def _throw(self, error: BaseException) -> None:
        """End the plan by *error*, which it passes on once the ledger knows of it."""
        self._close()
        try:
            await arun_to(Perform, self.plan, lambda: self.plan.throw(error))
        except BaseException as passed:
            if passed is not error:
                raise
        finally:
            self.over.set()

    def _close(self) -> None:
        """The operation is over, though the app may not be: it may have a stream to send, or tasks to do."""
        self.settled = True
        end(self.beating.beats, self.beats)  # a renewal after this would be refused, and look like a loss

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


async def finish(plan: Plan[Answer], resume: Callable[[], Effect[Any]]) -> Answer:
    """The plan's end.  Cancelled on the way, a task of its own goes on from there: the outcome is known, and is kept."""
    try:
        effect = resume()
        while True:
            try:
                result = await effect.arun()
            except asyncio.CancelledError:
                with suppress(OncemoreError):  # the same effect again: every verb may safely be sent twice
                    await asyncio.shield(lasting(finish(plan, lambda: effect)))  # noqa: B023 (this loop is over)
                raise
            except Exception as error:
                effect = plan.throw(error)
            else:
                effect = plan.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


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
