"""Build a middleware for a server that has none: a request goes in, and out comes a stored response, or the one performed now.

    idempotency = Idempotency(guard=Guard("sqlite:///once.db"), contract=contract)

    async def middleware(native, perform):
        limit = idempotency.body_limit(native.method, native.path, native.headers)
        if limit is None:  # not guarded
            return await perform()
        request = Request(native.method, native.path, native.query, native.headers, await native.read(), native)
        return await idempotency.arun(request, perform)

Rules, scopes, headers, refusals and the status lookup are those of every other integration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from .._contract.contract import Match
from .._contract.paths import SAFE_METHODS
from .._ledger.context import current_operation, running
from .._runtime.loops import finish_despite_cancel
from .._runtime.plan import Call, Plan, arun, run
from ..errors import ConfigurationError, OncemoreError
from .door import Door, Exchange
from .etag import Etag
from .problem import Response
from .request import Headers, Request, check_length
from .shadow import Shadow
from .status import status_plan

__all__ = ["Idempotency", "Request", "Response", "Streamed", "current_operation"]

STATUS_METHODS = ("GET", "HEAD")


class Streamed(msgspec.Struct, frozen=True):
    """A response with a body that the server sends by itself afterwards: that it happened is recorded first, its body is not."""

    status: int
    headers: list[tuple[str, str]]


Answered = Response | Streamed


class Idempotency(Door[Any]):
    """Guards requests of any server.  Headers are pairs with their names in lower case; paths are decoded."""

    can_await = True

    def body_limit(self, method: str, path: str, headers: Headers) -> int | None:
        """How long the body of a guarded request may be, in bytes; None if the request passes untouched.

        Read that much of a guarded request's body, and a byte more, then call `run` or `arun`: a longer body is refused, or in
        shadow mode passed on, so `perform` must still find it whole.
        """
        if method in SAFE_METHODS:
            return 0 if path == self.status_path and method in STATUS_METHODS else None
        try:
            match = self.match(method, path, headers, None)
        except OncemoreError:  # `run` answers with it
            return self.contract.default.max_request
        return None if match is None else match.rule.max_request

    def run(
        self, request: Request, perform: Callable[[], Answered], *, etag: Callable[[], Etag] | None = None
    ) -> Answered:
        """The response to *request*: stored, refused, or the one that *perform* returns, with its outcome recorded.

        Args:
            request: The whole request.
            perform: Called if nobody has performed the operation yet.
            etag: The status and the ETag of the resource as it is now, for rules with `if_match`.
        """
        return run(self._answer(run(self.begin_exchange(request, etag)), request, perform))

    async def arun(
        self,
        request: Request,
        perform: Callable[[], Awaitable[Answered]],
        *,
        etag: Callable[[], Awaitable[Etag]] | None = None,
    ) -> Answered:
        """As `run`, for an async server.  If the caller is cancelled, an operation that has begun is finished first."""
        found = await arun(self.begin_exchange(request, etag))
        answering = arun(self._answer(found, request, perform))
        return await (finish_despite_cancel(answering) if isinstance(found, Exchange) else answering)

    def _answer(
        self, found: Response | Exchange | Shadow | None, request: Request, perform: Callable[[], Any]
    ) -> Plan[Answered]:
        """Perform, if there is no response yet, and record the outcome."""
        if isinstance(found, Response):
            return found
        if isinstance(found, Shadow):
            return (yield from found.around(request, perform, lambda response: response.status))  # type: ignore[no-any-return]
        if found is None:
            return (yield Call(perform))  # type: ignore[no-any-return]
        try:
            with running(found.attempt.op):
                response = yield Call(perform)
            if not isinstance(response, Answered):
                raise TypeError(f"perform gave a {type(response).__name__}: let it return a Response or a Streamed")
        except GeneratorExit:
            found.attempt.drop()
            raise
        except BaseException as error:
            refused = yield from found.fail(error)
            if refused is None:
                raise
            return refused
        recorded = yield from record(found, response)
        yield from found.attempt.release()  # does nothing unless it is a stream that is not to be remembered
        if isinstance(recorded, Response):
            return recorded
        return msgspec.structs.replace(response, headers=[*response.headers, *recorded])

    def begin_exchange(
        self, request: Request, etag: Callable[[], Any] | None = None
    ) -> Plan[Response | Exchange | Shadow | None]:
        """The response if nothing is to be performed; None if the request is not guarded; else the exchange that has begun.

        In shadow mode, a `Shadow`, with which to perform.
        """
        match = None
        if request.method in SAFE_METHODS:
            is_status = request.path == self.status_path and request.method in STATUS_METHODS
            return (yield from status_plan(self, request)) if is_status else None
        try:
            match = self.match(request.method, request.path, request.headers, request.native)
            if match is None:
                return None
            if not self.enforces(match.rule):
                return Shadow(self, match)
            check_length(match.rule, len(request.body))
        except OncemoreError as error:
            return self.refusal(error, match)
        return (yield from self.begin(match, request, current_etag(match, etag)))


def record(exchange: Exchange, response: Answered) -> Plan[Response | list[tuple[str, str]]]:
    """Record a response, or a stream: the headers that tell of it, or a response that the client gets instead."""
    headers = [(name.lower(), value) for name, value in response.headers]
    if isinstance(response, Response):
        return exchange.record(response.status, headers, response.body)
    return exchange.record_stream(response.status, has_length=any(name == "content-length" for name, _ in headers))


def current_etag(match: Match, etag: Callable[[], Any] | None) -> Plan[Etag]:
    """The ETag of the resource, as the server's own function tells it."""
    if etag is None:
        raise ConfigurationError(
            f"The rule {match.rule.name!r} has if_match, and the ETag is not known: pass etag= to run or arun"
        )
    return (yield Call(etag))  # type: ignore[no-any-return]
