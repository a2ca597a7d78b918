"""The Django middleware: idempotency for sync and async views, under WSGI and ASGI.

MIDDLEWARE += ["oncemore.web.django.IdempotencyMiddleware"]
ONCEMORE = {"guard": "sqlite:///once.db", "contract": "oncemore.toml"}
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction
from django.conf import settings  # type: ignore[import-untyped]
from django.core import mail  # type: ignore[import-untyped]
from django.http import HttpRequest  # type: ignore[import-untyped]
from django.http.response import HttpResponseBase  # type: ignore[import-untyped]
from django.utils.module_loading import import_string  # type: ignore[import-untyped]

from ..._contract.contract import Contract, Match
from ..._contract.paths import SAFE_METHODS
from ..._contract.policy import Policy
from ..._contract.problems import did_you_mean
from ..._contract.rule import Rule
from ..._ledger.connect import DJANGO
from ..._ledger.context import current_operation
from ..._ledger.guard import Guard
from ..._ledger.model import Operation
from ..._runtime.plan import Call, Plan, arun, run
from ...errors import ConfigurationError, OncemoreError
from ..door import Caller, Door
from ..problem import Response
from ..request import Request, is_async, mount_prefix
from ..shadow import Shadow
from ..status import status_plan
from .request import GetResponse, body_of, can_be_read, current_etag, request_of
from .response import GuardedResponse, InThread, ToTheEnd, to_django
from .views import Views, exempt, idempotent, optional, required

__all__ = ["IdempotencyMiddleware", "current_operation", "exempt", "idempotent", "optional", "required"]

SQLITE = "sqlite:///"


class IdempotencyMiddleware(Door[GetResponse]):
    """Guards the requests that the contract, or a decorator on their view, names; all others pass untouched.

    Its options are in the dictionary `settings.ONCEMORE`, and have the names of the parameters of `Door`.
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

    def operation(self, match: Match, request: Request) -> Plan[tuple[Operation | None, Caller]]:
        return (yield InThread(run, super().operation(match, request)))  # type: ignore[no-any-return]

    def check_effects(self) -> None:
        if not is_testing():
            super().check_effects()

    def policy(self, rule: Rule) -> Policy:
        """Return the rule's policy.  In tests the ledger is in memory, so `effect = "transaction"` becomes a lease."""
        policy = super().policy(rule)
        lends = policy.effect != "transaction" or self.guard.store.lender is not None
        return policy if lends else policy.but(effect="lease")

    def __call__(self, request: HttpRequest) -> Any:
        plan = self._plan(request)
        if plan is None:
            return self.app(request)
        return arun(plan) if self._is_async else run(plan)

    def _plan(self, request: HttpRequest) -> Plan[HttpResponseBase] | None:
        """Return the plan for a request, or None if it passes untouched."""
        if request.method in SAFE_METHODS:
            is_status = self.status_path in (request.path, request.path_info) and request.method in ("GET", "HEAD")
            return self._status(request) if is_status else None
        asked, found = request_of(request), self.views.match(request)
        try:
            match = self.match(asked.method, asked.path, asked.headers, request, request.path_info, found)
        except OncemoreError as error:
            return self._refuse(error)
        if match is None:
            return None
        return self._guard(match, asked) if self.enforces(match.rule) else self._observe(match, asked)

    def _guard(self, match: Match, asked: Request) -> Plan[HttpResponseBase]:
        """Call the view once for this key; every other request with the key gets the stored response."""
        return (yield ToTheEnd(self._call_once(match, asked)))

    def _call_once(self, match: Match, asked: Request) -> Plan[HttpResponseBase]:
        request = asked.native
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
        return (yield from GuardedResponse(found, request).run())

    def _observe(self, match: Match, asked: Request) -> Plan[HttpResponseBase]:
        """Shadow mode: call the view as if there were no middleware, and note how it would have been answered."""
        request, perform = asked.native, partial(self.app, asked.native)
        try:
            if not can_be_read(request, match.rule):
                return (yield Call(perform))
            asked = asked.with_body(body_of(request, match.rule))
        except OncemoreError:  # for instance, another middleware has read the body as a stream
            return (yield Call(perform))
        return (yield from Shadow(self, match).around(asked, perform, attrgetter("status_code")))

    def _status(self, request: HttpRequest) -> Plan[HttpResponseBase]:
        return to_django((yield InThread(run, status_plan(self, request_of(request)))))

    def _refuse(self, error: OncemoreError) -> Plan[HttpResponseBase]:
        return to_django(self.refusal(error))
        yield  # a plan without effects


