"""One guarded response: the app's messages are held back until its outcome is recorded, then sent to the client.

The outcome is recorded inside the app's own last `send`, so that background tasks start only after it is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ..._ledger.context import CURRENT
from ..._ledger.decisions import Answer
from ..._ledger.model import Outcome
from ..._runtime.loops import keep_task
from ..._runtime.plan import Effect, Plan, arun
from ...errors import OncemoreError, StoreError
from ..door import Exchange, unkept
from ..problem import Response
from ..request import GUARDED, Request, value_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("oncemore.web")

ABANDONED: set[asyncio.Task[None]] = set()  # tasks that no caller waits for: the loop's own references are weak


class TransactionLost(BaseException):
    """Raised through the app after its transaction was refused, so that its background tasks do not run.

    Not an Exception, because the app is not to report it, nor to answer with an error page: the client has its answer.
    """


class GuardedResponse:
    """Calls the app for an attempt that has begun, and records the attempt's end.

    A response is held back if its length is known, or the rule stores streams; it is sent when its outcome is durable.  A
    stream is passed on live, after a tombstone was settled for it; a stream that the rule does not keep holds its lease until
    it ends.  The app hears that its client has left only after the outcome is recorded, because it might give up.
    """

    begun = False  # the app's task has made its first step
    passing = False  # a stream, or too large: each message goes straight to the client
    over = False  # the client's leaving can no longer change what is recorded
    is_refused = False  # the database refused the app's transaction at its commit
    abandoned = False  # nobody waits for the response any more
    body_received = False
    disconnected: Message | None = None
    answer: Answer | None = None
    failure: tuple[Outcome, bytes] | None = None  # see _send_failure
    size = 0
    _left: asyncio.Event | None = None  # set when `over` is, if the app waits for it

    def __init__(self, exchange: Exchange, request: Request, receive: Receive, send: Send) -> None:
        self.exchange = exchange
        self.rule = exchange.rule
        self.attempt = exchange.attempt
        self.request = request
        self.client_receive = receive
        self.client_send = send
        self.start: Message = {}
        self.chunks: list[bytes] = []

    async def run(self, app: App) -> None:
        """Call the app, and return when its response is complete.  Runs in a task of its own: see `finish`."""
        self.begun = True
        scope = self.request.native
        scope[GUARDED] = self.attempt.op
        CURRENT.set(self.attempt.op)  # in this task, and those that it starts
        try:
            if extensions := scope.get("extensions"):  # without those by which a response would go around us
                kept = {name: value for name, value in extensions.items() if not name.startswith("http.response.")}
                scope["extensions"] = kept
            await app(scope, self.receive, self.send)
            if self.failure is not None:
                await self._send_failure(record=True)
            elif not self.attempt.ended:
                raise RuntimeError("The application ended without a complete response")
        except BaseException as error:
            if self.is_refused and not isinstance(error, asyncio.CancelledError):
                return  # also if a task group has wrapped TransactionLost
            if self.attempt.ended or not await self._fail(error):
                raise

    async def _fail(self, error: BaseException) -> bool:
        """Record that the app has failed; True if the client was told of it, and the error need not be raised."""
        try:
            is_doubtful, effect = self.attempt.doubts(None, error), self.attempt.policy.effect
            if self.failure is not None and effect != "transaction" and not is_doubtful:  # the page is the outcome
                await self._send_failure(record=True)
                return False
            if self.passing and not is_doubtful:
                await arun(self.attempt.release())
            else:
                await arun(self.attempt.fail(error))
        except StoreError as refused:  # the database refused the transaction: its retry is safe
            await respond(self.client_send, self.exchange.refusal(refused))
            return True
        finally:
            self._end()
        if self.failure is not None:
            await self._send_failure(record=False)
        return False

    # The app's receive and send

    async def receive(self) -> Message:
        """The body, and then what the client says.  That it has left is told at the end, or the app might not finish."""
        if not self.body_received:
            self.body_received = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        message = self.disconnected or await self.client_receive()
        if message["type"] == "http.disconnect":
            self.disconnected = message
            if not self.over:
                self._left = self._left or asyncio.Event()
                await self._left.wait()
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            chunk, more = bytes(message.get("body", b"")), message.get("more_body", False)  # some send a memoryview
            if self.passing:
                if not more:
                    await arun(self.attempt.release())  # does nothing if a tombstone was settled
                await self.client_send({"type": "http.response.body", "body": chunk, "more_body": more})
            elif self.attempt.ended:  # the response was complete
                return
            elif more or self.chunks:
                await self._add(chunk, more=more)
            else:
                await self._complete(chunk)
        elif kind == "http.response.start":
            # A second start replaces the response that was held back until now.
            self.start, self.chunks, self.size, self.failure = message, [], 0, None
            if self.attempt.ended or self.passing:  # cut off while it was recorded, or sent: the new one is no outcome
                await self._start_passing()
        else:
            await self.client_send(message)

    async def _add(self, chunk: bytes, *, more: bool) -> None:
        self.chunks.append(chunk)
        self.size += len(chunk)
        if not more:
            await self._complete(b"".join(self.chunks))
        elif not self._can_wait():
            await self._begin_passing()

    def _can_wait(self) -> bool:
        """Whether the response may be held back until it is complete: its length is known, or the rule stores streams."""
        length = self._length()
        if length.isdecimal():
            return int(length) <= self.rule.max_response and self.size <= self.rule.max_response
        return self.rule.streams == "store" and self.size <= self.rule.max_response

    def _length(self) -> str:
        """The app's Content-Length, or nothing."""
        return value_of(decoded(self.start), "content-length")

    async def _complete(self, body: bytes) -> None:
        """Record the outcome, then send the app's own response, with all of its headers."""
        status, headers = self.start["status"], decoded(self.start)
        if status >= 500:
            outcome = self.exchange.door.outcome(self.rule, status, headers, body)
            if self.rule.policy.effect == "transaction" or not self.attempt.keeps(outcome):
                self.failure = (outcome, body)
                self._end()
                return
        await self._settle(self.exchange.settle(status, headers, body))
        await self._send(body)

    async def _send_failure(self, *, record: bool) -> None:
        """Send an error page, which was held back until the app had ended.

        Some frameworks make the page first and raise its cause afterwards.  If the cause is that the database refused the
        transaction, the page is not what the client gets; if the rule's `doubt` names the cause, the outcome is unknown.
        """
        assert self.failure is not None
        outcome, body = self.failure
        if record:
            await self._settle(self.attempt.settle(outcome))
        else:
            self.answer = Answer(outcome, "released")
        await self._send(body)

    async def _send(self, body: bytes) -> None:
        if self.answer is None:
            return
        if self.answer.how == "replayed":  # this attempt was too slow: the outcome of its successor counts
            await respond(self.client_send, self.exchange.replay(self.answer))
            return
        await self.client_send(self._started(self.exchange.headers(self.answer)))
        await self.client_send({"type": "http.response.body", "body": body})

    # Streams

    async def _begin_passing(self) -> None:
        """From here on, chunk by chunk.  That it happened is recorded first; how it ended cannot be replayed."""
        status, has_length = self.start["status"], bool(self._length())
        await self._settle(self.exchange.settle_stream(status, has_length=has_length))
        body, self.chunks = b"".join(self.chunks), []
        if self.answer is not None and self.answer.how == "replayed":
            await respond(self.client_send, self.exchange.replay(self.answer))
            self.client_send = nowhere
        await self._start_passing()
        await self.client_send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start_passing(self) -> None:
        if self.abandoned:
            raise OSError("The client has left, so the stream cannot be sent")
        self.passing = True
        outcome = unkept(self.rule, self.start["status"], has_length=bool(self._length()))
        await self.client_send(self._started(self.exchange.headers(Answer(outcome, "unstored"))))

    # The end

    async def _settle(self, plan: Plan[Answer]) -> None:
        """Settle the attempt: when this returns, the outcome is durable, or the client has been told why it is not."""
        try:
            # A transaction that is cut off is rolled back, so nothing lasts that would have to be recorded.
            self.answer = await (arun(plan) if self.attempt.policy.effect == "transaction" else arun_to_the_end(plan))
        except OncemoreError as error:  # too slow, or the database refused the transaction: this response is not sent
            await respond(self.client_send, self.exchange.refusal(error))
            self.client_send = nowhere
            if self.attempt.policy.effect == "transaction":  # nothing of it lasts, whatever the error
                self.is_refused = True
                raise TransactionLost from error
        finally:
            self._end()

    def _end(self) -> None:
        """The response is complete: the app may hear that its client has left."""
        self.over = True
        if self._left is not None:
            self._left.set()

    def _started(self, added: list[tuple[str, str]]) -> Message:
        """The app's own start of the response, with our headers added."""
        return {**self.start, "headers": [*self.start.get("headers", ()), *encoded(tuple(added))]}

    # Callers that give up

    async def finish(self, app: App) -> None:
        """Call the app in a task of its own, and wait for it.  If the caller is cancelled, the task goes on.

        In a task from the first step: a timeout or a task group that the app opens cannot be moved to another task later.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()  # as asyncio.shield does, with less work
        task = loop.create_task(self.run(app))
        task.add_done_callback(lambda _: None if done.done() else done.set_result(None))
        try:
            await done
        except asyncio.CancelledError:
            await self._abandon(task)
            raise
        task.result()

    async def _abandon(self, task: asyncio.Task[None]) -> None:
        """Let the app finish without its caller, which may send other messages on the same channel from now on."""
        self.client_send, self.abandoned = nowhere, True
        if self.over or not self.begun:  # nothing is left to be recorded, or nothing has happened yet
            task.cancel()
        ABANDONED.add(task)
        task.add_done_callback(self._report)
        if not self.begun:
            await arun(self.attempt.withdraw())

    def _report(self, task: asyncio.Task[None]) -> None:
        """Log a failure that no caller waits for any more."""
        ABANDONED.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s failed after its client had left", self.rule.name, exc_info=error)


def decoded(start: Message) -> list[tuple[str, str]]:
    """The headers that the app's response starts with."""
    return [(str(name, "latin-1").lower(), str(value, "latin-1")) for name, value in start.get("headers", ())]


@lru_cache(maxsize=1024)
def encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    """Headers of ours; within a second, they are the same for all responses of a rule."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers if name and value]


async def nowhere(message: Message) -> None:
    """The `send` of an app after its client has had its answer."""


async def arun_to_the_end(plan: Plan[Answer], effect: Effect[Any] | None = None) -> Answer:
    """Run the plan, also if the caller is cancelled meanwhile: the outcome is known, and is recorded.

    A task of its own then goes on from *effect*, the one that was cut off: every verb of a store may be sent twice.
    """
    try:
        effect = effect or next(plan)
        while True:
            try:
                result = await effect.arun()
            except asyncio.CancelledError:
                with suppress(OncemoreError):
                    await asyncio.shield(keep_task(arun_to_the_end(plan, effect)))
                raise
            except Exception as error:
                effect = plan.throw(error)
            else:
                effect = plan.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def respond(send: Send, response: Response) -> None:
    """Send a complete response."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    if response.status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(response.body)))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
