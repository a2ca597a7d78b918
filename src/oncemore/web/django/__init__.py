"""The Django middleware: idempotency for sync and async views, under WSGI and ASGI.

MIDDLEWARE += ["oncemore.web.django.IdempotencyMiddleware"]
ONCEMORE = {"guard": "sqlite:///once.db", "contract": "oncemore.toml"}
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from operator import attrgetter
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpRequest  # type: ignore[import-untyped]
from django.http.response import HttpResponseBase  # type: ignore[import-untyped]

from ..._contract.contract import Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.policy import Policy
from ..._contract.rule import Rule
from ..._ledger.context import current_operation
from ..._ledger.model import Operation
from ..._runtime.loops import finish_despite_cancel
from ..._runtime.plan import Call, Plan, arun, run
from ...errors import OncemoreError
from ..door import Door
from ..problem import Response
from ..request import Request, mount_prefix
from ..shadow import Shadow
from ..status import status_plan
from ..wsgi.environ import can_be_observed
from ._compat import has_body
from .request import GetResponse, body_of, current_etag, request_of
from .response import GuardedResponse, InThread, to_django
from .settings import check_place, is_testing, options_from_settings
from .views import Views, exempt, idempotent, optional, required

__all__ = ["IdempotencyMiddleware", "current_operation", "exempt", "idempotent", "optional", "required"]


class IdempotencyMiddleware(Door[GetResponse]):
    """Guards the requests that the contract, or a decorator on their view, names; all others pass untouched.

    Options are in the dictionary `settings.ONCEMORE`, by the names of the parameters of `Door`.
    """

    can_await = False
    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        super().__init__(get_response, **options_from_settings(Door))
        self.views = Views(self.contract, self.status_path)
        self.rules_declared()
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
        if self.principal is None:
            check_place(IdempotencyMiddleware)

    def named(self, match: Match, request: Request) -> Plan[Operation | None]:
        return (yield InThread(self.operation, match, request))  # type: ignore[no-any-return]

    def check_effects(self) -> None:
        if not is_testing():
            super().check_effects()

    def policy(self, rule: Rule) -> Policy:
        """The rule's policy.  In tests the ledger is in memory, and a transaction runs under a lease: see the page on Django."""
        policy = super().policy(rule)
        lends = policy.effect != "transaction" or self.guard.store.lender is not None
        return policy if lends else policy.but(effect="lease")

    def __call__(self, request: HttpRequest) -> Any:
        plan = self._plan(request)
        if plan is None:
            return self.app(request)
        return protect(arun(plan)) if self._is_async else run(plan)

    def _plan(self, request: HttpRequest) -> Plan[HttpResponseBase] | None:
        """The plan for a request; None if it passes untouched."""
        if request.method in SAFE_METHODS:
            is_status = self.status_path in (request.path, request.path_info) and request.method in ("GET", "HEAD")
            return self._status(request) if is_status else None
        asked, found = request_of(request), self.views.match(request)
        try:
            match = self.match(asked.method, asked.path, asked.headers, request, request.path_info, found)
        except OncemoreError as error:
            return self._refuse(error)
        return self._guard(match, asked) if match is not None else None

    def _guard(self, match: Match, asked: Request) -> Plan[HttpResponseBase]:
        """Call the view once for this key; every other request with the key gets the stored response."""
        request = asked.native
        if not self.enforces(match.rule):
            return (yield from self._observe(match, asked))
        try:
            asked = asked.with_body(body_of(request, match.rule))
        except OncemoreError as error:
            return to_django(self.refusal(error, match))
        mount = mount_prefix(request.path, request.path_info)
        found = yield from self.begin(match, asked, current_etag(self.app, request), mount=mount)
        if found is None:
            return (yield Call(self.app, request))
        if isinstance(found, Response):
            return to_django(found)
        return (yield from GuardedResponse(self, match, found, request).run())

    def _observe(self, match: Match, asked: Request) -> Plan[HttpResponseBase]:
        """Shadow mode: call the view as if there were no middleware, and note what would have been done."""
        request, perform = asked.native, partial(self.app, asked.native)
        try:
            if not has_body(request) and not can_be_observed(request.META, match.rule):
                return (yield Call(perform))
            asked = asked.with_body(body_of(request, match.rule))
        except OncemoreError:  # another middleware has read the body as a stream
            return (yield Call(perform))
        return (yield from Shadow(self, match).around(asked, perform, attrgetter("status_code")))

    def _status(self, request: HttpRequest) -> Plan[HttpResponseBase]:
        return to_django((yield InThread(run, status_plan(self, request_of(request)))))

    def _refuse(self, error: OncemoreError) -> Plan[HttpResponseBase]:
        return to_django(self.refusal(error))
        yield  # a plan without effects


async def protect(coroutine: Coroutine[Any, Any, HttpResponseBase]) -> HttpResponseBase:
    """The response, from a task that runs to its end also if the client has gone; only then is the request given up.

    Django ends the thread of a request's sync views with the request, so to leave before they do would block the loop.
    """
    found: list[HttpResponseBase] = []

    async def finish() -> HttpResponseBase:
        found.append(await coroutine)
        return found[0]

    try:
        return await finish_despite_cancel(finish())
    except asyncio.CancelledError:
        for response in found:
            if response.streaming:  # it will not be sent, and may keep its lease until it is closed
                await sync_to_async(response.close)()
        raise
