"""The AWS Lambda middleware: idempotency for functions behind API Gateway or a load balancer, and for those that read SQS.

handler = IdempotencyMiddleware(handler, guard=Guard("dynamodb://..."))
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec

from ..._contract.contract import Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.profiles import DEFAULT
from ..._contract.rule import idempotent, rule_of
from ..._ledger.model import Operation
from ..._runtime.plan import Call, Plan, run
from ...errors import OncemoreError, StoreError
from ..door import Door, wait_of
from ..etag import Etag
from ..request import Request, current_operation, match_mounted, mount_prefix, value_of
from ..status import status_plan
from ..turn import Turn
from .batch import check_plain, each_message
from .events import Event, RestApi, caller_of, longest_wait, request_body, source_of, time_left, within

__all__ = ["IdempotencyMiddleware", "current_operation", "each_message", "guarded", "idempotent"]

Handler = Callable[[Any, Any], Any]

log = logging.getLogger("oncemore.web")

Options = ParamSpec("Options")

# The middleware that lets an event happen, its operation, and the event as its function was given it.
CURRENT_EVENT: ContextVar[tuple[Any, Any, Any]] = ContextVar("oncemore.lambda", default=(None, None, None))


class IdempotencyMiddleware(Door[Handler]):
    """Guards the HTTP requests that the contract names; all other events pass untouched.

    `@idempotent(...)` on the function itself is a rule for all its requests.  Without a principal function, the caller is
    who API Gateway says it is.  Rules may name a path with or without its stage, or a custom domain's base path.
    """

    default_principal = staticmethod(caller_of)

    def prepare(self) -> None:
        check_plain(self.app)
        rule = rule_of(self.app)
        if rule is not None:  # a function serves every request that reaches it, unless the rule says which
            self.contract.add(rule.at("*") if rule.match == DEFAULT["match"] else rule)
        self.contract.check()
        self.rules_declared()

    def __call__(self, event: Any, context: Any) -> Any:
        source = source_of(event)
        if source is None:
            return self.app(event, context)
        method, path, inner = source.method(event), source.path(event), source.inner_path(event)
        if method in SAFE_METHODS and not (method == "GET" and self.status_path in (path, inner)):
            return self.app(event, context)
        request = Request(method, path, source.query(event), source.headers(event), native=event)
        try:
            if method in SAFE_METHODS:
                return source.rendered(event, run(status_plan(self, request)))
            found = match_mounted(self.contract, method, path, inner)
            match = self.match(method, path, request.headers, found)
        except OncemoreError as error:
            return source.rendered(event, self.refusal(error))
        if match is None:
            return self.app(event, context)
        return self._guard(source, match, request, context)

    def _guard(self, source: RestApi, match: Match, request: Request, context: Any) -> Any:
        """Call the function once for this key; every other request with the key gets the stored response."""
        event, operation = request.native, None
        try:
            body = request_body(event)
            self.check_length(match.rule, len(body))
            request = Request(request.method, request.path, request.query, request.headers, body, event)
            operation = self.operation(match, request)
        except OncemoreError as error:
            return source.rendered(event, self.refusal(error, match, operation))
        if operation is None or self._is_guarded(event, operation):
            return self.app(event, context)
        response = GuardedResponse(self, source, match, operation, request, context)
        try:
            return response.run()
        except OncemoreError as error:
            if response.performed:  # it is the function's own
                raise
            if not self.runs_unguarded(error, match.rule):
                mount = mount_prefix(request.path, source.inner_path(event))
                return source.rendered(event, self.refusal(error, match, operation, mount))
            log.error("The store is down, and %s runs unguarded: %s", match.rule.name, error)
        return self.app(event, context)

    def _is_guarded(self, event: Event, operation: Operation) -> bool:
        """Whether an outer middleware guards this operation of this event already: a second claim would wait for itself."""
        outer, guarded, given = CURRENT_EVENT.get()
        if outer is None or outer is self or event is not given:
            return False
        return bool(guarded.id == operation.id)  # with another key or scope, it is guarded here as well


class GuardedResponse:
    """The response to one guarded request: returned when its outcome is durable."""

    def __init__(
        self,
        door: Door[Handler],
        source: RestApi,
        match: Match,
        operation: Operation,
        request: Request,
        context: Any,
    ) -> None:
        self.door = door
        self.source = source
        self.match = match
        self.request = request
        self.context = context
        self.turn = Turn(door, match, operation)
        self.performed = False

    def run(self) -> Any:
        """Claim, call the function, settle, answer; or answer from the ledger."""
        event, left = self.request.native, time_left(self.context)
        self.turn.policy = self.turn.attempt.policy = within(self.turn.policy, left)
        known = run(self.turn.begin(longest_wait(wait_of(self.request.headers), left)))
        if known is not None:
            return self.source.rendered(event, self.door.replay(known, self.match.rule))
        try:
            run(self.turn.check(self.request, self._current_etag()))
            self.performed = True
            with self.turn.current(), current_event(self.door, self.turn.operation, event):
                reply = self.source.reply(self.door.app(event, self.context))
        except BaseException as error:
            try:
                run(self.turn.fail(error))
            except StoreError as refused:
                return self._refuse(refused)
            raise
        try:
            answer = run(self.turn.whole(reply.status, reply.headers, reply.body))
        except OncemoreError as error:
            return self._refuse(error)
        if answer.how == "replayed":  # this attempt was too late, and the one that took over has settled
            return self.source.rendered(event, self.door.replay(answer, self.match.rule))
        return self.source.added(event, reply, self.door.headers(self.match.rule, answer))

    def _current_etag(self) -> Plan[Etag]:
        """What the function answers to a GET of the request's URL."""
        found = self.source.reply((yield Call(self.door.app, self.source.as_get(self.request.native), self.context)))
        return found.status, value_of(found.headers, "etag")

    def _refuse(self, error: OncemoreError) -> Any:
        return self.source.rendered(self.request.native, self.door.refusal(error, self.match, self.turn.operation))


@contextmanager
def current_event(door: Door[Handler], operation: Operation, event: Event) -> Iterator[None]:
    token = CURRENT_EVENT.set((door, operation, event))
    try:
        yield
    finally:
        CURRENT_EVENT.reset(token)


def as_decorator(
    middleware: Callable[Concatenate[Handler, Options], IdempotencyMiddleware],
) -> Callable[Options, Callable[[Handler], IdempotencyMiddleware]]:
    """The middleware with its options first, and the function that it wraps later."""

    def guarded(*args: Options.args, **options: Options.kwargs) -> Callable[[Handler], IdempotencyMiddleware]:
        """A decorator: puts the function behind an `IdempotencyMiddleware` with these options."""
        return lambda handler: middleware(handler, *args, **options)

    known = inspect.signature(middleware)
    guarded.__signature__ = known.replace(parameters=list(known.parameters.values())[1:])  # type: ignore[attr-defined]
    return guarded


guarded = as_decorator(IdempotencyMiddleware)
