"""A rule: one line of the contract, which says of an operation whether, and how, it may be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar, Unpack

from ..errors import ConfigurationError, InvalidPrincipal
from .keys import join
from .keysource import KeySource, key_source, key_table, merged_key
from .paths import Pattern
from .policy import Policy
from .problems import Faults, did_you_mean, listing
from .profiles import DEFAULT
from .readers import POLICY, READERS, text
from .settings import FingerprintSettings, Function, Rate, Settings, StatusHeader
from .templates import Template

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS = tuple(Settings.__annotations__)
# What a rule may say beside `idempotent = false`; everything else would promise a guard that is not there.
SAID_OF_UNGUARDED = frozenset({"name", "reverses", "idempotent", "retry"})
MARK = "__oncemore__"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Rule:
    """What the contract says of the requests that match, as in `Rule("POST /refunds", key="required", ttl="30d")`.

    The attributes are what holds, defaults included; what the guard needs of it is the policy.  *given* is what was said.
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

    def __init__(self, match: str | None = None, **settings: Unpack[Settings]) -> None:
        values, faults = read_rule(match, settings, DEFAULT)
        if faults:
            raise listing(f"Rule({match!r})" if match else "Rule()", faults)
        self._hold(values)

    def _hold(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Rule:
        """The rule with the attributes that read_rule found."""
        rule = cls.__new__(cls)
        rule._hold(values)
        return rule

    def __repr__(self) -> str:
        return f"Rule({', '.join([repr(self.match), *(f'{name}={value!r}' for name, value in self.given.items())])})"

    def at(self, match: str) -> Rule:
        """The same rule for the requests that match *match*."""
        return Rule(match, **self.given)

    @property
    def unscoped(self) -> bool:
        """Whether principals share keys, and so could be answered with each other's outcomes; doors warn of it."""
        return self.scope in ("resource", "global")

    @property
    def one_route(self) -> bool:
        """Whether its requests share their keys: one method and path, or a template that says what makes them one."""
        single = len(self.pattern.methods) == 1 and "*" not in self.pattern.methods and not self.pattern.params
        return single or self.key.template is not None

    def scope_of(self, *, principal: str = "", tenant: str = "", custom: str = "", route: str = "") -> str:
        """Who owns the key: the name of the route and of the owner; InvalidPrincipal when the owner has no name.

        *custom* is what the rule's own scope function returned.  *route* is the rule's name, unless given.
        """
        kind = self.scope if isinstance(self.scope, str) else "custom"
        owner = {"principal": principal, "tenant": tenant, "custom": custom}.get(kind, "*")
        if not owner:
            raise InvalidPrincipal(f"The {kind} that owns the key is empty, and keys without an owner are not accepted")
        route = "*" if kind == "global" or self.across_routes == "conflict" else route or self.name
        return join(route, kind, tenant, owner) if kind == "principal" and tenant else join(route, kind, owner)

    def row(self) -> dict[str, Any]:
        """Every setting that holds, in plain values, as one row of the contract's table."""
        of = {name: getattr(self.policy if name in POLICY else self, name) for name in SETTINGS}
        return {"match": self.match, **{name: plain(value) for name, value in of.items()}}


def plain(value: object) -> object:
    if isinstance(value, KeySource):
        return str(value)
    if isinstance(value, Template):
        return value.text
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value


# ── Reading ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_rule(
    match: str | None, given: Mapping[str, Any], base: Mapping[str, Any], beside: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The attributes of a rule that says *given* over *base*, and every fault found; with faults, not all are there.

    Without a match, the rule is not bound to a path yet, and takes the requests that *base* matches.  *beside* are
    names that may stand where the rule stands without being settings of it.
    """
    faults = Faults()
    for name in given:
        if name not in SETTINGS:
            faults.found.append(f"{name}: there is no such setting{did_you_mean(name, (*SETTINGS, *beside))}")
    said: dict[str, Any] = {**base, **given}
    values: dict[str, Any] = {}
    for name, read in READERS.items():
        if name in said:
            with faults.caught(name):
                values[name] = read(said[name])
    with faults.caught():
        values["pattern"] = Pattern(base["match"] if match is None else match)
    params = values["pattern"].params if match is not None and "pattern" in values else None
    with faults.caught("key"):
        values["key"] = key_source(merged_key(base["key"], key_table(given.get("key", {}))), params)
    with faults.caught("unique_by"):
        values["unique_by"] = Template(text(said["unique_by"]), params) if "unique_by" in said else None
    if not faults.found:
        faults.found += combinations(values, given)
    return (values if faults.found else attributes(values, given)), faults.found


def attributes(values: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The readings, sorted into what the guard needs (the policy) and what the doors need."""
    suspect, window = values.pop("suspect")
    policy = {name: values.pop(name) for name in POLICY & values.keys()}
    match = values["pattern"].text
    return {
        "name": match,
        "reverses": None,
        "rate": None,
        "retry": None,
        **values,
        "match": match,
        "policy": Policy(**policy, suspect=suspect, suspect_window=window),
        "given": MappingProxyType(dict(given)),
    }


def combinations(values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are right one by one, and wrong together."""
    if not values["idempotent"]:
        extra = [name for name in given if name not in SAID_OF_UNGUARDED]
        if extra:
            yield f"idempotent: false leaves nothing to guard; drop {', '.join(extra)}, or the false"
        return
    for name, template in (("key", values["key"].template), ("unique_by", values["unique_by"])):
        if template and (fault := template.forgotten(values["ttl"])):
            yield f"{name}: {fault}"
    if values["on_unknown"] == "resolve" and "resolver" not in values:
        yield "on_unknown: 'resolve' needs a resolver, the function that tells whether it happened"
    if "resolver" in given and values["on_unknown"] != "resolve":
        yield f"resolver: it is never asked with on_unknown = {values['on_unknown']!r}; write on_unknown = 'resolve'"
    if "wait" in given and values["in_flight"] != "wait":
        yield f"wait: nobody waits with in_flight = {values['in_flight']!r}; drop one of them"
    if values["effect"] == "transaction" and values["streams"] == "release":
        yield (
            "streams: 'release' forgets what a transaction has committed, so that a retry would repeat it; with effect = "
            "'transaction' write 'refuse' or 'store'"
        )
    if values["effect"] == "steps" and values["streams"] == "release":
        yield (
            "streams: 'release' leaves it unfinished when all of its steps are taken, and in the end they would be undone; "
            "with effect = 'steps' write 'refuse' or 'store'"
        )
    if "reruns" in given and values["effect"] != "steps":
        yield (
            "reruns: a request whose transaction the database refuses is not run again, but answered 503 with Retry-After, "
            "and its retry is safe; only the steps of effect = 'steps' are run again, so drop reruns"
        )
    if values["effect"] == "steps" and values["if_match"]:
        yield (
            "if_match: with effect = 'steps', a request that is gone on with would meet what its own steps have changed; "
            "compare the versions in a step"
        )
    if values["key"].source == "none" and values["if_match"]:
        yield "if_match: with key = 'none' nothing is guarded, and it would not be asked; give the rule a key"
    if values["unique_by"] is not None and values["if_match"]:
        yield "if_match: updates of one resource take turns, and unique_by would not be asked; drop one of them"
    if values["unique_by"] and values["unique_by"].constant and values["on_unique"] != "serialize":
        yield (
            f"unique_by: {values['unique_by'].text!r} is the same for all requests, of which only one would run; name what "
            "tells them apart, as in '{body.orderId}'"
        )
    if "on_unique" in given and values["unique_by"] is None:
        yield "on_unique: it needs unique_by, the template of what must be unique"
    if values["fingerprint"].mode == "none":
        if values["suspect"][0] != "off":
            yield "suspect: it compares fingerprints, and fingerprint is 'none'; drop one of them"
        if values["across_routes"] == "conflict" or values["scope"] == "global":
            yield "fingerprint: with 'none', a key would be answered with another route's outcome; keep routes apart"


# ── Marking ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def idempotent(match: str | None = None, **settings: Unpack[Settings]) -> Callable[[F], F]:
    """A decorator that only attaches a rule to a function, for a door that knows the function's route to find."""
    called(match)
    rule = Rule(match, **settings)
    return lambda function: attach(rule, function)


def called(match: object) -> None:
    """Refuse the function itself, which is what a decorator without its parentheses is given."""
    if callable(match):
        raise ConfigurationError(
            "idempotent is called before it decorates: write @idempotent(), or @idempotent(key='required')"
        )


def attach(rule: Rule, function: F) -> F:
    setattr(function, MARK, rule)
    return function


def rule_of(function: object) -> Rule | None:
    """The rule that a decorator attached to *function*, if any."""
    rule = getattr(function, MARK, None)
    return rule if isinstance(rule, Rule) else None
