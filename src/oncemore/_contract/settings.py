"""The settings of a rule.  Each is declared once, in `Settings`: its type, reader, default and sentence of the reference.

A reader converts a written value, or raises a ConfigurationError that tells how to write it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from .._fingerprint.fingerprint import Fingerprinter, Mode
from ..errors import ConfigurationError
from .keysource import MEMBERS, flag, header_name
from .policy import (
    EffectLevel,
    Expired,
    InFlight,
    Keep,
    Late,
    OnDuplicate,
    OnMismatch,
    OnRefusal,
    OnUnique,
    OnUnknown,
    Policy,
    Suspect,
    TtlFrom,
    choices_of,
    duration,
    is_error,
    is_status,
)
from .problems import unknown

Scope = Literal["principal", "tenant", "resource", "global"]
Across = Literal["separate", "conflict"]
RetryPreset = Literal["user_facing", "background_job", "webhook_delivery", "scheduled_task", "never"]
ReplayStatus = Literal["same", 200]
Streams = Literal["refuse", "store", "release"]
StoreDown = Literal["refuse", "run"]
Function = Callable[..., Any]

EXPIRES = "Idempotency-Expires"


@dataclass(frozen=True, slots=True)
class FingerprintSettings:
    """How bodies are compared, and by which fields, to tell whether two requests are the same."""

    mode: str = "canonical"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StatusHeader:
    """The response header that says how the answer came.  A header without a name or a value is not sent.

    *expires* is the name of the header that says until when the outcome is kept.
    """

    name: str = ""
    stored: str = ""
    replayed: str = ""
    unstored: str = ""
    refused: str = ""
    expires: str = EXPIRES


@dataclass(frozen=True, slots=True)
class Rate:
    """The limit of new keys: a principal may use *count* of them in *window* seconds."""

    count: int
    window: float


# ── Readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
RATE = re.compile(r"([1-9]\d{0,8})/(.+)", re.ASCII)
SIZE = re.compile(r"(\d{1,12}) ?(B|kB|KB|MB|KiB|MiB)", re.ASCII)
SIZES = {"B": 1, "kB": 1000, "KB": 1000, "MB": 1000**2, "KiB": 1024, "MiB": 1024**2}
STATUS_VALUES = {"stored": "stored", "replayed": "replayed", "unstored": "unstored"}
CENTURY = 100 * 366 * 86400.0


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigurationError(f"{value!r} is not a line of text: write one line of printable characters")
    return value


def span(value: Any) -> float:
    seconds = duration(value)
    if seconds > CENTURY:
        raise ConfigurationError(f"{value!r} is longer than a century: write a shorter duration")
    return seconds


def positive_span(value: Any) -> float:
    seconds = span(value)
    if seconds <= 0:
        raise ConfigurationError(f"{value!r} is not longer than 0 s: write a duration such as '30s'")
    return seconds


def one_of(value: object, choices: tuple[object, ...], or_function: bool = False) -> Any:
    """Return *value* if it is one of the choices.  With *or_function*, it may also be a function or its name."""
    if or_function and not (isinstance(value, str) and ":" not in value):
        return function(value)
    if value not in choices or isinstance(value, bool | float):
        raise unknown(value, choices, ", or a function as 'module:name'" if or_function else "")
    return value


def function(value: object) -> Function:
    """Return a function, given as itself or as `"module:name"`."""
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


def members(value: object, known: Iterable[str], what: str) -> dict[str, Any]:
    """Return a table that has only *known* members."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{value!r} is not {what}: write a text or a table")
    for name in value:
        if name not in known:
            raise unknown(name, known)
    return dict(value)


def fingerprint(value: object) -> FingerprintSettings:
    known = tuple(field.name for field in fields(FingerprintSettings))
    checked = Fingerprinter(**members({"mode": value} if isinstance(value, str) else value, known, "a fingerprint"))
    return FingerprintSettings(checked.mode, tuple(checked.include), tuple(checked.exclude))


def suspect(value: object) -> tuple[str, float]:
    """Return the action and its window in seconds."""
    table = members({"action": value} if isinstance(value, str) else value, ("action", "window"), "a suspicion")
    return one_of(table.get("action", "log"), get_args(Suspect)), positive_span(table.get("window", 30.0))


