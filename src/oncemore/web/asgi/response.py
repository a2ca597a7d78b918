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
from ..door import Exchange, stream_tombstone
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

    Not an Exception, so that the app does not report it or make an error page: the client already has its answer.
    """


class GuardedResponse:
    """Calls the app for an attempt that has begun, and records the attempt's end.

    A response is held back until its outcome is durable, if its length is known or the rule stores streams.  Other streams
    are passed on live, after a tombstone was settled; if the rule does not keep them, the lease is held until they end.
    The app is told that its client has left only after the outcome is recorded, because it might stop working.
    """

    begun = False  # the app's task has made its first step
    passing = False  # the response is a stream or too large, so each message goes straight to the client
    over = False  # the outcome is recorded or known, so the app may be told that the client has left
    is_refused = False  # the database refused the app's transaction at its commit
    abandoned = False  # the caller was cancelled, so nobody waits for the response
    body_received = False  # the app has received the request's body
    disconnected: Message | None = None  # the client's http.disconnect, if it was received
    answer: Answer | None = None  # the ledger's answer, once the attempt is settled
    failure: tuple[Outcome, bytes] | None = None  # the outcome and body of an error page: see _send_failure
    size = 0  # the number of bytes in `chunks`
    _left: asyncio.Event | None = None  # set together with `over`, if the app already waits for its client to leave

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
        """Call the app, record the end of the attempt, and send the response.  Runs in a task of its own: see `serve`."""
        self.begun = True
        scope = self.request.native
        scope[GUARDED] = self.attempt.op
        CURRENT.set(self.attempt.op)  # in this task, and in the tasks that it starts
        try:
            if extensions := scope.get("extensions"):  # some of them let a response bypass `send`: remove these
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
        """Record that the app has failed.  Return whether the client was told, so that the error need not be raised."""
        try:
            is_doubtful, effect = self.attempt.doubts(None, error), self.attempt.policy.effect
            if self.failure is not None and effect != "transaction" and not is_doubtful:  # the page is the outcome
                await self._send_failure(record=True)
                return False
            if self.passing and not is_doubtful:
                await arun(self.attempt.release())
            else:
                await arun(self.attempt.fail(error))
        except StoreError as refused:  # the database refused the transaction, so the client's retry is safe
            await respond(self.client_send, self.exchange.refusal(refused))
            return True
        finally:
            self._end()
        if self.failure is not None:
            await self._send_failure(record=False)
        return False

    # The app's receive and send

    async def receive(self) -> Message:
        """Return the body, then the client's messages; but its `http.disconnect` only at the end, so that the app finishes."""
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
            # If the first response was already recorded or sent, the second is passed on, and is not recorded.
            if self.attempt.ended or self.passing:
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
        """Return the app's Content-Length, or an empty text."""
        return value_of(decoded(self.start), "content-length")

    async def _complete(self, body: bytes) -> None:
        """Record the outcome, then send the response; an error page that is not kept waits until the app has ended."""
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

        Some frameworks make the page first and raise its cause afterwards.  If the cause is the database's refusal of the
        transaction, the client gets 503 instead of the page.  If the rule's `doubt` names the cause, the outcome is unknown.
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
        if self.answer.how == "replayed":  # this attempt was too slow, so its successor's outcome is sent
            await respond(self.client_send, self.exchange.replay(self.answer))
            return
        await self.client_send(self._started(self.exchange.headers(self.answer)))
        await self.client_send({"type": "http.response.body", "body": body})

    # Streams

    async def _begin_passing(self) -> None:
        """Send the response chunk by chunk from now on.  First settle a tombstone, because a stream cannot be replayed."""
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
        outcome = stream_tombstone(self.rule, self.start["status"], has_length=bool(self._length()))
        await self.client_send(self._started(self.exchange.headers(Answer(outcome, "unstored"))))

    # The end

    async def _settle(self, plan: Plan[Answer]) -> None:
        """Settle the attempt: when this returns, the outcome is durable, or the client has been told why it is not."""
        try:
            # A cancelled transaction is rolled back, so its settle need not be finished.
            self.answer = await (arun(plan) if self.attempt.policy.effect == "transaction" else arun_to_the_end(plan))
        except OncemoreError as error:  # too slow, or the transaction was refused: the app's response is not sent
            await respond(self.client_send, self.exchange.refusal(error))
            self.client_send = nowhere
            if self.attempt.policy.effect == "transaction":  # it was rolled back, so background tasks must not run
                self.is_refused = True
                raise TransactionLost from error
        finally:
            self._end()

    def _end(self) -> None:
        """Let the app hear that its client has left: the outcome can no longer be lost by it."""
        self.over = True
        if self._left is not None:
            self._left.set()

    def _started(self, added: list[tuple[str, str]]) -> Message:
        """Return the app's `http.response.start`, with the headers *added*."""
        return {**self.start, "headers": [*self.start.get("headers", ()), *encoded(tuple(added))]}

    # Callers that give up

    async def serve(self, app: App) -> None:
        """Call the app in a task of its own, and wait for it.  If the caller is cancelled, the task goes on.

        The task starts before the app, because a timeout or task group that the app opens cannot move to another task.
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
        """Let the app finish without its caller.  Send nothing more, because the server may reuse the connection."""
        self.client_send, self.abandoned = nowhere, True
        if self.over or not self.begun:  # the outcome is known, or the app was not called
            task.cancel()
        ABANDONED.add(task)
        task.add_done_callback(self._report)
        if not self.begun:
            await arun(self.attempt.withdraw())

    def _report(self, task: asyncio.Task[None]) -> None:
        """Log the failure of an abandoned task: no caller would get it."""
        ABANDONED.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("The operation %s failed after its client had left", self.rule.name, exc_info=error)


def decoded(start: Message) -> list[tuple[str, str]]:
    """Return the headers of the app's `http.response.start`, decoded, with their names in lower case."""
    return [(str(name, "latin-1").lower(), str(value, "latin-1")) for name, value in start.get("headers", ())]


@lru_cache(maxsize=1024)
def encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    """Return the middleware's own headers, encoded.  Cached, because responses of one second often have equal ones."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers if name and value]


async def nowhere(message: Message) -> None:
    """Drop the message: used as `send` after the client has had its answer, or has left."""


async def arun_to_the_end(plan: Plan[Answer], effect: Effect[Any] | None = None) -> Answer:
    """Run the plan to its end even if the caller is cancelled, so that a known outcome is recorded.

    After a cancellation, a new task repeats the interrupted *effect*, which is safe: every verb of a store may be sent twice.
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