# The dictionary `settings.ONCEMORE`: the options of the middleware; a dotted path stands for an object


def options_from_settings(middleware: Any) -> dict[str, Any]:
    """Return the keyword arguments for *middleware*, made from `settings.ONCEMORE`."""
    given = getattr(settings, "ONCEMORE", None)
    if not isinstance(given, Mapping) or "guard" not in given:
        raise ConfigurationError('settings.ONCEMORE names no guard: write ONCEMORE = {"guard": "sqlite:///once.db"}')
    parameters = inspect.signature(middleware).parameters
    known = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            raise ConfigurationError(f"ONCEMORE: there is no setting {name!r}{did_you_mean(str(name), known)}")
    options = {name: value for name, value in given.items() if value is not None or name == "status_path"}
    for name in options.keys() & {"principal", "tenant", "redact", "rates"}:  # the rest are plain values
        options[name] = import_named(name, options[name])
        if name in ("principal", "tenant") and is_async(options[name]):  # the middleware calls it in a thread
            options[name] = async_to_sync(options[name])
    return {**options, "guard": guard_of(given["guard"]), "contract": contract_of(given.get("contract"))}


def guard_of(given: Any) -> Guard:
    """Return the guard at a URL, in a database of Django (`django:default`), or at a dotted path; or *given* itself."""
    is_url = isinstance(given, str) and ("://" in given or given.startswith(DJANGO))
    if is_url and is_testing():  # a new guard for each test client, and so for each test
        return Guard("memory://")
    found = guard_at(below_base_dir(given)) if is_url else import_named("guard", given)
    if not isinstance(found, Guard):
        raise ConfigurationError(f"ONCEMORE: the guard {given!r} is neither a Guard nor the URL of a store")
    return found


def is_testing() -> bool:
    """Whether Django's test environment is set up: `manage.py test` and pytest-django do so."""
    return hasattr(mail, "outbox")


def below_base_dir(url: str) -> str:
    """Return the URL.  If it is a relative SQLite file, put it into BASE_DIR, so that the working folder does not matter."""
    file = url.removeprefix(SQLITE)
    base = getattr(settings, "BASE_DIR", None)
    if not url.startswith(SQLITE) or file.startswith(("/", ":")) or base is None:
        return url
    return f"{SQLITE}{Path(base).absolute()}/{file}"


@lru_cache(maxsize=32)
def guard_at(url: str) -> Guard:
    """Return the guard at the URL, always the same object: Django may make the middleware several times."""
    return Guard(url)


def contract_of(given: Any) -> Contract | None:
    """Return the contract in a TOML file (relative to BASE_DIR), or at a dotted path; or *given* itself."""
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".toml")):
        return Contract.load(Path(getattr(settings, "BASE_DIR", ""), given))
    found = import_named("contract", given)
    if found is not None and not isinstance(found, Contract):
        raise ConfigurationError(f"ONCEMORE: the contract {given!r} is neither a Contract nor the path of a .toml file")
    return found


def import_named(name: str, given: Any) -> Any:
    """Return the object at a dotted path; return anything but a text as it is."""
    if not isinstance(given, str):
        return given
    try:
        return import_string(given)
    except ImportError as error:
        raise ConfigurationError(f"ONCEMORE: {name} = {given!r} cannot be imported: {error}") from error


def check_place(middleware: type) -> None:
    """Warn if *middleware* comes before the one that sets `request.user`, the owner of the keys."""
    for path in settings.MIDDLEWARE:
        found = import_string(path)
        lineage = inspect.getmro(found) if inspect.isclass(found) else ()
        if any(kind.__name__ == "AuthenticationMiddleware" for kind in lineage):
            return
        if middleware in lineage:
            break
    warnings.warn(
        "IdempotencyMiddleware is not after AuthenticationMiddleware in MIDDLEWARE, so it cannot see request.user: keys "
        "belong to the credentials in the headers, or to no principal.  Move it, or name a principal in ONCEMORE.",
        stacklevel=3,
    )
