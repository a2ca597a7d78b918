"""`Receiver` verifies webhooks, and has each event handled once, in the transaction of its effect.

    receiver = Receiver(Inbox(Guard("sqlite:///shop.db")), "stripe", secrets=["whsec_..."])

    @receiver.on("charge.succeeded")
    def book(op: Op, event: Envelope) -> None:
        op.connection.execute("INSERT INTO bookings VALUES (?)", (event.id,))

`receiver` is an ASGI app.  `receiver.wsgi` is a WSGI app, `receiver.django` a Django view, and `receiver.fastapi(path)` a
router for FastAPI.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from .._contract.contract import Match
from .._contract.rule import Rule
from .._fingerprint.canonical import read_json
from .._ledger.connect import naming_extras
from .._ledger.context import Op
from .._ledger.model import Operation
from .._runtime.clock import SYSTEM
from .._runtime.loops import finish_despite_cancel
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError, Fenced, InvalidPayload, OncemoreError, Refusal, StoreError, UnknownOutcome
from ..messages.envelope import Envelope, structured
from ..messages.inbox import Inbox, Received, handler_for
from ..web.asgi import read_body as read_asgi
from ..web.asgi.response import Receive, Scope, Send
from ..web.asgi.response import respond as respond_asgi
from ..web.problem import JSON, PROBLEM, Response, encode_json
from ..web.request import Fields, is_async
from ..web.wsgi.environ import headers_of
from ..web.wsgi.environ import read_body as read_wsgi
from ..web.wsgi.response import Environ, StartResponse
from ..web.wsgi.response import respond as respond_wsgi
from .schemes import Description, Pairs, Scheme, make_scheme, optional_header

if TYPE_CHECKING:
    from fastapi import APIRouter

log = logging.getLogger("oncemore.webhooks")

Handler = Callable[[Op, Envelope], Any]
RunAsync = Callable[[Coroutine[Any, Any, Received]], Received]
F = TypeVar("F", bound=Handler)

# The `result` in the response, for each `how` of the inbox.
RESULTS = {"processed": "ok", "duplicate": "replayed", "flagged": "flagged", "dead": "dead letter"}
IGNORED = "ignored"  # no handler takes events of this type
UNTYPED = "unknown"  # the type of an event that has none
RETRY_UNTIL = "webhook-retry-until"  # a header: until when the sender repeats the event, in seconds since 1970
# Seconds until the sender should try again.  An unknown outcome takes longer: a person or a resolver must decide.
RETRY_AFTER, RETRY_AFTER_UNKNOWN = 5, 60


class Receiver:
    """Receives the webhooks of one sender.

    The status tells the sender whether to repeat the webhook: 200 if that would change nothing, 4xx if it would be
    refused again, 5xx if it should.

    Args:
        inbox: Remembers the ids of events, and handles each event once.
        scheme: `standard`, `svix`, `stripe`, `github`, `shopify`, `slack` or `hmac`; or an object of a subclass
            of `Scheme`, for any other sender.
        secrets: The sender's secrets.  Any of them may have signed, so that they can rotate.
        handler: Handles the events of types for which `on` has named no handler.  It may be async.
        source: The name of the sender; by default that is the scheme's name.  Two senders of one inbox need two names,
            because their events may have equal ids.
        max_request: A longer body is refused with 413.
        options: Options of the scheme, such as `tolerance` (5 minutes), or `header` of `hmac`.
    """

    def __init__(
        self,
        inbox: Inbox,
        scheme: str | Scheme,
        *,
        secrets: Sequence[str | bytes] | str | bytes = (),
        handler: Handler | None = None,
        source: str = "",
        max_request: int | str = "10MiB",
        **options: Any,
    ) -> None:
        if not isinstance(inbox, Inbox):
            raise ConfigurationError(f"inbox is a {type(inbox).__name__}: make an Inbox, as in Inbox(guard)")
        self.inbox = inbox
        self.scheme = make_scheme(scheme, secrets, options)
        self.source = source or (scheme if isinstance(scheme, str) else self.scheme.name)
        self.handler = handler
        self.handlers: dict[str, Handler] = {}
        self._match = Match(Rule("POST /", max_request=max_request), {}, "")
        self._warned = False

    def on(self, *types: str) -> Callable[[F], F]:
        """Return a decorator for a function that handles events of these types.  It may be async.

        `*` in a type matches any characters, and the first match wins.  Without a `handler` of the receiver, events of
        other types are acknowledged and not remembered.
        """
        if not types or not all(isinstance(each, str) for each in types):  # @receiver.on without its parentheses
            raise ConfigurationError("Name the types of events: @receiver.on('charge.succeeded')")

        def decorate(handler: F) -> F:
            for each in types:
                if each in self.handlers:
                    raise ConfigurationError(f"Events of type {each!r} have a handler already: {self.handlers[each]!r}")
                self.handlers[each] = handler
            return handler

        return decorate

    # The app in each form.  None of them looks at the path.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI app."""
        if scope["type"] != "http":
            return await refuse_other(scope, receive, send)
        if scope["method"] != "POST":
            return await respond_asgi(send, WRONG_METHOD)
        headers = Fields(scope["headers"])
        try:
            body = await read_asgi(receive, self._match, headers)
        except OncemoreError as error:
            return await respond_asgi(send, refusal(error))
        if body is None:  # the sender disconnected before its end
            return None
        return await respond_asgi(send, await arun(self._answer(headers, body)))

    def wsgi(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request, as a WSGI app."""
        method = environ["REQUEST_METHOD"]
        if method != "POST":
            return respond_wsgi(start_response, WRONG_METHOD, head=method == "HEAD")
        try:
            body = read_wsgi(environ, self._match.rule)
        except OncemoreError as error:
            return respond_wsgi(start_response, refusal(error))
        return respond_wsgi(start_response, run(self._answer(headers_of(environ), body)))

    @functools.cached_property
    def django(self) -> Callable[..., Any]:
        """The Django view, for `path("webhooks/stripe", receiver.django)`.  It is exempt from CSRF checks."""
        with naming_extras("receiver.django"):
            from asgiref.sync import async_to_sync
            from django.db import connections, transaction  # type: ignore[import-untyped]
            from django.views.decorators.csrf import csrf_exempt  # type: ignore[import-untyped]

        from ..web.django.request import body_of, request_of
        from ..web.django.response import to_django

        async def wait(coroutine: Coroutine[Any, Any, Received]) -> Received:
            return await coroutine

        def receive_webhook(request: Any) -> Any:
            if request.method != "POST":
                return to_django(WRONG_METHOD)
            try:
                body = body_of(request, self._match.rule)
            except OncemoreError as error:
                return to_django(refusal(error))
            # `async_to_sync` runs an async handler on an event loop, and its ORM queries on this request's thread.
            return to_django(run(self._answer(request_of(request).headers, body, async_to_sync(wait))))

        # The inbox opens and commits the transaction itself, also with ATOMIC_REQUESTS.
        view: Callable[..., Any] = csrf_exempt(receive_webhook)
        for alias in connections:
            view = transaction.non_atomic_requests(using=alias)(view)
        return view

    def fastapi(self, path: str) -> APIRouter:
        """Return a router with one route, for `app.include_router(receiver.fastapi("/webhooks/stripe"))`.

        A mounted app would redirect a path without a final slash, and senders do not follow redirects.
        """
        with naming_extras("receiver.fastapi()"):
            from fastapi import APIRouter
        router = APIRouter()
        router.add_route(path, self, methods=["POST"], include_in_schema=False)  # type: ignore[arg-type]
        return router

    # Dead letters: `inbox.dead(source)` lists them, and `inbox.requeue(id, source)` marks one for `run_requeued`

    def run_requeued(self) -> int:
        """Handle the requeued dead letters of this sender, and return how many were handled.

        The sender does not send them again.  If the handler fails, a letter stays requeued until it failed too often.
        """
        return run(self._run_requeued())

    async def arun_requeued(self) -> int:
        """The awaited form of `run_requeued`."""
        return await arun(self._run_requeued())

    def _run_requeued(self) -> Plan[int]:
        handlers = dict(self.handlers) if self.handler is None else {**self.handlers, "*": self.handler}
        done, scope = 0, self.inbox.scope(self.source)
        for marker, letter in (yield from self.inbox.requeued()):
            if letter.scope == scope:  # other receivers may share the inbox
                done += yield from self.inbox.handle_dead(marker, letter, handlers)
        return done

    # Answers

    def _answer(self, headers: Pairs, body: bytes, run_async: RunAsync = asyncio.run) -> Plan[Response]:
        """Return the response to a webhook.  No headers and no body make this raise an exception."""
        try:
            self.scheme.verify(headers, body)  # before anything reads the body
            data = parse(body)
            challenge = self.scheme.challenge(data)
            if challenge is not None:
                return Response(200, [("content-type", "text/plain; charset=utf-8")], challenge)
            event = self.scheme.describe(headers, data)
            envelope = self._envelope(event, headers, body)
            operation = self.inbox.operation(event.id, self.source, event.compared)
        except Refusal as error:
            self._report_refusal(error)
            return refusal(error)
        self._check_retention(headers)
        handler = self._handler_for(envelope)
        first_seen = now()
        if handler is None:
            return self._acknowledge(event.id, first_seen, IGNORED)
        handling = Handling(self.inbox, operation, handler, envelope, run_async)
        try:
            received = yield handling
        except Exception as error:
            return self._failed(error, event.id, begun=handling.begun)
        if received.how in ("flagged", "dead"):
            log.warning("The webhook %r of %s was not handled: %s", event.id, self.source, RESULTS[received.how])
        return self._acknowledge(event.id, first_seen, RESULTS[received.how])

    def _handler_for(self, envelope: Envelope) -> Handler | None:
        try:
            return handler_for(self.handlers, envelope)
        except LookupError:
            return self.handler

    def _envelope(self, event: Description, headers: Pairs, body: bytes) -> Envelope:
        return Envelope(
            event.type or UNTYPED,
            id=event.id,
            source=self.source,
            subject=event.subject or None,
            time=event.time,
            datacontenttype="application/json",
            traceparent=optional_header(headers, "traceparent") or None,
            raw=body,
        )

    def _acknowledge(self, id: str, first_seen: str, result: str) -> Response:
        """Return the response to an event that need not be sent again."""
        row = {
            "event_id": id,
            "source": self.source,
            "first_seen": first_seen,
            "processed": now(),
            "result": result,
        }
        return Response(200, [JSON], encode_json(row))

    def _failed(self, error: Exception, id: str, *, begun: bool) -> Response:
        """Log why an event was not handled, and return the response that asks for it again."""
        if isinstance(error, StoreError | Fenced | UnknownOutcome) or (isinstance(error, Refusal) and not begun):
            log.warning("The webhook %r of %s should be repeated: %s", id, self.source, error)
            return unavailable(error)
        log.error("The webhook %r of %s should be repeated: its handler failed", id, self.source, exc_info=error)
        return own_problem(500, "The webhook could not be handled", "Its handler failed; send it again", retryable=True)

    def _report_refusal(self, error: Refusal) -> None:
        """Log the refusal and tell the guard's observers, because many of these mean a wrong secret or an attack."""
        log.warning("A webhook of %s was refused: %s", self.source, error.detail)
        operation = Operation(self.inbox.scope(self.source), "-", name=f"inbox.{self.source}")
        self.inbox.guard.emit("refused", operation, code=error.code, detail=error.detail)

    def _check_retention(self, headers: Pairs) -> None:
        """Warn once if the sender may repeat an event after the inbox has forgotten it."""
        until = optional_header(headers, RETRY_UNTIL)
        if self._warned or not (until.isascii() and until.isdigit() and len(until) < 12):
            return
        span, retention = int(until) - SYSTEM.time(), self.inbox.policy.ttl
        if span > retention:
            self._warned = True
            log.warning(
                "%s repeats a webhook for %.0f s, but the inbox forgets it after %.0f s, and would handle it again: "
                "say Inbox(guard, retention='%.0fd')",
                self.source,
                span,
                retention,
                math.ceil(span / 86400),
            )


class Handling:
    """An effect of a plan: the inbox handles one event.

    On an event loop, a plain handler runs on a thread, where it may block.  On a thread, an async handler runs on an event
    loop of its own.
    """

    def __init__(
        self, inbox: Inbox, operation: Operation, handler: Handler, envelope: Envelope, run_async: RunAsync
    ) -> None:
        self.begun = False  # whether the handler was called; an error may then be its own

        @functools.wraps(handler)
        def handle(op: Op, event: Envelope) -> Any:
            self.begun = True
            return handler(op, event)

        self._plan = inbox.received(operation, envelope, handle, 1, kept=structured(envelope))
        self._awaited = is_async(handler)
        self._run_async = run_async

    def run(self) -> Received:
        return self._run_async(arun(self._plan)) if self._awaited else run(self._plan)

    async def arun(self) -> Received:
        # The effect may happen from here on, so finish even if the sender goes away.
        return await finish_despite_cancel(arun(self._plan) if self._awaited else asyncio.to_thread(run, self._plan))


def parse(body: bytes) -> Any:
    """Return the JSON document in *body*.  Raise InvalidPayload if it is not JSON, or has more than one meaning."""
    read_json(body)
    try:
        return json.loads(body, parse_float=finite)
    except ValueError as error:  # an integer or a float that is too large for Python
        raise InvalidPayload(f"The body is not JSON: {error}") from error


def finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is larger than any number")
    return value


def now() -> str:
    return datetime.fromtimestamp(SYSTEM.time(), UTC).isoformat()


def refusal(error: OncemoreError) -> Response:
    """Return the response to a request that was refused."""
    return Response(error.status, [PROBLEM], encode_json(error.problem()))


def own_problem(status: int, title: str, detail: str, *, retryable: bool = False) -> Response:
    """Return a problem response for which oncemore has no error class."""
    members = {"type": "about:blank", "title": title, "status": status, "detail": detail, "retryable": retryable}
    return Response(status, [PROBLEM], encode_json(members))


WRONG_METHOD = own_problem(405, "The method is not allowed", "Webhooks are sent by POST")
WRONG_METHOD.headers.append(("allow", "POST"))


def unavailable(error: OncemoreError) -> Response:
    """Return the response to an event that is in progress or in doubt, or came while the store was down."""
    usual = RETRY_AFTER_UNKNOWN if isinstance(error, UnknownOutcome) else RETRY_AFTER
    seconds = max(1, math.ceil(usual if error.retry_after is None else error.retry_after))
    members = {**error.problem(), "status": 503, "retryable": True}
    if not isinstance(error, Refusal):  # its detail may name hosts, files and users
        members["detail"] = error.title
    return Response(503, [PROBLEM, ("retry-after", str(seconds))], encode_json(members))


async def refuse_other(scope: Scope, receive: Receive, send: Send) -> None:
    """Acknowledge that the server starts or stops the app, or close a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1003})
    while scope["type"] == "lifespan":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