def status_header(value: object) -> StatusHeader:
    if value == "":
        return StatusHeader()
    known = tuple(field.name for field in fields(StatusHeader))
    table = members({"name": value, **STATUS_VALUES} if isinstance(value, str) else value, known, "a status header")
    header_name(table.get("name"))
    expires = optional_header_name(table.pop("expires", EXPIRES))
    return StatusHeader(**{name: text(value) for name, value in table.items()}, expires=expires)


def rate(value: object) -> Rate:
    found = RATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigurationError(f"{value!r} is not a rate: write a number of new keys and a duration, as in '100/1m'")
    return Rate(int(found[1]), positive_span(found[2]))


def size(value: object) -> int:
    """Return bytes, from a number or from text such as `"10MiB"`."""
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


def doubt(value: object) -> tuple[type[Exception] | int, ...]:
    """Return statuses and exceptions, from a list of statuses and of classes, given as themselves or as `"module:Class"`."""
    if not isinstance(value, list | tuple):
        raise ConfigurationError(
            f"{value!r} is not a list of statuses and exceptions: write one, as in [502, 504, 'httpx:TimeoutException']"
        )
    found: tuple[Any, ...] = tuple(function(each) if isinstance(each, str) else each for each in value)
    for each in found:
        if not is_error(each) and not is_status(each):
            raise ConfigurationError(
                f"{each!r} is neither a status from 400 to 599 nor an exception: write 502 or 'httpx:TimeoutException'"
            )
    return found


