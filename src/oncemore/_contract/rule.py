"""A rule: one line of the contract.  It says whether and how an operation may be repeated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar, Unpack

from ..errors import ConfigurationError, InvalidPrincipal
from .keys import join
from .keysource import KeySource, key_source, key_table, merged_key
from .paths import Pattern
from .policy import Policy
from .problems import Problems, did_you_mean, listing
from .profiles import DEFAULT
from .settings import POLICY, SETTINGS, FingerprintSettings, Function, Rate, Settings, StatusHeader, text
from .templates import Template

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__oncemore__"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Rule:
    """The settings of the requests that match, as in `Rule("POST /refunds", key="required", ttl="30d")`.

    The attributes are the settings that apply, defaults included.  The guard's settings are in *policy*.  *given* has the
    settings as they were written.
    """

    match: str
    name: str
    pattern: Pattern
    policy: Policy
    key: KeySource
    scope: str | Function
    across_routes: str
    fingerprint: FingerprintSettings
    idempotent: bool
    enforce: bool
    reverses: str | None
    unique_by: Template | None
    if_match: bool
    rate: Rate | None
    retry: str | None
    retry_after: float
    first_sent: str
    status_header: StatusHeader
    replay_status: str | int
    streams: str
    store_down: str
    max_request: int
    max_response: int
    given: Mapping[str, Any] = field(compare=False)
    place: str = field(compare=False)  # the place where the rule was written, for errors

    def __init__(self, match: str | None = None, **settings: Unpack[Settings]) -> None:
        values, problems = read_rule(match, settings, DEFAULT)
        if problems:
            raise listing(f"Rule({match!r})" if match else "Rule()", problems)
        self._hold(values)

    def _hold(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Rule:
        """Return the rule with the attributes that `read_rule` found."""
        rule = cls.__new__(cls)
        rule._hold(values)
        return rule

    def __repr__(self) -> str:
        return f"Rule({', '.join([repr(self.match), *(f'{name}={value!r}' for name, value in self.given.items())])})"

    def at(self, match: str) -> Rule:
        """Return the same rule for the requests that match *match*."""
        return Rule(match, **self.given).written_at(self.place)

    def written_at(self, place: str) -> Rule:
        """Set the *place* where the rule was written, and return the rule."""
        object.__setattr__(self, "place", place)
        return self

    @property
    def unscoped(self) -> bool:
        """Whether principals share keys, and so may get each other's outcomes.  Middlewares warn of this."""
        return self.scope in ("resource", "global")

    @property
    def one_route(self) -> bool:
        """Whether its requests share their keys, because they have one method and path, or a template for the key."""
        single = len(self.pattern.methods) == 1 and "*" not in self.pattern.methods and not self.pattern.params
        return single or self.key.template is not None

    def scope_of(self, *, principal: str = "", tenant: str = "", custom: str = "", route: str = "") -> str:
        """Return the scope: the owner of the key, with the route.  Raise InvalidPrincipal if the owner is empty.

        *custom* is the value of the rule's own scope function.  *route* is the rule's name by default.
        """
        kind = self.scope if isinstance(self.scope, str) else "custom"
        owner = {"principal": principal, "tenant": tenant, "custom": custom}.get(kind, "*")
        if not owner:
            raise InvalidPrincipal(f"The {kind} that owns the key is empty, and keys without an owner are not accepted")
        route = "*" if kind == "global" or self.across_routes == "conflict" else route or self.name
        return join(route, kind, tenant, owner) if kind == "principal" and tenant else join(route, kind, owner)

    def row(self) -> dict[str, Any]:
        """Return every setting that applies, in plain values, as one row of the contract's table."""
        values = {name: getattr(self.policy if name in POLICY else self, name) for name in SETTINGS}
        return {"match": self.match, **{name: plain(value) for name, value in values.items()}}


def plain(value: object) -> object:
    if isinstance(value, KeySource):
        return str(value)
    if isinstance(value, Template):
        return value.text
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value


# ── Reading ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_rule(
    match: str | None, given: Mapping[str, Any], base: Mapping[str, Any], beside: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Read the settings *given* over those of *base*.  Return the attributes of the rule, and every problem found.

    If there are problems, some attributes are missing.  Without *match*, the rule is not bound to a path yet, and matches
    the requests that *base* matches.  *beside* are names that may be meant instead of an unknown setting.
    """
    problems = Problems()
    for name in given:
        if name not in SETTINGS:
            problems.append(f"{name}: there is no such setting{did_you_mean(name, (*SETTINGS, *beside))}")
    written: dict[str, Any] = {**base, **given}
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if name in written and setting.read is not None:
            with problems.collecting(name):
                values[name] = setting.read(written[name])
    with problems.collecting():
        values["pattern"] = Pattern(base["match"] if match is None else match)
    params = values["pattern"].params if match is not None and "pattern" in values else None
    with problems.collecting("key"):
        values["key"] = key_source(merged_key(base["key"], key_table(given.get("key", {}))), params)
    with problems.collecting("unique_by"):
        values["unique_by"] = Template(text(written["unique_by"]), params) if "unique_by" in written else None
    if not problems:
        problems += combinations(values, given)
    return (values if problems else attributes(values, given)), problems


def attributes(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of the rule: the guard's settings in a policy, and the others unchanged."""
    suspect, window = values.pop("suspect")
    policy = {name: values.pop(name) for name in POLICY.keys() & values.keys()}
    match = values["pattern"].text
    return {
        **dict.fromkeys(SETTINGS.keys() - POLICY),
        "name": match,
        **values,
        "match": match,
        "policy": Policy(**policy, suspect=suspect, suspect_window=window),
        "given": MappingProxyType(dict(given)),
        "place": "",
    }


