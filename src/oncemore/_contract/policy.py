"""The policy of an operation: how long it is leased and kept, and the answer to a repeated one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints, overload

from ..errors import ConfigurationError, UnknownOutcome
from .problems import did_you_mean

if TYPE_CHECKING:

    class Seconds:
        """For type checkers: a field that is set to seconds or a text such as `"30d"`, and read as seconds."""

        @overload
        def __get__(self, instance: None, owner: type) -> Seconds: ...
        @overload
        def __get__(self, instance: object, owner: type) -> float: ...
        def __get__(self, instance: object, owner: type) -> Any: ...
        def __set__(self, instance: object, value: float | str) -> None: ...
else:
    Seconds = float


InFlight = Literal["wait", "conflict", "accepted"]
OnDuplicate = Literal["replay", "reject", "ok"]
OnUnknown = Literal["hold", "retry", "resolve"]
EffectLevel = Literal["lease", "transaction", "steps"]
Keep = Literal["final", "success", "all"]
TtlFrom = Literal["creation", "access"]
Expired = Literal["delete", "keep"]
Late = Literal["run", "refuse"]
Suspect = Literal["off", "log", "flag", "reject", "replay"]
OnUnique = Literal["replay", "reject", "serialize"]
OnMismatch = Literal[409, 422, 400]
OnRefusal = Literal["rollback", "commit"]

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
LONGEST = 100
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)


def duration(value: float | str) -> float:
    """Return seconds, from a number of seconds or from text such as `"30d"`, `"1h30m"` or `"250ms"`."""
    seconds: object = parse_duration(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ConfigurationError(
            f"{value!r} is not a duration: write seconds, or text such as '250ms', '30s', '1h30m', '30d'"
        )
    return float(seconds)


def parse_duration(text: str) -> float | None:
    """Return the seconds that a text such as `"1h30m"` stands for, or None if it is no duration."""
    if len(text) > LONGEST:  # to search a long text for parts would take long
        return None
    parts = DURATION.findall(text.strip())
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        return None
    return sum(float(number) * UNITS[unit] for number, unit in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one operation is guarded.  Durations are seconds or text such as `"30d"`; after construction, seconds.

    *lease* is how long a silent holder keeps the right to perform (it is renewed while the holder works); *ttl* is how
    long the outcome is kept.  *wait* bounds how long a duplicate waits for the running one.  *errors* are the exceptions
    that are an outcome, kept and raised again; after any other exception the operation may be tried again.
    *doubt* are the exceptions, and the statuses of responses, after which the outcome is unknown, such as time-outs,
    502 and 504.  Then *on_unknown* decides, as after a crash.  A transaction is rolled back, so it ignores them.
    *types* are the allowed classes of results, besides built-in types; `once` adds the classes in the return annotation.
    *reruns* is how often a transaction is run again if the database refuses it (a serialization failure, a deadlock).
    *on_refusal* tells whether a transaction rolls back or commits its rows if the answer is 400 or above.
    """

    lease: Seconds = "30s"  # type: ignore[assignment]
    ttl: Seconds = "24h"  # type: ignore[assignment]
    ttl_from: TtlFrom = "creation"
    expired: Expired = "delete"
    in_flight: InFlight = "wait"
    wait: Seconds = "10s"  # type: ignore[assignment]
    on_duplicate: OnDuplicate = "replay"
    on_mismatch: OnMismatch = 409
    keep: Keep | Callable[[Any], bool] = "final"
    errors: tuple[type[Exception], ...] = ()
    doubt: tuple[type[Exception] | int, ...] = ()
    types: tuple[type, ...] = ()
    effect: EffectLevel = "lease"
    on_unknown: OnUnknown = "hold"
    on_refusal: OnRefusal = "rollback"
    reruns: int = 3
    resolver: Callable[..., Any] | None = None
    on_unique: OnUnique = "replay"
    suspect: Suspect = "off"
    suspect_window: Seconds = "30s"  # type: ignore[assignment]
    late: Late = "run"

    def __post_init__(self) -> None:
        for name in ("lease", "ttl", "wait", "suspect_window"):
            object.__setattr__(self, name, duration(getattr(self, name)))
        if self.lease <= 0 or self.ttl <= 0:
            raise ConfigurationError(f"lease ({self.lease:g} s) and ttl ({self.ttl:g} s) must be longer than 0 s")
        if type(self.reruns) is not int or self.reruns < 0:
            raise ConfigurationError(f"reruns = {self.reruns!r} is not a number of times: write 0, 1, 2, ...")
        if not isinstance(self.errors, tuple) or not all(map(is_error, self.errors)):
            raise ConfigurationError(
                f"errors = {self.errors!r} is not a tuple of exceptions: write one such as (CardDeclined,)"
            )
        if not isinstance(self.doubt, tuple) or not all(is_error(each) or is_status(each) for each in self.doubt):
            raise ConfigurationError(
                f"doubt = {self.doubt!r} is not a tuple of exceptions and statuses: write one such as (TimeoutError, 502)"
            )
        if not isinstance(self.types, tuple) or not all(isinstance(kind, type) for kind in self.types):
            raise ConfigurationError(f"types = {self.types!r} is not a tuple of classes: write one such as (Order,)")
        for field in fields(self):
            check_choice(field.name, getattr(self, field.name))
        if self.on_unknown == "resolve" and not callable(self.resolver):
            raise ConfigurationError(
                "on_unknown = 'resolve' needs a resolver, the function that tells whether it happened"
            )

    def doubts(self, error: BaseException) -> bool:
        """Whether the outcome is unknown after the performer has raised *error*.

        If both `errors` and `doubt` name a class of *error*, the nearest one counts: a TimeoutError that `doubt` names is in
        doubt, although `errors` names its base class OSError.
        """
        if isinstance(error, UnknownOutcome):
            return True
        kinds = type(error).__mro__ if self.doubt else ()
        return next((kind in self.doubt for kind in kinds if kind in self.doubt or kind in self.errors), False)

    def but(self, **settings: Any) -> Policy:
        """Return a copy of this policy with other *settings*."""
        known = [field.name for field in fields(self)]
        for name in settings.keys() - set(known):
            raise ConfigurationError(f"there is no setting {name!r}{did_you_mean(name, known)}")
        return replace(self, **settings)


def is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def is_status(status: object) -> bool:
    return type(status) is int and 400 <= status <= 599


def check_choice(name: str, value: object) -> None:
    """Raise a ConfigurationError that lists the choices of the setting *name*, unless *value* is one of them."""
    choices = CHOICES.get(name)
    if choices and value not in choices and not (name == "keep" and callable(value)):
        raise ConfigurationError(f"{name} = {value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


def choices_of(annotation: object) -> tuple[object, ...]:
    """Return the choices that an annotation names in a Literal, which may stand beside other types."""
    literal = next((each for each in (annotation, *get_args(annotation)) if get_origin(each) is Literal), None)
    return get_args(literal)


CHOICES = {name: choices for name, hint in get_type_hints(Policy).items() if (choices := choices_of(hint))}
