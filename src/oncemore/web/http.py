"""For servers without a middleware of their own: pass in a request, and get the stored response, or perform it now.

    idempotency = Idempotency(guard=Guard("sqlite:///once.db"), contract=contract)

    async def middleware(native, perform):
        limit = idempotency.body_limit(native.method, native.path, native.headers)
        if limit is None:  # not guarded
            return await perform()
        request = Request(native.method, native.path, native.query, native.headers, await native.read(), native)
        return await idempotency.arun(request, perform)

Rules, scopes, headers, refusals and the status lookup are the same as in the middlewares of frameworks.
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
    """A response whose body the server streams itself afterwards.  A tombstone is recorded first; the body is not stored."""

    status: int
    headers: list[tuple[str, str]]


Answered = Response | Streamed


class Idempotency(Door[Any]):
    """Guards requests of any server.  Pass headers as pairs with names in lower case, and decoded paths."""

    can_await = True

    def body_limit(self, method: str, path: str, headers: Headers) -> int | None:
        """Return the most bytes that the body of a guarded request may have, or None if the request passes untouched.

        Read the body up to one byte more than that, then call `run` or `arun`.  They refuse a body that is too long.  Shadow
        mode passes it on instead, so let `perform` read the complete body.
        """
        if method in SAFE_METHODS:
            return 0 if path == self.status_path and method in STATUS_METHODS else None
        try:
            match = self.match(method, path, headers, None)
        except OncemoreError:  # `run` sends this refusal
            return self.contract.default.max_request
        return None if match is None else match.rule.max_request

    def run(
        self, request: Request, perform: Callable[[], Answered], *, etag: Callable[[], Etag] | None = None
    ) -> Answered:
        """Return the response to *request*: a stored one, a refusal, or the result of *perform*, after recording its outcome.

        Args:
            request: The whole request.
            perform: Called if the operation has not been performed yet.
            etag: Returns the status and the ETag of a GET of the resource, for rules with `if_match`.
        """
        return run(self._answer(run(self.begin_exchange(request, etag)), request, perform))

    async def arun(
        self,
        request: Request,
        perform: Callable[[], Awaitable[Answered]],
        *,
        etag: Callable[[], Awaitable[Etag]] | None = None,
    ) -> Answered:
        """Do the same as `run`, for an async server.  If the caller is cancelled, finish an operation that has begun first."""
        found = await arun(self.begin_exchange(request, etag))
        answering = arun(self._answer(found, request, perform))
        return await (finish_despite_cancel(answering) if isinstance(found, Exchange) else answering)

    def _answer(
        self, found: Response | Exchange | Shadow | None, request: Request, perform: Callable[[], Any]
    ) -> Plan[Answered]:
        """Return the response that was *found*; if there is none yet, perform and record the outcome."""
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
                raise TypeError(f"perform returned a {type(response).__name__}: return a Response or a Streamed")
        except GeneratorExit:
            found.attempt.drop()
            raise
        except BaseException as error:
            refused = yield from found.fail(error)
            if refused is None:
                raise
            return refused
        recorded = yield from record(found, response)
        yield from found.attempt.release()  # does nothing unless it is a stream that the rule does not keep
        if isinstance(recorded, Response):
            return recorded
        return msgspec.structs.replace(response, headers=[*response.headers, *recorded])

    def begin_exchange(
        self, request: Request, etag: Callable[[], Any] | None = None
    ) -> Plan[Response | Exchange | Shadow | None]:
        """Return the exchange that has begun, or the response if nothing must be performed.

        Return None if the request is not guarded, and a `Shadow` to perform with in shadow mode.
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
    """Record a response or a stream.  Return the headers to add, or a Response to send instead."""
    headers = [(name.lower(), value) for name, value in response.headers]
    if isinstance(response, Response):
        return exchange.record(response.status, headers, response.body)
    return exchange.record_stream(response.status, has_length=any(name == "content-length" for name, _ in headers))


def current_etag(match: Match, etag: Callable[[], Any] | None) -> Plan[Etag]:
    """Call the server's own function for the ETag of the resource."""
    if etag is None:
        raise ConfigurationError(
            f"The rule {match.rule.name!r} has if_match, and the ETag is not known: pass etag= to run or arun"
        )
    return (yield Call(etag))  # type: ignore[no-any-return]
