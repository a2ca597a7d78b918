"""The WSGI middleware: idempotency for any WSGI app, under any server.

app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=Guard("sqlite:///once.db"))
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..._contract.contract import Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.rule import idempotent
from ..._ledger.context import current_operation
from ..._runtime.plan import run
from ...errors import OncemoreError
from ..discovery import declare_flask
from ..door import Door
from ..etag import wsgi_etag
from ..problem import Response
from ..request import Request
from ..shadow import Shadow
from ..status import status_plan
from ..unserved import flask_served, warn_of_routes
from .environ import (
    can_be_observed,
    decode_path,
    note_flask_errors,
    put_back,
    read_body,
    read_to_observe,
    request_of,
)
from .response import App, Body, Environ, GuardedResponse, StartResponse, close, respond

__all__ = ["IdempotencyMiddleware", "current_operation", "idempotent"]


class IdempotencyMiddleware(Door[App]):
    """Guards the requests that the contract names; all others pass untouched.

    Rules may name a path with or without the prefix that the app is mounted at (SCRIPT_NAME).
    The options are keyword parameters: `help(IdempotencyMiddleware)` describes each.
    """

    needs_app = True
    _declared = False
    _declaring = threading.Lock()  # several first requests may come at the same time

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if not self._declared:
            self._declare(environ)
        method, inner = environ["REQUEST_METHOD"], decode_path(environ.get("PATH_INFO", ""))
        if method in SAFE_METHODS:
            lookups = (inner, decode_path(environ.get("SCRIPT_NAME", "")) + inner)
            if self.status_path in lookups and method in ("GET", "HEAD"):
                response = run(status_plan(self, request_of(environ)))
                return respond(start_response, response, head=method == "HEAD")
            return self.app(environ, start_response)
        request = request_of(environ)
        try:
            match = self.match(method, request.path, request.headers, environ, inner)
        except OncemoreError as error:
            return respond(start_response, self.refusal(error))
        if match is None:
            return self.app(environ, start_response)
        return self._guard(match, request, start_response)

    def _declare(self, environ: Environ) -> None:
        """Find the rules on the app's endpoints, at the first request, because routes may be added until then."""
        with self._declaring:
            if not self._declared:
                declare_flask(self.contract, self.app)
                note_flask_errors()
                self.rules_declared()
                prefix = decode_path(environ.get("SCRIPT_NAME", ""))
                warn_of_routes(self.contract, flask_served(self.app), self.status_path, prefix)
                self._declared = True

    def _guard(self, match: Match, request: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Call the app once for this key; every other request with the key gets the stored response."""
        environ = request.native
        if not self.enforces(match.rule):
            return self._observe(match, request, start_response)
        try:
            request = request.with_body(read_body(environ, match.rule))
        except OncemoreError as error:
            return respond(start_response, self.refusal(error, match))
        put_back(environ, request.body)
        mount = decode_path(environ.get("SCRIPT_NAME", ""))
        found = run(self.begin(match, request, wsgi_etag(self.app, environ), mount=mount))
        if found is None:
            return self.app(environ, start_response)
        if isinstance(found, Response):
            return respond(start_response, found)
        return GuardedResponse(found, environ, start_response).run()

    def _observe(self, match: Match, request: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Shadow mode: call the app as if there were no middleware, and note how it would have been answered."""
        environ, shadow = request.native, Shadow(self, match)
        statuses: list[int] = []
        if can_be_observed(environ, match.rule):
            request = request.with_body(read_to_observe(environ))
            run(shadow.begin(request))

        def start(line: str, *args: Any) -> Any:
            statuses.append(int(line[:3]))
            return start_response(line, *args)

        try:
            result = self.app(environ, start)
        except BaseException:
            run(shadow.end(None))
            raise
        if statuses:
            run(shadow.end(statuses[-1]))
            return result
        # The app calls start_response with its first chunk, while the server iterates.
        return Body(iter(result), partial(self._end_observed, result, shadow, statuses))

    def _end_observed(self, result: Iterable[bytes], shadow: Shadow, statuses: list[int]) -> None:
        try:
            close(result)
        finally:
            run(shadow.end(statuses[-1] if statuses else None))
