"""Makes one guarded Django response: records its outcome before returning it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import chain
from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse  # type: ignore[import-untyped]
from django.http.response import HttpResponseBase  # type: ignore[import-untyped]

from ..._ledger.attempt import LeaseAttempt
from ..._ledger.context import running
from ..._runtime.loops import finish_despite_cancel
from ..._runtime.plan import Call, Plan, arun, run
from ..door import Exchange
from ..problem import Response
from ..request import GUARDED, native_mapping
from .request import ERROR


class GuardedResponse:
    """Calls the view for one guarded request, and returns the response when its outcome is durable."""

    def __init__(self, exchange: Exchange, request: HttpRequest) -> None:
        self.exchange = exchange
        self.rule = exchange.rule
        self.attempt = exchange.attempt
        self.request = request

    def run(self) -> Plan[HttpResponseBase]:
        """Call the view, record the outcome, and return the response."""
        try:
            return (yield from self._call_view())
        except GeneratorExit:  # the event loop has ended, so the ledger cannot be asked any more
            self.attempt.drop()
            raise

    def _call_view(self) -> Plan[HttpResponseBase]:
        native, op = self.request, self.attempt.op
        try:
            native_mapping(native)[GUARDED] = op
            with running(op):
                response = yield Call(self.exchange.door.app, native)
                body = yield from self._body(response)
        except GeneratorExit:
            raise
        except BaseException as error:
            refused = yield from self.exchange.fail(error)
            if refused is None:
                raise
            return to_django(refused)
        found = yield from self._record(response, body)
        if isinstance(found, Response):
            if response.streaming:
                response.close()
            return to_django(found)
        if not self.attempt.ended:
            response.close = releasing(response.close, self.attempt)
        for name, value in found:
            response.headers[name] = value
        return response

    def _body(self, response: HttpResponseBase) -> Plan[bytes | None]:
        """Return the complete body of the response, or None if it is a stream, or too large to be held back."""
        if not response.streaming:
            return response.content  # type: ignore[no-any-return]
        length = str(response.headers.get("Content-Length", ""))
        can_wait = int(length) <= self.rule.max_response if length.isdigit() else self.rule.streams == "store"
        if not can_wait:
            return None
        try:
            return (yield Collect(response, self.rule.max_response))  # type: ignore[no-any-return]
        except BaseException:
            response.close()
            raise

    def _record(self, response: HttpResponseBase, body: bytes | None) -> Plan[Response | list[tuple[str, str]]]:
        status = response.status_code
        if body is None:
            return self.exchange.record_stream(status, has_length="Content-Length" in response.headers)
        # As plain texts: a subclass of str, with which template engines mark safe texts, cannot be stored.
        headers = [(name.lower(), str.__str__(value)) for name, value in response.items()]
        cause = getattr(self.request, ERROR, None) if status >= 500 else None
        return self.exchange.record(status, headers, body, cause)


class Collect:
    """Effect: read a streamed response so that it can still be sent; return None if it has more than *most* bytes."""

    def __init__(self, response: HttpResponseBase, most: int) -> None:
        self.response = response
        self.most = most

    def run(self) -> bytes | None:
        chunks, size, rest = [], 0, iter(self.response)
        for chunk in rest:
            chunks.append(chunk)
            size += len(chunk)
            if size > self.most:
                self.response.streaming_content = chain(chunks, rest)
                return None
        self.response.streaming_content = chunks
        return b"".join(chunks)

    async def arun(self) -> bytes | None:
        chunks, size, rest = [], 0, aiter(self.response)
        async for chunk in rest:
            chunks.append(chunk)
            size += len(chunk)
            if size > self.most:
                self.response.streaming_content = achain(chunks, rest)
                return None
        self.response.streaming_content = achain(chunks)
        return b"".join(chunks)


async def achain(chunks: list[bytes], rest: AsyncIterator[bytes] | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if rest is not None:
        async for chunk in rest:
            yield chunk


def releasing(close: Callable[[], None], attempt: LeaseAttempt) -> Callable[[], None]:
    """Return a `close` for a stream that the rule does not keep: it also releases the attempt."""

    def close_and_release() -> None:
        try:
            close()
        finally:
            run(attempt.release())

    return close_and_release


class InThread(Call):
    """Effect: call a function outside the event loop, because it may ask the database: `request.user` does so."""

    __slots__ = ()

    async def arun(self) -> Any:
        # Waits even if cancelled: Django ends the thread with the request, which blocks the loop until the function ends.
        return await finish_despite_cancel(sync_to_async(self.function)(*self.args))


class ToTheEnd:
    """Effect: run a plan to its end even if the client has left, and raise the cancellation only after that."""

    def __init__(self, plan: Plan[HttpResponseBase]) -> None:
        self.plan = plan

    def run(self) -> HttpResponseBase:
        return run(self.plan)

    async def arun(self) -> HttpResponseBase:
        found: list[HttpResponseBase] = []

        async def finish() -> HttpResponseBase:
            found.append(await arun(self.plan))
            return found[0]

        try:
            return await finish_despite_cancel(finish())
        except asyncio.CancelledError:
            for response in found:
                if response.streaming:  # it is never sent, and its lease may be held until it is closed
                    await sync_to_async(response.close)()
            raise


def to_django(response: Response) -> HttpResponse:
    """Return a response of the middleware as one of Django's."""
    answer = HttpResponse(response.body, status=response.status)
    del answer.headers["Content-Type"]
    if response.status not in (204, 304):
        answer.headers["Content-Length"] = str(len(response.body))
    for name, value in response.headers:
        answer.headers[name] = f"{answer.headers[name]}, {value}" if name in answer.headers else value
    return answer
