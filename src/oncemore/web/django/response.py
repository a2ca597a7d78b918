"""One guarded Django request: the view answers, its outcome is made durable, and only then is the response returned."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from itertools import chain
from typing import Any

from asgiref.sync import sync_to_async
from django.core.signals import got_request_exception  # type: ignore[import-untyped]
from django.http import HttpRequest, HttpResponse  # type: ignore[import-untyped]
from django.http.response import HttpResponseBase  # type: ignore[import-untyped]

from ..._contract.contract import Match
from ..._contract.rule import Rule
from ..._ledger.decisions import Answer
from ..._ledger.model import Operation
from ..._runtime.plan import Call, Plan, run
from ...errors import ConfigurationError, OncemoreError, StoreError
from ..current import place_of
from ..door import Door, Request, wait_of
from ..environ import put_back, read_body
from ..etag import VARIABLES_OF_CHANGE, Etag
from ..problem import Response
from ..turn import NotKept, Turn

GetResponse = Callable[[HttpRequest], Any]  # a response, or a coroutine of it
# What Django remembers of a request once it has been asked for it.
REMEMBERED = ("_body", "_post", "_files", "headers")


# Where the error is noted that Django made a response of.
NOTED = "_oncemore_error"


def note_error(request: HttpRequest | None = None, **_: Any) -> None:
    if request is not None:
        setattr(request, NOTED, sys.exc_info()[1])


got_request_exception.connect(note_error, dispatch_uid="oncemore")


class Exchange:
    """The view on one side, the client on the other, and the ledger between them."""

    def __init__(
        self, door: Door, match: Match, operation: Operation, request: Request, get_response: GetResponse
    ) -> None:
        self.door = door
        self.match = match
        self.rule = match.rule
        self.operation = operation
        self.request = request
        self.get_response = get_response
        self.turn = Turn(door, match, operation)
        self.performed = False

    def run(self) -> Plan[HttpResponseBase]:
        """Claim, let the view perform, settle, answer; or answer from the ledger."""
        known = yield from self.turn.begin(wait_of(self.request.headers))
        if known is not None:
            return made(self.door.replayed(self.rule, known))
        try:
            yield from self.turn.check(self.request, current_etag(self.get_response, self.request.native))
            self.performed = True
            with self.turn.current(place_of(self.request.native)):
                response = yield Call(self.get_response, self.request.native)
                body = yield from self._body(response)
        except BaseException as error:
            try:
                yield from self.turn.fail(error)
            except StoreError as refused:
                return made(self.door.refused(refused, self.match, self.operation))
            raise
        try:
            yield from self._check_error_page(response)
            answer = yield from self._settled(response, body)
        except OncemoreError as error:  # another has taken the operation over, and what it came to is not known
            return instead(response, self.door.refused(error, self.match, self.operation))
        if answer.how == "replayed":
            return instead(response, self.door.replayed(self.rule, answer))
        for name, value in self.door.headers(self.rule, answer):
            response.headers[name] = value
        return response

    def _check_error_page(self, response: HttpResponseBase) -> Plan[None]:
        """If Django made an error page of the database's refusal, raise StoreUnavailable."""
        error = getattr(self.request.native, NOTED, None)
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


def current_etag(get_response: GetResponse, request: HttpRequest) -> Plan[Etag]:
    """What the view answers to a GET of the request's URL."""
    response = yield Call(get_response, as_get(request))
    if response.streaming:  # to close any other tells Django that the request is over
        response.close()
    return response.status_code, str(response.headers.get("ETag", ""))


def as_get(request: HttpRequest) -> HttpRequest:
    """The same request (its user, its session), but a GET."""
    inner: Any = object.__new__(type(request))
    inner.__dict__.update({name: value for name, value in vars(request).items() if name not in REMEMBERED})
    inner.META = {name: value for name, value in request.META.items() if name not in VARIABLES_OF_CHANGE}
    inner.META["REQUEST_METHOD"] = inner.method = "GET"
    inner.content_type, inner.content_params = "", {}
    inner._stream, inner._read_started, inner.resolver_match = BytesIO(), False, None
    return inner


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


def body_of(request: HttpRequest, rule: Rule, door: Door) -> bytes:
    """The whole body; the view can read it as if nobody had, and Django's own limits still hold for it."""
    if hasattr(request, "_body"):
        door.check_length(rule, len(request.body))
        return request.body  # type: ignore[no-any-return]
    if request._read_started:
        raise ConfigurationError(
            "Another middleware has read the request's body before IdempotencyMiddleware could: move it after this one"
        )
    if hasattr(request, "environ"):  # WSGI, and perhaps in chunks, of which Django would see nothing
        body = read_body(request.environ, rule, door)
        put_back(request.environ, body)
    else:
        body = request.read(rule.max_request + 1)
        door.check_length(rule, len(body))
    request._stream, request._read_started = BytesIO(body), False
    return body


def made(response: Response) -> HttpResponse:
    """A response of ours as Django's."""
    answer = HttpResponse(response.body, status=response.status)
    del answer.headers["Content-Type"]
    if response.status not in (204, 304):
        answer.headers["Content-Length"] = str(len(response.body))
    for name, value in response.headers:
        answer.headers[name] = f"{answer.headers[name]}, {value}" if name in answer.headers else value
    return answer


def instead(response: HttpResponseBase, ours: Response) -> HttpResponse:
    """Our response in place of the view's, which is closed where it holds something open."""
    if response.streaming:
        response.close()
    return made(ours)
