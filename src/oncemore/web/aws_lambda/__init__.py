"""The AWS Lambda door: idempotency for functions behind API Gateway or a load balancer, and for those that read SQS.

handler = IdempotencyMiddleware(handler, guard=Guard("dynamodb://..."))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Unpack

from ..._contract.contract import Contract, Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.profiles import DEFAULT
from ..._contract.rule import Rule, idempotent, rule_of
from ..._ledger.guard import Guard
from ..._ledger.model import Operation
from ..._runtime.plan import Call, Plan, run
from ...errors import OncemoreError, StoreError
from ..current import current_operation
from ..door import Door, Request, wait_of
from ..environ import matched, mount_of
from ..etag import Etag
from ..headers import value_of
from ..options import Options
from ..status import status_plan
from ..turn import Turn
from .batch import check_plain, each_message
from .events import Event, Reply, RestApi, request_body, source_of
from .principal import caller_of
from .times import patience, time_left, within

__all__ = ["IdempotencyMiddleware", "current_operation", "each_message", "guarded", "idempotent"]

Handler = Callable[[Any, Any], Any]

log = logging.getLogger("oncemore.web")

# The invocation that lets an event happen, and the very event that its function has been given.
UNDER_WAY: ContextVar[tuple[Invocation | None, Any]] = ContextVar("oncemore.lambda", default=(None, None))


def guarded(
    *, guard: Guard, contract: Contract | None = None, profile: str | None = None, **options: Unpack[Options]
) -> Callable[[Handler], IdempotencyMiddleware]:
    """A decorator: the function behind an `IdempotencyMiddleware` with these options."""
    return lambda handler: IdempotencyMiddleware(handler, guard=guard, contract=contract, profile=profile, **options)


class IdempotencyMiddleware:
    """Guards the HTTP requests that the contract names; all other events pass untouched.  Options are those of `Door`.

    `@idempotent(...)` on the function itself is a rule for all its requests.  Without a principal function, the caller is
    who API Gateway says it is.  Rules may name a path with or without its stage, or a custom domain's base path.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        guard: Guard,
        contract: Contract | None = None,
        profile: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.handler = check_plain(handler)
        options["principal"] = options.get("principal") or caller_of
        self.door = Door(guard, contract, profile=profile, **options)
        rule = rule_of(handler)
        if rule is not None:
            self.door.contract.add(rule_for_all(rule))
        self.door.contract.check()
        self.door.declared()

    def __call__(self, event: Any, context: Any) -> Any:
        source = source_of(event)
        if source is None:
            return self.handler(event, context)
        method, path, inner = source.method(event), source.path(event), source.inner_path(event)
        if method in SAFE_METHODS and not (method == "GET" and self.door.status_path in (path, inner)):
            return self.handler(event, context)
        request = Request(method, path, source.query(event), source.headers(event), native=event)
        try:
            if method in SAFE_METHODS:
                return source.rendered(event, run(status_plan(self.door, request)))
            found = matched(self.door.contract, method, path, inner)
            match = self.door.match(method, path, request.headers, found)
        except OncemoreError as error:
            return source.rendered(event, self.door.refused(error))
        if match is None:
            return self.handler(event, context)
        return self._guard(source, match, request, context)

    def _guard(self, source: RestApi, match: Match, request: Request, context: Any) -> Any:
        event, operation = request.native, None
        try:
            body = request_body(event)
            self.door.check_length(match.rule, len(body))
            request = Request(request.method, request.path, request.query, request.headers, body, event)
            operation = self.door.operation(match, request)
        except OncemoreError as error:
            return source.rendered(event, self.door.refused(error, match, operation))
        if operation is None or self._within(event, operation):
            return self.handler(event, context)
        return self._run(Invocation(self, source, match, operation, request, context))

    def _within(self, event: Event, operation: Operation) -> bool:
        """Whether a door outside this one lets the same event happen: to claim it here would be to wait for oneself."""
        outer, given = UNDER_WAY.get()
        if outer is None or event is not given or outer.door is self.door:
            return False
        return outer.turn.operation.id == operation.id  # by another key or scope, it is guarded here as well

    def _run(self, invocation: Invocation) -> Any:
        event, match = invocation.request.native, invocation.match
        try:
            return invocation.run()
        except OncemoreError as error:
            if invocation.performed:  # it is the function's own
                raise
            if not self.door.runs_without(error, match.rule):
                mount = mount_of(invocation.request.path, invocation.source.inner_path(event))
                refused = self.door.refused(error, match, invocation.turn.operation, mount)
                return invocation.source.rendered(event, refused)
            log.error("The store is down, and %s runs unguarded: %s", match.rule.name, error)
        return self.handler(event, invocation.context)


class Invocation:
    """One guarded request: the function's answer is returned when its outcome is durable."""

    def __init__(
        self,
        door: IdempotencyMiddleware,
        source: RestApi,
        match: Match,
        operation: Operation,
        request: Request,
        context: Any,
    ) -> None:
        self.door = door.door
        self.handler = door.handler
        self.source = source
        self.match = match
        self.request = request
        self.context = context
        self.turn = Turn(door.door, match, operation)
        self.performed = False

    def run(self) -> Any:
        """Claim, let the function perform, settle, answer; or answer from the ledger."""
        left = time_left(self.context)
        self.turn.policy = within(self.turn.policy, left)
        known = run(self.turn.begin(patience(wait_of(self.request.headers), left)))
        if known is not None:
            return self.source.rendered(self.request.native, self.door.replayed(self.match.rule, known))
        event = self.request.native
        try:
            run(self.turn.check(self.request, self._current_etag()))
            self.performed = True
            with self.turn.current(), under_way(self, event):
                reply = self.source.reply(self.handler(event, self.context))
        except BaseException as error:
            try:
                run(self.turn.fail(error))
            except StoreError as refused:
                return self._refused(refused)
            raise
        return self._settled(reply)

    def _current_etag(self) -> Plan[Etag]:
        """What the function answers to a GET of the request's URL."""
        found = self.source.reply((yield Call(self.handler, self.source.as_get(self.request.native), self.context)))
        return found.status, value_of(found.headers, "etag")

    def _settled(self, reply: Reply) -> Any:
        event: Event = self.request.native
        try:
            answer = run(self.turn.whole(reply.status, reply.headers, reply.body))
        except OncemoreError as error:
            return self._refused(error)
        if answer.how == "replayed":  # a late owner: what counts is what the one who took over has settled
            return self.source.rendered(event, self.door.replayed(self.match.rule, answer))
        return self.source.added(event, reply, self.door.headers(self.match.rule, answer))

    def _refused(self, error: OncemoreError) -> Any:
        return self.source.rendered(self.request.native, self.door.refused(error, self.match, self.turn.operation))


@contextmanager
def under_way(invocation: Invocation, event: Event) -> Iterator[None]:
    token = UNDER_WAY.set((invocation, event))
    try:
        yield
    finally:
        UNDER_WAY.reset(token)


def rule_for_all(rule: Rule) -> Rule:
    """The rule on a function, which serves every request that reaches it, unless the rule says which."""
    return rule.at("*") if rule.match == DEFAULT["match"] else rule