def optional_header_name(value: object) -> str:
    return "" if value == "" else header_name(value)


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting.

    Args:
        read: Its reader.  A setting needs none if its type has choices; `read_rule` reads `key` and `unique_by`, because
            they depend on the rule's path.
        default: The value if the rule, `[defaults]` and the profile give none; None if the setting has no default.
            Settings of the guard's policy have the default that `Policy` gives them.
        only_in_rules: Whether `[defaults]` must not give it, because it identifies a rule, or would be dangerous for all.
        if_unguarded: Whether a rule may give it beside `idempotent = false`.
        doc: Its meaning, in the words of the reference page.
        choices: The choices of its type.
    """

    read: Callable[[Any], Any] | None = None
    default: Any = None
    only_in_rules: bool = False
    if_unguarded: bool = False
    doc: str
    choices: tuple[object, ...] = ()


# fmt: off
class Settings(TypedDict, total=False):
    """The settings that a rule, `[defaults]` or a decorator may give.

    Durations are seconds or text; functions are given as themselves or as `"module:name"`.
    """

    name: Annotated[str, Setting(read=text, only_in_rules=True, if_unguarded=True,
        doc="the name of the operation in the ledger, in events and in the status lookup; its `match`, unless given")]
    reverses: Annotated[str, Setting(read=text, only_in_rules=True, if_unguarded=True,
        doc="which operation this one undoes; both must be in the contract")]
    idempotent: Annotated[bool, Setting(read=flag, default=True, only_in_rules=True, if_unguarded=True,
        doc="false: never guarded, on purpose")]
    enforce: Annotated[bool, Setting(read=flag, default=True,
        doc="false: [shadow mode](../howto/introduce.md). Requests pass untouched; what would be done with them is reported")]
    key: Annotated[str | Mapping[str, Any], Setting(default={"from": "header", **MEMBERS["header"]},
        doc="the source of the operation's key")]
    scope: Annotated[Scope | str | Function, Setting(default="principal",
        doc="who owns the key; or a function. All callers share `resource` and `global`, and middlewares warn of them")]
    across_routes: Annotated[Across, Setting(default="separate",
        doc="the same key on another route: another operation, or refused")]
    fingerprint: Annotated[Mode | Mapping[str, Any], Setting(read=fingerprint, default="canonical",
        doc="how requests are compared (`unordered`: the fields of a form in any order); or a table with `include` or `exclude`, "
        "lists of members of the body")]
    ttl: Annotated[float | str, Setting(read=positive_span,
        doc="how long the outcome is kept: longer than anyone retries")]
    ttl_from: Annotated[TtlFrom, Setting(doc="counted from the time at which the outcome was stored, or from the last replay")]
    expired: Annotated[Expired, Setting(doc="expired records are deleted, or archived for the audit")]
    lease: Annotated[float | str, Setting(read=positive_span,
        doc="how long a silent holder keeps the right to perform; renewed while it works")]
    in_flight: Annotated[InFlight, Setting(
        doc="a duplicate of a running operation waits, gets 409, or 202 with a status URL")]
    wait: Annotated[float | str, Setting(read=span, doc="how long it waits, at most")]
    retry_after: Annotated[float | str, Setting(read=span, default="1s", doc="the `Retry-After` of a 409 or 202")]
    on_duplicate: Annotated[OnDuplicate, Setting(
        doc="a repeat gets the first outcome, 409, or an empty 200")]
    on_mismatch: Annotated[OnMismatch, Setting(doc="the status for another payload under a used key")]
    keep: Annotated[Keep | str | Function, Setting(
        doc="which outcomes are final: 2xx and deterministic 4xx, only 2xx, or all but 401, 403, 408, 425 and 429; or "
        "a function of the outcome")]
    effect: Annotated[EffectLevel, Setting(
        doc="the [level](../explain/guarantees.md) of the guarantee")]
    on_refusal: Annotated[OnRefusal, Setting(
        doc='with `effect = "transaction"`: an answer of 400 or above rolls back what was written, or commits it; a refusal '
        "that the rule keeps is stored in either case")]
    on_unknown: Annotated[OnUnknown, Setting(
        doc="what follows if a process died in mid-operation: see [Unknown outcomes](../howto/unknown.md)")]
    doubt: Annotated[Sequence[int | str | type[Exception]], Setting(read=doubt,
        doc="the statuses and exceptions after which nobody knows whether it took effect, such as `502`, `504` and "
        '`"httpx:TimeoutException"`: `on_unknown` decides. Ignored with `effect = "transaction"`, which is rolled back')]
    reruns: Annotated[int, Setting(read=count,
        doc='with `effect = "steps"`: how often a step that the database refused (a deadlock, a serialization '
        'failure) is run again; a request with `effect = "transaction"` is not, but gets 503')]
    resolver: Annotated[str | Function, Setting(read=function,
        doc='with `on_unknown = "resolve"`: asks whether it happened')]
    unique_by: Annotated[str, Setting(doc="a name that must be unique whatever the key: one payment per order")]
    on_unique: Annotated[OnUnique, Setting(
        doc="what the second gets: the first outcome, 409; or `serialize`: they run one after the other")]
    suspect: Annotated[Suspect | Mapping[str, Any], Setting(read=suspect,
        doc="the same request under another key within 30 s; or a table with `action` and `window`")]
    late: Annotated[Late, Setting(
        doc="a key of known age that is older than `ttl`: runs as new, or 412")]
    first_sent: Annotated[str, Setting(read=optional_header_name, default="",
        doc="the header with the time of the first sending")]
    if_match: Annotated[bool, Setting(read=flag, default=False,
        doc="true: 428 without `If-Match`, 412 on a stale ETag, 400 without a key, one update of a resource at a time")]
    rate: Annotated[str, Setting(read=rate, doc="how many new keys a principal may use in that time; 429 above")]
    retry: Annotated[RetryPreset, Setting(if_unguarded=True, doc="the retry preset for callers; shown in OpenAPI")]
    status_header: Annotated[str | Mapping[str, str], Setting(read=status_header, default="Idempotency-Status",
        doc="tells `stored`, `replayed` or `unstored`; or a table with a text for each, and in `expires` the name of the header "
        "with the end of the retention; empty: none")]
    replay_status: Annotated[ReplayStatus, Setting(default="same", doc="the status of a replay")]
    streams: Annotated[Streams, Setting(default="refuse",
        doc="a response without a length: a retry is refused, gets it again, or runs it again")]
    store_down: Annotated[StoreDown, Setting(default="refuse",
        doc="if the ledger cannot be reached: 503, or run unguarded, with a warning")]
    max_request: Annotated[int | str, Setting(read=size, default="10MiB", doc="a longer request is refused with 413")]
    max_response: Annotated[int | str, Setting(read=size, default="1MiB",
        doc="a longer response is sent but not kept; a retry is refused")]
# fmt: on


# The settings of the guard's policy, with their defaults.  All others belong to the rule itself.
POLICY = {field.name: field.default for field in fields(Policy)}


def declared(name: str, hint: Any) -> Setting:
    """Return the setting in an annotation of `Settings`, with the choices that its type has."""
    written: Any = hint.__origin__
    setting: Setting = hint.__metadata__[0]
    choices = choices_of(written)
    usual = partial(one_of, choices=choices, or_function=Function in get_args(written)) if choices else None
    default = POLICY.get(name, setting.default)
    return replace(setting, read=setting.read or usual, default=default, choices=choices)


SETTINGS = {name: declared(name, hint) for name, hint in get_type_hints(Settings, include_extras=True).items()}
