"""The WSGI door: idempotency for any WSGI app, under any server.

app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=Guard("sqlite:///once.db"))
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Unpack

from ..._contract.contract import Contract, Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.rule import idempotent
from ..._ledger.guard import Guard
from ..._runtime.plan import run
from ...errors import OncemoreError
from ..current import current_operation, is_current
from ..door import Door, Request
from ..environ import decoded, headers_of, matched, put_back, read_body
from ..options import Options
from ..redrive import check_passed
from ..status import status_plan
from .flask_errors import note_errors
from .flask_routes import declare
from .response import App, Environ, Exchange, StartResponse, respond

__all__ = ["IdempotencyMiddleware", "current_operation", "idempotent"]

log = logging.getLogger("oncemore.web")


class IdempotencyMiddleware:
    """Guards the requests that the contract names; all others pass untouched.  Options are those of `Door`.

    Rules may name a path with or without the prefix that the app is mounted at (SCRIPT_NAME).
    """

    def __init__(
        self,
        app: App,
        *,
        guard: Guard,
        contract: Contract | None = None,
        profile: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.app = app
        self.door = Door(guard, contract, profile=profile, **options)
        self._declared = False
        self._declaring = threading.Lock()  # the first requests may come at once, and rules are declared once

    def _declare(self) -> None:
        """Find the rules on the app's endpoints: not before the first request, for routes may be added until then."""
        with self._declaring:
            if not self._declared:
                declare(self.door.contract, self.app)
                note_errors()
                self.door.declared()
                self._declared = True

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if not self._declared:
            self._declare()
        method, inner = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        if method in SAFE_METHODS:
            paths = (decoded(inner), decoded(environ.get("SCRIPT_NAME", "") + inner))
            if self.door.status_path in paths and method in ("GET", "HEAD"):
                return self._status(environ, start_response)
            return self.app(environ, start_response)
        request = request_of(environ)
        try:
            found = matched(self.door.contract, method, request.path, decoded(inner))
            match = self.door.match(method, request.path, request.headers, found)
            if match is None:
                check_passed(environ)
        except OncemoreError as error:
            return respond(start_response, self.door.refused(error))
        if match is None:
            return self.app(environ, start_response)
        return self._guard(match, request, start_response)

    def _guard(self, match: Match, request: Request, start_response: StartResponse) -> Iterable[bytes]:
        environ, operation = request.native, None
        try:
            body = read_body(environ, match.rule, self.door)
            request = request_of(environ, body)
            operation = self.door.operation(match, request)
            known = self.door.guard.cached(operation, self.door.policy(match.rule)) if operation is not None else None
        except OncemoreError as error:
            return respond(start_response, self.door.refused(error, match, operation))
        if known is not None:
            return respond(start_response, self.door.replayed(match.rule, known))
        put_back(environ, body)
        if operation is None or is_current(operation, environ):
            return self.app(environ, start_response)
        return self._run(Exchange(self.door, self.app, match, operation, request, start_response))

    def _run(self, exchange: Exchange) -> Iterable[bytes]:
        try:
            return exchange.run()
        except OncemoreError as error:
            if exchange.performed:
                raise
            if not self.door.runs_without(error, exchange.rule):
                mount = decoded(exchange.environ.get("SCRIPT_NAME", ""))
                refused = self.door.refused(error, exchange.match, exchange.operation, mount)
                return respond(exchange.start_response, refused)
            log.error("The store is down, and %s runs unguarded: %s", exchange.rule.name, error)
        return self.app(exchange.environ, exchange.start_response)

    def _status(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            response = run(status_plan(self.door, request_of(environ)))
        except OncemoreError as error:
            response = self.door.refused(error)
        return respond(start_response, response, head=environ["REQUEST_METHOD"] == "HEAD")


def request_of(environ: Environ, body: bytes = b"") -> Request:
    path = decoded(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))
    return Request(environ["REQUEST_METHOD"], path, environ.get("QUERY_STRING", ""), headers_of(environ), body, environ)
