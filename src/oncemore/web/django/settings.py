"""The dictionary `settings.ONCEMORE`: the options of the middleware, in which a dotted path stands for an object."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import async_to_sync
from django.conf import settings  # type: ignore[import-untyped]
from django.core import mail  # type: ignore[import-untyped]
from django.utils.module_loading import import_string  # type: ignore[import-untyped]

from ..._contract.contract import Contract
from ..._contract.problems import did_you_mean
from ..._ledger.connect import DJANGO
from ..._ledger.guard import Guard
from ...errors import ConfigurationError
from ..request import HeaderPrincipal, Principal, is_async

SQLITE = "sqlite:///"
ASKED_ONCE = ("principal", "tenant")


def options_from_settings(middleware: Any) -> dict[str, Any]:
    """The keyword arguments for *middleware* that `settings.ONCEMORE` stands for."""
    given = getattr(settings, "ONCEMORE", None)
    if not isinstance(given, Mapping) or "guard" not in given:
        raise ConfigurationError('settings.ONCEMORE names no guard: write ONCEMORE = {"guard": "sqlite:///once.db"}')
    parameters = inspect.signature(middleware).parameters
    known = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            raise ConfigurationError(f"ONCEMORE: there is no setting {name!r}{did_you_mean(str(name), known)}")
    options = {name: value for name, value in given.items() if value is not None or name == "status_path"}
    for name in options.keys() & {*ASKED_ONCE, "redact", "rates"}:  # the rest are plain values
        options[name] = named(name, options[name])
    for name in options.keys() & set(ASKED_ONCE):
        if not isinstance(options[name], HeaderPrincipal):
            options[name] = asked_once(options[name])
    return {**options, "guard": guard_of(given["guard"]), "contract": contract_of(given.get("contract"))}


def guard_of(given: Any) -> Guard:
    """The guard at a URL, in a database of Django's (`django:default`), at a dotted path, or itself."""
    is_url = isinstance(given, str) and ("://" in given or given.startswith(DJANGO))
    if is_url and is_testing():  # a new one for each test client, and so for each test
        return Guard("memory://")
    found = guard_at(below_base_dir(given)) if is_url else named("guard", given)
    if not isinstance(found, Guard):
        raise ConfigurationError(f"ONCEMORE: the guard {given!r} is neither a Guard nor the URL of a store")
    return found


def is_testing() -> bool:
    """Whether Django's test environment is set up, as by `manage.py test` and pytest-django."""
    return hasattr(mail, "outbox")


def below_base_dir(url: str) -> str:
    """The URL with a relative file of SQLite's in BASE_DIR, so that it is the same whatever the working folder."""
    file = url.removeprefix(SQLITE)
    base = getattr(settings, "BASE_DIR", None)
    if not url.startswith(SQLITE) or file.startswith(("/", ":")) or base is None:
        return url
    return f"{SQLITE}{Path(base).absolute()}/{file}"


@lru_cache(maxsize=32)
def guard_at(url: str) -> Guard:
    """One guard for each URL, however many handlers there are: a test client makes one of its own."""
    return Guard(url)


def contract_of(given: Any) -> Contract | None:
    """The contract in a TOML file (beside manage.py, unless its path is absolute), at a dotted path, or itself."""
    if isinstance(given, Path) or (isinstance(given, str) and given.endswith(".toml")):
        return Contract.load(Path(getattr(settings, "BASE_DIR", ""), given))
    found = named("contract", given)
    if found is not None and not isinstance(found, Contract):
        raise ConfigurationError(f"ONCEMORE: the contract {given!r} is neither a Contract nor the path of a .toml file")
    return found


def named(name: str, given: Any) -> Any:
    """The object at a dotted path; anything but a text stands for itself."""
    if not isinstance(given, str):
        return given
    try:
        return import_string(given)
    except ImportError as error:
        raise ConfigurationError(f"ONCEMORE: {name} = {given!r} cannot be imported: {error}") from error


def asked_once(function: Principal) -> Principal:
    """The function, called once for each request: it may query the database, which would block an event loop."""
    answers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    call = async_to_sync(function) if is_async(function) else function

    def ask(request: Any) -> Any:
        if request not in answers:
            answers[request] = call(request)
        return answers[request]

    return ask


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
        "belong to the credentials in the headers, or to nobody.  Move it, or name a principal in ONCEMORE.",
        stacklevel=3,
    )
