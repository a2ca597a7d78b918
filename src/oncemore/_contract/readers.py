"""The readers of settings: what was written becomes what it means, or a ConfigurationError that says what to write."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from .._fingerprint.selection import check_selection, parse_fields
from ..errors import ConfigurationError
from .keysource import header_name
from .policy import CHOICES, Policy, duration
from .problems import did_you_mean
from .settings import FingerprintSettings, Function, Rate, StatusHeader

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
RATE = re.compile(r"([1-9]\d{0,8})/(.+)", re.ASCII)
SIZE = re.compile(r"(\d{1,12}) ?(B|kB|KB|MB|KiB|MiB)", re.ASCII)
SIZES = {"B": 1, "kB": 1000, "KB": 1000, "MB": 1000**2, "KiB": 1024, "MiB": 1024**2}
SCOPES = ("principal", "tenant", "resource", "global")
MODES = ("canonical", "raw", "none")
RETRIES = ("user_facing", "background_job", "webhook_delivery", "scheduled_task", "never")
STATUS_VALUES = {"stored": "stored", "replayed": "replayed", "unstored": "unstored"}
CENTURY = 100 * 366 * 86400.0


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigurationError(f"{value!r} is not a line of text")
    return value


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{value!r} is neither true nor false")
    return value


def span(value: Any) -> float:
    seconds = duration(value)
    if seconds > CENTURY:
        raise ConfigurationError(f"{value!r} is longer than a century")
    return seconds


def positive_span(value: Any) -> float:
    seconds = span(value)
    if seconds <= 0:
        raise ConfigurationError(f"{value!r} is no time at all: write a duration such as '30s'")
    return seconds


def one_of(*choices: object) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        if value not in choices or isinstance(value, bool | float):
            raise unknown(value, choices)
        return value

    return read


def unknown(value: object, choices: Iterable[object], more: str = "") -> ConfigurationError:
    told = {str(choice): repr(choice) for choice in choices}
    same = told.get(str(value))  # 409, where '409' was written
    hint = f" (did you mean {same}?)" if same else did_you_mean(str(value), told)
    return ConfigurationError(f"{value!r} is unknown{hint}: choose one of {', '.join(map(repr, choices))}{more}")


def function(value: object) -> Function:
    """A function, given as itself or as `"module:name"`."""
    if callable(value):
        return value
    if not isinstance(value, str) or not FUNCTION.fullmatch(value):
        raise ConfigurationError(f"{value!r} is not a function: write it as 'module:name'")
    module, _, path = value.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{value!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"{value!r} is not a function but {type(found).__name__!r}")
    return found  # type: ignore[no-any-return]


def choice_or_function(*choices: str) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        if isinstance(value, str) and ":" not in value:
            if value not in choices:
                raise unknown(value, choices, ", or a function as 'module:name'")
            return value
        return function(value)

    return read


def members(value: object, known: Iterable[str], what: str) -> dict[str, Any]:
    """A table that has only *known* members."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{value!r} is not {what}: write a text or a table")
    for name in value:
        if name not in known:
            raise unknown(name, known)
    return dict(value)


def fingerprint(value: object) -> FingerprintSettings:
    table = members(
        {"mode": value} if isinstance(value, str) else value, ("mode", "include", "exclude"), "a fingerprint"
    )
    mode = one_of(*MODES)(table.get("mode", "canonical"))
    include, exclude = table.get("include", ()), table.get("exclude", ())
    check_selection(parse_fields("include", include), parse_fields("exclude", exclude))
    if mode != "canonical" and (include or exclude):
        raise ConfigurationError(f"mode {mode!r} compares no fields: drop include and exclude, or the mode")
    return FingerprintSettings(mode, tuple(include), tuple(exclude))


def suspect(value: object) -> tuple[str, float]:
    """The action and its window in seconds."""
    table = members({"action": value} if isinstance(value, str) else value, ("action", "window"), "a suspicion")
    return one_of(*CHOICES["suspect"])(table.get("action", "log")), positive_span(table.get("window", 30.0))


def status_header(value: object) -> StatusHeader:
    if value == "":
        return StatusHeader()
    known = tuple(field.name for field in fields(StatusHeader))
    table = members({"name": value, **STATUS_VALUES} if isinstance(value, str) else value, known, "a status header")
    header_name(table.get("name"))
    return StatusHeader(**{name: text(said) for name, said in table.items()})


def rate(value: object) -> Rate:
    found = RATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigurationError(f"{value!r} is not a rate: write a number of new keys and a duration, as in '100/1m'")
    return Rate(int(found[1]), positive_span(found[2]))


def size(value: object) -> int:
    """Bytes, from a number or from text such as `"10MiB"`."""
    found = SIZE.fullmatch(value) if isinstance(value, str) else None
    if found:
        return int(found[1]) * SIZES[found[2]]
    if type(value) is not int or value < 0:
        raise ConfigurationError(f"{value!r} is not a size: write a number of bytes, or text such as '512KiB', '10MiB'")
    return value


def count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ConfigurationError(f"{value!r} is not a number of times: write 0, 1, 2, ...")
    return value


READERS: dict[str, Callable[[Any], Any]] = {
    "name": text,
    "reverses": text,
    "idempotent": flag,
    "scope": choice_or_function(*SCOPES),
    "across_routes": one_of("separate", "conflict"),
    "fingerprint": fingerprint,
    "ttl": positive_span,
    "lease": positive_span,
    "wait": span,
    "retry_after": span,
    "keep": choice_or_function("final", "success", "all"),
    "reruns": count,
    "resolver": function,
    "suspect": suspect,
    "first_sent": lambda value: "" if value == "" else header_name(value),
    "if_match": flag,
    "rate": rate,
    "retry": one_of(*RETRIES),
    "status_header": status_header,
    "replay_status": one_of("same", 200),
    "streams": one_of("refuse", "store", "release"),
    "store_down": one_of("refuse", "run"),
    "max_request": size,
    "max_response": size,
} | {
    name: one_of(*CHOICES[name])
    for name in (
        "ttl_from",
        "expired",
        "in_flight",
        "on_duplicate",
        "on_mismatch",
        "effect",
        "on_unknown",
        "on_unique",
        "late",
    )
}
POLICY = frozenset(field.name for field in fields(Policy))