def combinations(values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each combination of valid settings that do not work together."""
    if not values["idempotent"]:
        extra = [name for name in given if not SETTINGS[name].if_unguarded]
        if extra:
            yield f"idempotent: false leaves nothing to guard; drop {', '.join(extra)}, or the false"
        return
    for name, template in (("key", values["key"].template), ("unique_by", values["unique_by"])):
        if template and (problem := template.retention_problem(values["ttl"])):
            yield f"{name}: {problem}"
    if values["on_unknown"] == "resolve" and "resolver" not in values:
        yield "on_unknown: 'resolve' needs a resolver, the function that tells whether it happened"
    if "resolver" in given and values["on_unknown"] != "resolve":
        yield f"resolver: it is never called with on_unknown = {values['on_unknown']!r}; write on_unknown = 'resolve'"
    if "wait" in given and values["in_flight"] != "wait":
        yield f"wait: a duplicate does not wait with in_flight = {values['in_flight']!r}; drop one of them"
    if values["effect"] != "lease" and values["streams"] == "release":
        yield (
            "streams: 'release' keeps no outcome, so a retry would repeat a committed transaction, and finished steps would "
            f"be undone in the end; with effect = {values['effect']!r} write 'refuse' or 'store'"
        )
    if "reruns" in given and values["effect"] != "steps":
        yield (
            "reruns: if the database refuses its transaction, a request is not run again, but answered 503 with Retry-After, "
            "and its retry is safe; only the steps of effect = 'steps' are run again, so drop reruns"
        )
    if "on_refusal" in given and values["effect"] != "transaction":
        yield (
            f"on_refusal: with effect = {values['effect']!r} there is no transaction to roll back or to commit; drop it, or "
            "write effect = 'transaction'"
        )
    if values["effect"] == "steps" and values["if_match"]:
        yield (
            "if_match: with effect = 'steps', a request that continues would meet the changes of its own steps; compare "
            "the versions in a step"
        )
    if values["key"].source == "none" and values["if_match"]:
        yield "if_match: with key = 'none' nothing is guarded, and it would be ignored; give the rule a key"
    if values["unique_by"] is not None and values["if_match"]:
        yield "if_match: updates of one resource take turns, and unique_by would be ignored; drop one of them"
    if values["unique_by"] and values["unique_by"].constant and values["on_unique"] != "serialize":
        yield (
            f"unique_by: {values['unique_by'].text!r} is the same for all requests, so only one of them would run; write a "
            "field that tells them apart, as in '{body.orderId}'"
        )
    if "on_unique" in given and values["unique_by"] is None:
        yield "on_unique: it needs unique_by, the template of the name that must be unique"
    if values["fingerprint"].mode == "none":
        if values["suspect"][0] != "off":
            yield "suspect: it compares fingerprints, and fingerprint is 'none'; drop one of them"
        if values["across_routes"] == "conflict" or values["scope"] == "global":
            yield "fingerprint: with 'none', a key would be answered with another route's outcome; keep routes apart"


# ── Marking ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def idempotent(match: str | None = None, **settings: Unpack[Settings]) -> Callable[[F], F]:
    """Return a decorator that attaches a rule to a function.  The middleware that knows the function's route finds it."""
    check_called(match)
    rule = Rule(match, **settings)
    return lambda function: attach(rule, function)


def check_called(match: object) -> None:
    """Refuse a function in the place of a match: the decorator was written without its parentheses."""
    if callable(match):
        raise ConfigurationError(
            "@idempotent was written without parentheses: write @idempotent(), or @idempotent(key='required')"
        )


def attach(rule: Rule, function: F) -> F:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    place = f"@idempotent on {getattr(function, '__module__', '')}.{name}"
    setattr(function, MARK, copy.copy(rule).written_at(place))  # a copy, because several functions may share the rule
    return function


def rule_of(function: object) -> Rule | None:
    """Return the rule that a decorator attached to *function*, or None."""
    rule = getattr(function, MARK, None)
    return rule if isinstance(rule, Rule) else None
