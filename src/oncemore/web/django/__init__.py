"""The Django door: idempotency for sync and async views, under WSGI and ASGI.

MIDDLEWARE = [..., "django.contrib.auth.middleware.AuthenticationMiddleware", "oncemore.web.django.IdempotencyMiddleware"]
ONCEMORE = {"guard": "sqlite:///once.db", "contract": "oncemore.toml"}
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpRequest  # type: ignore[import-untyped]
from django.http.response import HttpResponseBase  # type: ignore[import-untyped]

from ..._contract.contract import Match
from ..._contract.paths import SAFE_METHODS
from ..._runtime.plan import Call, Plan, arun, run
from ...errors import OncemoreError
from ..current import current_operation, is_current, place_of
from ..door import Request
from ..environ import headers_of, matched, mount_of
from ..redrive import check_passed
from ..status import status_plan
from .response import Exchange, GetResponse, InThread, body_of, made
from .settings import check_place, door_from_settings
from .views import Views, exempt, idempotent, optional, required

__all__ = ["IdempotencyMiddleware", "current_operation", "exempt", "idempotent", "optional", "required"]

log = logging.getLogger("oncemore.web")


class IdempotencyMiddleware:
    """Guards the requests that the contract, or a decorator on their view, names; all others pass untouched."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response
        self.door = door_from_settings()
        self.views = Views(self.door.contract)
        self.door.declared()
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
        if self.door.principal is None:
            check_place(IdempotencyMiddleware)

    def __call__(self, request: HttpRequest) -> Any:
        plan = self._plan(request)
        if plan is None:
            return self.get_response(request)
        return protect(arun(plan)) if self._is_async else run(plan)

    def _plan(self, request: HttpRequest) -> Plan[HttpResponseBase] | None:
        """What to do with the request; None where it passes untouched."""
        if request.method in SAFE_METHODS:
            asks = self.door.status_path in (request.path, request.path_info) and request.method in ("GET", "HEAD")
            return self._status(request) if asks else None
        asked = request_of(request)
        found = self.views.match(request) or matched(self.door.contract, asked.method, asked.path, request.path_info)
        try:
            match = self.door.match(asked.method, asked.path, asked.headers, found)
            if match is None:
                check_passed(request)
        except OncemoreError as error:
            return self._refuse(error)
        return self._guard(match, request) if match is not None else None

    def _guard(self, match: Match, request: HttpRequest) -> Plan[HttpResponseBase]:
        operation = known = None
        try:
            asked = request_of(request, body_of(request, match.rule, self.door))
            operation = yield InThread(self.door.operation, match, asked)
            if operation is not None:
                known = self.door.guard.cached(operation, self.door.policy(match.rule))
        except OncemoreError as error:
            return made(self.door.refused(error, match, operation))
        if known is not None:
            return made(self.door.replayed(match.rule, known))
        if operation is None or is_current(operation, place_of(request)):
            return (yield Call(self.get_response, request))
        return (yield from self._run(Exchange(self.door, match, operation, asked, self.get_response)))

    def _run(self, exchange: Exchange) -> Plan[HttpResponseBase]:
        try:
            return (yield from exchange.run())
        except OncemoreError as error:
            if exchange.performed:
                raise
            if not self.door.runs_without(error, exchange.rule):
                native = exchange.request.native
                mount = mount_of(native.path, native.path_info)
                return made(self.door.refused(error, exchange.match, exchange.operation, mount))
            log.error("The store is down, and %s runs unguarded: %s", exchange.rule.name, error)
        return (yield Call(self.get_response, exchange.request.native))

    def _status(self, request: HttpRequest) -> Plan[HttpResponseBase]:
        try:
            return made((yield InThread(run, status_plan(self.door, request_of(request)))))
        except OncemoreError as error:
            return made(self.door.refused(error))

    def _refuse(self, error: OncemoreError) -> Plan[HttpResponseBase]:
        return made(self.door.refused(error))
        yield  # a plan without effects


def request_of(request: HttpRequest, body: bytes = b"") -> Request:
    meta = request.META
    return Request(request.method, request.path, meta.get("QUERY_STRING", ""), headers_of(meta), body, request)


running: set[asyncio.Task[Any]] = set()  # a loop alone would not keep them alive


async def protect(coroutine: Coroutine[Any, Any, HttpResponseBase]) -> HttpResponseBase:
    """The response, from a task that runs to its end also when the client has gone; only then is the request given up.

    Django ends the thread of a request's sync views with the request, so to leave before they do would block the loop.
    """
    task = asyncio.ensure_future(coroutine)
    running.add(task)
    task.add_done_callback(running.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        await abandon(task)
        raise


async def abandon(task: asyncio.Task[HttpResponseBase]) -> None:
    """Close a stream that nobody is going to send, for it may keep its lease until then."""
    if not task.cancelled() and task.exception() is None and task.result().streaming:
        await sync_to_async(task.result().close)()
