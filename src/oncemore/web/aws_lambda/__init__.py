"""The AWS Lambda middleware: idempotency for functions behind API Gateway or a load balancer, and for those that read SQS.

handler = IdempotencyMiddleware(handler, guard=Guard("dynamodb://..."))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Concatenate, ParamSpec

from ..._contract.contract import Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.profiles import DEFAULT
from ..._contract.rule import idempotent, rule_of
from ..._ledger.attempt import LeaseAttempt
from ..._ledger.context import current_operation, running
from ..._ledger.model import Operation
from ..._runtime.plan import Call, Plan, run
from ...errors import OncemoreError
from ..door import Door
from ..etag import Etag
from ..problem import Response
from ..request import Request, check_length, mount_prefix, value_of
from ..shadow import Shadow
from ..status import status_plan
from .batch import check_plain, each_message
from .events import Event, RestApi, caller_of, longest_wait, request_body, source_of, time_left, within

__all__ = ["IdempotencyMiddleware", "current_operation", "each_message", "guarded", "idempotent"]

Handler = Callable[[Any, Any], Any]

Options = ParamSpec("Options")

# The middleware that lets an event happen, its operation, and the event as its function was given it: not in the event itself,
# which functions log as JSON.
CURRENT_EVENT: ContextVar[tuple[Any, Any, Any]] = ContextVar("oncemore.lambda", default=(None, None, None))


class IdempotencyMiddleware(Door[Handler]):
    """Guards the HTTP requests that the contract names; all other events pass untouched.

    `@idempotent(...)` on the function itself is a rule for all its requests.  Without a principal function, the caller is
    the one that API Gateway has authenticated.  Rules may name a path with or without its stage, or a custom domain's base path.
    """

    needs_app = True
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
        if method in SAFE_METHODS:
            return source.rendered(event, run(status_plan(self, request)))
        try:
            match = self.match(method, path, request.headers, event, inner)
        except OncemoreError as error:
            return source.rendered(event, self.refusal(error))
        if match is None:
            return self.app(event, context)
        return self._guard(source, match, request, context)

    def _guard(self, source: RestApi, match: Match, request: Request, context: Any) -> Any:
        """Call the function once for this key; every other request with the key gets the stored response."""
        event, left = request.native, time_left(context)
        if not self.enforces(match.rule):
            return self._observe(source, match, request, context)
        try:
            request = request.with_body(request_body(event))
            check_length(match.rule, len(request.body))
        except OncemoreError as error:
            return source.rendered(event, self.refusal(error, match))
        mount = mount_prefix(request.path, source.inner_path(event))
        etag = current_etag(self.app, source, event, context)
        policy, wait = within(self.policy(match.rule), left), longest_wait(left)
        found = run(self.begin(match, request, etag, mount=mount, policy=policy, longest_wait=wait))
        if found is None:
            return self.app(event, context)
        if isinstance(found, Response):
            return source.rendered(event, found)
        return self._call_function(source, match, found, event, context)

    def _observe(self, source: RestApi, match: Match, request: Request, context: Any) -> Any:
        """Shadow mode: call the function as if there were no middleware, and note what would have been done."""
        event = request.native
        try:
            request = request.with_body(request_body(event))
        except OncemoreError:
            return self.app(event, context)
        perform = partial(self.app, event, context)
        return run(Shadow(self, match).around(request, perform, lambda answer: source.reply(answer).status))

    def _call_function(self, source: RestApi, match: Match, attempt: LeaseAttempt, event: Event, context: Any) -> Any:
        """Call the function, record the outcome, and return its answer."""
        try:
            with running(attempt.op):
                token = CURRENT_EVENT.set((self, attempt.operation, event))
                try:
                    reply = source.reply(self.app(event, context))
                finally:
                    CURRENT_EVENT.reset(token)
        except BaseException as error:
            refused = run(self.fail(attempt, match, error))
            if refused is None:
                raise
            return source.rendered(event, refused)
        recording = self.record(attempt, match.rule, reply.status, reply.headers, reply.body)
        found = run(self.finish(attempt, match, recording))
        if isinstance(found, Response):
            return source.rendered(event, found)
        return source.added(event, reply, self.headers(match.rule, found))

    def is_guarded(self, operation: Operation, native: Any) -> bool:
        outer, guarded, given = CURRENT_EVENT.get()
        if outer is None or outer is self or native is not given:
            return False
        return bool(guarded.id == operation.id)  # with another key or scope, it is guarded here as well


def current_etag(function: Handler, source: RestApi, event: Event, context: Any) -> Plan[Etag]:
    """Status and ETag of the function's answer to a GET of the event's URL."""
    found = source.reply((yield Call(function, source.as_get(event), context)))
    return found.status, value_of(found.headers, "etag")


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
"""A decorator that puts a function behind an `IdempotencyMiddleware` with these options, as in `@guarded(guard=guard)`."""
