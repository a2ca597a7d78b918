"""The Django door's settings: the dictionary ONCEMORE, in which a text may stand for what it names."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from django.conf import settings  # type: ignore[import-untyped]
from django.utils.module_loading import import_string  # type: ignore[import-untyped]

from ..._contract.contract import Contract
from ..._contract.problems import did_you_mean
from ..._ledger.connect import DJANGO
from ..._ledger.guard import Guard
from ...errors import ConfigurationError
from ..door import Door
from ..principal import Principal

OBJECTS = ("principal", "tenant", "redact", "rates")  # may be given by their dotted path
PLAIN = ("profile", "secrets", "keep_headers", "status_path", "problem_base")


def door_from_settings() -> Door:
    """The door that the settings describe."""
    said = getattr(settings, "ONCEMORE", None)
    if not isinstance(said, Mapping) or "guard" not in said:
        raise ConfigurationError('settings.ONCEMORE names no guard: write ONCEMORE = {"guard": "sqlite:///once.db"}')
    for name in said:
        known = ("guard", "contract", *OBJECTS, *PLAIN)
        if name not in known:
            raise ConfigurationError(f"ONCEMORE: there is no setting {name!r}{did_you_mean(str(name), known)}")
    options = {name: said[name] for name in PLAIN if said.get(name) is not None}
    options |= {name: named(name, said[name]) for name in OBJECTS if said.get(name) is not None}
    options |= {name: asked_once(options[name]) for name in ("principal", "tenant") if name in options}
    return Door(guard_of(said["guard"]), contract_of(said.get("contract")), **options)


def guard_of(said: Any) -> Guard:
    """The guard at a URL, in a database of Django's (`django:default`), at a dotted path, or itself."""
    is_url = isinstance(said, str) and ("://" in said or said.startswith(DJANGO))
    found = guard_at(said) if is_url else named("guard", said)
    if not isinstance(found, Guard):
        raise ConfigurationError(f"ONCEMORE: the guard {said!r} is neither a Guard nor the URL of a store")
    return found


@lru_cache(maxsize=32)
def guard_at(url: str) -> Guard:
    """One guard for each URL, however many handlers there are: a test client makes one of its own."""
    return Guard(url)


def contract_of(said: Any) -> Contract | None:
    """The contract in a TOML file (beside manage.py, unless its path is absolute), at a dotted path, or itself."""
    if isinstance(said, Path) or (isinstance(said, str) and said.endswith(".toml")):
        return Contract.load(Path(getattr(settings, "BASE_DIR", ""), said))
    found = named("contract", said)
    if found is not None and not isinstance(found, Contract):
        raise ConfigurationError(f"ONCEMORE: the contract {said!r} is neither a Contract nor the path of a .toml file")
    return found


def named(name: str, said: Any) -> Any:
    """What a dotted path stands for; everything else stands for itself."""
    if not isinstance(said, str):
        return said
    try:
        return import_string(said)
    except ImportError as error:
        raise ConfigurationError(f"ONCEMORE: {name} = {said!r} cannot be imported: {error}") from error


def asked_once(function: Principal) -> Principal:
    """The function, asked once for each request: it may query the database, which must not be waited for on a loop."""
    answers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @wraps(function)
    def ask(request: Any) -> Any:
        if request not in answers:
            answers[request] = function(request)
        return answers[request]

    return ask


def check_place(middleware: type) -> None:
    """Warn where *middleware* comes before the one that sets `request.user`, who owns the keys."""
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
