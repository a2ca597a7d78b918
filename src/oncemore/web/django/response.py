"""One guarded Django request: the view answers, its outcome is made durable, and only then is the response returned."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import chain
from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpResponse  # type: ignore[import-untyped]
from django.http.response import HttpResponseBase  # type: ignore[import-untyped]

from ..._contract.contract import Match
from ..._ledger.decisions import Answer
from ..._ledger.model import Operation
from ..._runtime.plan import Call, Plan, run
from ...errors import OncemoreError, StoreError
from ..door import Door, wait_of
from ..problem import Response
from ..request import Request, native_mapping
from ..turn import NotKept, Turn
from .request import ERROR, GetResponse, current_etag


class GuardedResponse:
    """The response to one guarded request: returned when its outcome is durable."""

    def __init__(self, door: Door[GetResponse], match: Match, operation: Operation, request: Request) -> None:
        self.door = door
        self.match = match
        self.rule = match.rule
        self.operation = operation
        self.request = request
        self.turn = Turn(door, match, operation)
        self.performed = False

    def run(self) -> Plan[HttpResponseBase]:
        """Claim, let the view perform, settle, answer; or answer from the ledger."""
        known = yield from self.turn.begin(wait_of(self.request.headers))
        if known is not None:
            return to_django(self.door.replay(known, self.rule))
        try:
            yield from self.turn.check(self.request, current_etag(self.door.app, self.request.native))
            self.performed = True
            with self.turn.current(native_mapping(self.request.native)):
                response = yield Call(self.door.app, self.request.native)
                body = yield from self._body(response)
        except BaseException as error:
            try:
                yield from self.turn.fail(error)
            except StoreError as refused:
                return to_django(self.door.refusal(refused, self.match, self.operation))
            raise
        try:
            yield from self._check_error_page(response)
            answer = yield from self._settled(response, body)
        except OncemoreError as error:  # another has taken the operation over, and what it came to is not known
            return replace_response(response, self.door.refusal(error, self.match, self.operation))
        if answer.how == "replayed":
            return replace_response(response, self.door.replay(answer, self.rule))
        for name, value in self.door.headers(self.rule, answer):
            response.headers[name] = value
        return response

    def _check_error_page(self, response: HttpResponseBase) -> Plan[None]:
        """If Django made an error page of the database's refusal, raise StoreUnavailable."""
        error = getattr(self.request.native, ERROR, None)
        if error is not None and response.status_code >= 500 and self.turn.refuses(error):
            yield from self.turn.fail(error)

    def _body(self, response: HttpResponseBase) -> Plan[bytes | None]:
        """The whole body of the response, or None where it is a stream, or too large to be read in advance."""
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

    def _settled(self, response: HttpResponseBase, body: bytes | None) -> Plan[Answer]:
        status = response.status_code
        if body is not None:
            # As plain texts: one that a template engine marked as safe could not be stored.
            headers = [(name.lower(), str.__str__(value)) for name, value in response.items()]
            return (yield from self.turn.whole(status, headers, body))
        answer = yield from self.turn.live(status, stream="Content-Length" not in response.headers)
        if not self.turn.over:
            response.close = closing(response.close, self.turn)
        return answer


class Collect:
    """The effect of reading a streamed response, which can then be sent all the same; None where there is more than *most*."""

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


def closing(close: Callable[[], None], turn: Turn) -> Callable[[], None]:
    """A response's close that also ends the turn of a stream which is not to be remembered."""

    def close_and_end() -> None:
        try:
            close()
        finally:
            run(turn.fail(NotKept()))

    return close_and_end


class InThread(Call):
    """Call what may ask the database, as `request.user` does at its first use: not on the loop, where there is one."""

    __slots__ = ()

    async def arun(self) -> Any:
        return await sync_to_async(self.function)(*self.args)


def to_django(response: Response) -> HttpResponse:
    """A response of ours as Django's."""
    answer = HttpResponse(response.body, status=response.status)
    del answer.headers["Content-Type"]
    if response.status not in (204, 304):
        answer.headers["Content-Length"] = str(len(response.body))
    for name, value in response.headers:
        answer.headers[name] = f"{answer.headers[name]}, {value}" if name in answer.headers else value
    return answer


def replace_response(response: HttpResponseBase, ours: Response) -> HttpResponse:
    """Our response in place of the view's, which is closed where it holds something open."""
    if response.streaming:
        response.close()
    return to_django(ours)
