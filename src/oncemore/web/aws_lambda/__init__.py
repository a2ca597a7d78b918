"""The AWS Lambda middleware: idempotency for functions behind API Gateway, load balancers and SQS queues.

handler = IdempotencyMiddleware(handler, guard=Guard("dynamodb://..."))
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..._contract.contract import Match
from ..._contract.keys import check_key, check_name, join
from ..._contract.paths import SAFE_METHODS
from ..._contract.policy import Policy
from ..._contract.profiles import DEFAULT
from ..._contract.rule import idempotent, rule_of
from ..._contract.templates import Template, remembered
from ..._fingerprint.canonical import read_json
from ..._fingerprint.fingerprint import Fingerprinter
from ..._ledger.context import Op, current_operation, running
from ..._ledger.guard import Guard, check_guard
from ..._ledger.model import Operation
from ..._runtime.plan import Call, Plan, run
from ...errors import ConfigurationError, Duplicate, InvalidPayload, OncemoreError, OutcomeNotKept
from ..door import Door, Exchange
from ..etag import Etag
from ..problem import Response
from ..request import Request, check_length, mount_prefix, value_of
from ..shadow import Shadow
from ..status import status_plan
from .events import Event, RestApi, caller_of, longest_wait, request_body, source_of, time_left, within

__all__ = ["IdempotencyMiddleware", "current_operation", "each_message", "guarded", "idempotent"]

Handler = Callable[[Any, Any], Any]

Options = ParamSpec("Options")
Message = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])
Key = str | Callable[[Message], str]

log = logging.getLogger("oncemore.web")

# The middleware that guards the event, the operation, and the event that its function got.  They are not in the event itself,
# because functions log events as JSON.
CURRENT_EVENT: ContextVar[tuple[Any, Any, Any]] = ContextVar("oncemore.lambda", default=(None, None, None))


class IdempotencyMiddleware(Door[Handler]):
    """Guards the HTTP requests that the contract names; all other events pass untouched.

    `@idempotent(...)` on the function itself is a rule for all its requests.  Without a principal function, the principal is
    the caller that API Gateway has authenticated, else the credentials.  Rules may name a path with or without its stage, or
    a custom domain's base path.
    """

    needs_app = True
    default_principal = staticmethod(caller_of)

    def prepare(self) -> None:
        check_plain(self.app)
        rule = rule_of(self.app)
        if rule is not None:  # the function serves every request that it gets
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
        return self._call_function(source, found, event, context)

    def _observe(self, source: RestApi, match: Match, request: Request, context: Any) -> Any:
        """Shadow mode: call the function as if there were no middleware, and note how it would have been answered."""
        event = request.native
        try:
            request = request.with_body(request_body(event))
        except OncemoreError:
            return self.app(event, context)
        perform = partial(self.app, event, context)
        return run(Shadow(self, match).around(request, perform, lambda answer: source.reply(answer).status))

    def _call_function(self, source: RestApi, exchange: Exchange, event: Event, context: Any) -> Any:
        """Call the function, record the outcome, and return its answer."""
        try:
            with running(exchange.attempt.op):
                token = CURRENT_EVENT.set((self, exchange.attempt.operation, event))
                try:
                    reply = source.reply(self.app(event, context))
                finally:
                    CURRENT_EVENT.reset(token)
        except BaseException as error:
            refused = run(exchange.fail(error))
            if refused is None:
                raise
            return source.rendered(event, refused)
        found = run(exchange.record(reply.status, reply.headers, reply.body))
        return source.rendered(event, found) if isinstance(found, Response) else source.added(event, reply, found)

    def is_guarded(self, operation: Operation, native: Any) -> bool:
        outer, guarded, given = CURRENT_EVENT.get()
        if outer is None or outer is self or native is not given:
            return False
        return bool(guarded.id == operation.id)  # an operation with another key or scope is guarded here as well


def current_etag(function: Handler, source: RestApi, event: Event, context: Any) -> Plan[Etag]:
    """Return the status and ETag of the function's answer to a GET of the event's URL."""
    found = source.reply((yield Call(function, source.as_get(event), context)))
    return found.status, value_of(found.headers, "etag")


def as_decorator(
    middleware: Callable[Concatenate[Handler, Options], IdempotencyMiddleware],
) -> Callable[Options, Callable[[Handler], IdempotencyMiddleware]]:
    """Return the middleware as a decorator: it takes the options first, and the function afterwards."""

    def guarded(*args: Options.args, **options: Options.kwargs) -> Callable[[Handler], IdempotencyMiddleware]:
        """Return a decorator that puts the function behind an `IdempotencyMiddleware` with these options."""
        return lambda handler: middleware(handler, *args, **options)

    known = inspect.signature(middleware)
    guarded.__signature__ = known.replace(parameters=list(known.parameters.values())[1:])  # type: ignore[attr-defined]
    return guarded


guarded = as_decorator(IdempotencyMiddleware)
"""A decorator that puts a function behind an `IdempotencyMiddleware` with these options, as in `@guarded(guard=guard)`."""


# ── Messages from SQS, each performed once: the answer names the failed messages, and only they are delivered again ────────

# A queue keeps a message for at most 14 days, so its record must not expire sooner.  If another invocation works on the same
# message, this one does not wait: the message is delivered again.
DEFAULTS: dict[str, Any] = {"ttl": "14d", "in_flight": "conflict"}
SHORTEST = 1.0  # seconds: with less time left, the next message is not begun
DONE_BEFORE = (Duplicate, OutcomeNotKept)


def each_message(
    guard: Guard, *, key: Key | None = None, **settings: Any
) -> Callable[[Callable[[Message], Any]], Batch]:
    """Return a decorator that makes a handler of SQS batches from a function of one message; it reports partial failures.

    *key* names the operation: a template (`"{body.orderId}"`, or `"{header.MessageDeduplicationId}"` for an attribute), or a
    function of the message.  Default: the message's own id.  *settings* are the settings of a `Policy`.
    """
    policy = check_guard(guard).policy.but(**{**DEFAULTS, **settings})
    return lambda function: Batch(guard, function, key, policy)


class Batch:
    """A Lambda handler that performs each message of a batch once."""

    def __init__(self, guard: Guard, function: Callable[[Message], Any], key: Key | None, policy: Policy) -> None:
        self.guard = guard
        self.function = check_plain(function)
        self.policy = policy
        self.key = key if key is None or callable(key) else remembered(Template(key), policy.ttl)
        self._fingerprinter = Fingerprinter()

    def __call__(self, event: Any, context: Any) -> dict[str, list[dict[str, str]]]:
        """Perform the messages of a batch; return the ids of the messages that SQS must deliver again."""
        failed: list[str] = []
        behind: set[str] = set()  # groups with a failed message, which later messages must not overtake
        slowest = SHORTEST
        for message in messages_of(event):
            began, left, group = time.monotonic(), time_left(context), group_of(message)
            in_time = left is None or left > slowest
            if group in behind or not in_time or not self._perform(message, left):
                failed.append(message["messageId"])
                behind |= {group} - {""}
            slowest = max(slowest, time.monotonic() - began)
        return {"batchItemFailures": [{"itemIdentifier": id} for id in failed]}

    def operation(self, message: Message) -> Operation:
        """Return the operation that the message names."""
        queue, body = message["eventSourceARN"], message["body"].encode("utf-8", "surrogatepass")
        parts = ("SQS", queue, "", "application/json", body)
        return Operation(
            scope=join("sqs", queue),
            key=self._key(message, body),
            fingerprint=self._fingerprinter.fingerprint(*parts),
            name=f"sqs:{queue.rpartition(':')[2]}",
            matches=lambda stored: self._fingerprinter.matches(stored, *parts),
        )

    def _key(self, message: Message, body: bytes) -> str:
        if self.key is None:
            return check_key(message["messageId"])
        if not isinstance(self.key, Template):
            return check_name(self.key(message), "The result of the key function")
        sent = float(message["attributes"]["SentTimestamp"]) / 1000  # the time of the call differs between deliveries
        return self.key.render(headers=attributes_of(message), body=document_of(body), now=sent)

    def _perform(self, message: Message, left: float | None) -> bool:
        """Perform the message.  Return whether it is done, now or by an earlier delivery."""
        begun: list[Op] = []

        def perform(op: Op) -> None:
            begun.append(op)
            with running(op):
                Call(self.function, deepcopy(message)).run()  # a copy, because a rerun needs the unchanged message

        try:
            operation, policy = self.operation(message), within(self.policy, left)
            answer = self.guard.run(operation, perform, policy=policy, wait=longest_wait(left))
        except Exception as error:
            if isinstance(error, DONE_BEFORE) and not begun:
                return True
            is_refusal = isinstance(error, OncemoreError)
            level, end = (logging.WARNING, "was refused") if is_refusal else (logging.ERROR, "failed")
            log.log(level, "The message %s %s", message["messageId"], end, exc_info=error)
            return False
        return answer.how != "released"  # a released operation counts as not performed


def check_plain(function: Function) -> Function:
    """Return the function.  Raise ConfigurationError if it is async, because Lambda would not await it."""
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{function!r} is async, and Lambda calls plain functions: wrap it in one that calls asyncio.run(...)"
        )
    return function


def messages_of(event: Any) -> list[Message]:
    found = event.get("Records") if isinstance(event, dict) else None
    if not isinstance(found, list) or any(each.get("eventSource") != "aws:sqs" for each in found):
        raise ConfigurationError(
            "This function handles messages from SQS, but got another event: connect it to SQS queues only"
        )
    return found


def group_of(message: Message) -> str:
    """Return the group in which the message keeps its order, or an empty text if its queue has no order."""
    is_ordered = message["eventSourceARN"].endswith(".fifo")
    return message["attributes"].get("MessageGroupId", "") if is_ordered else ""


def document_of(body: bytes) -> Any:
    """Return the decoded body if it is JSON, else None: a key that names its fields is then refused."""
    try:
        return read_json(body)[0]
    except InvalidPayload:
        return None


def attributes_of(message: Message) -> dict[str, str]:
    """Return the message's attributes by name in lower case.  SQS's own attributes override the sender's."""
    sent = {name: given.get("stringValue") for name, given in (message.get("messageAttributes") or {}).items()}
    own = message.get("attributes") or {}
    return {name.lower(): value for name, value in {**sent, **own}.items() if value is not None}
