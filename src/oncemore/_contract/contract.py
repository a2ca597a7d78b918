"""The contract: the table of rules that doors enforce, tools check and documents show.

What a rule does not say, `[defaults]` say; what they do not, the profile says.  Reading a contract finds every fault in it,
and tells them all in one error, each with its rule, its line where there is a file, and the way to mend it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar, Unpack

from ..errors import ConfigurationError
from .loading import Said, Undeclared, python_rules, read_defaults, read_rules, reversal_faults, table_of, written_rules
from .paths import SAFE_METHODS, Matcher
from .problems import Faults, did_you_mean, listing
from .rule import Rule, attach, read_rule
from .settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


# A longer path is somebody's attempt to fill our memory.
LONGEST_REMEMBERED = 255


class Match(NamedTuple):
    """The rule that a request falls under, and what the parameters in its path stand for.

    *route* is what a key is scoped to: the name of a rule for one route, else the request's own method and path, so that
    `/t/1` and `/t/2` are two operations.
    """

    rule: Rule
    params: Mapping[str, str]
    route: str
    declared: bool = True


class Contract:
    """All rules of an application, and the default one for requests that no rule matches.

    Rules may be added while others read; each `match` sees the rules of one moment.
    """

    def __init__(
        self,
        *rules: Rule,
        profile: str = "default",
        undeclared: Undeclared = "guard if keyed",
        match: str | None = None,
        **defaults: Unpack[Settings],
    ) -> None:
        said = {"profile": profile, "undeclared": undeclared, **defaults} | ({"match": match} if match else {})
        self._begin("Contract", said, python_rules(rules), Faults())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Contract:
        """The contract in a TOML file."""
        try:
            written = Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark first
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{os.fspath(path)} cannot be read: {error}") from error
        return cls.parse(written, os.fspath(path))

    @classmethod
    def parse(cls, written: str, source: str = "contract") -> Contract:
        """The contract in a TOML text; *source* is what errors call it."""
        try:
            document = tomllib.loads(written)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{source} is not TOML: {error}") from error
        faults, contract = Faults(), cls.__new__(cls)
        for name in sorted(document.keys() - {"defaults", "rule"}):
            faults.found.append(f"[{name}] means nothing here{did_you_mean(name, ('defaults', 'rule'))}: drop it")
        said = list(written_rules(document.get("rule", []), written, faults))
        contract._begin(source, document.get("defaults", {}), said, faults)
        return contract

    def _begin(self, source: str, defaults: Mapping[str, Any], said: Sequence[Said], faults: Faults) -> None:
        self._source, self._lock = source, Lock()
        self.profile, self.undeclared, self._base = read_defaults(defaults, faults)
        self._table = table_of(list(read_rules(said, self._base, faults)), faults)
        faults.found += reversal_faults(self._table, (one.name for one in said))
        if faults.found:
            raise listing(source, faults.found)
        self.default = Rule.of(read_rule(None, {}, self._base)[0])
        self._fallback: Matcher[Rule] = Matcher()
        self._fallback.add(self.default.pattern, self.default)
        self._remember()

    def _remember(self) -> None:
        """Keep the latest matches: most requests go to few paths.  Begun anew whenever the rules change."""
        self._recent = lru_cache(maxsize=1024)(self._find)

    def match(self, method: str, path: str) -> Match | None:
        """The rule for a request, by its method and decoded path; None where there is nothing to guard.

        Safe methods have no rule.  For a request that no rule declares, the answer is the default rule or None, by
        *undeclared*; with `refuse`, the door refuses what is not declared.
        """
        return self._recent(method, path) if len(path) <= LONGEST_REMEMBERED else self._find(method, path)

    def _find(self, method: str, path: str) -> Match | None:
        method = method.upper()
        if method in SAFE_METHODS:
            return None
        found, own = self._table.matcher.find(method, path), f"{method} {path.rstrip('/') or '/'}"
        if found:
            rule, params = found
            return Match(rule, params, rule.name if rule.one_route else own)
        if self.undeclared == "refuse" or (self.undeclared != "pass" and self._fallback.find(method, path)):
            return Match(self.default, {}, own, declared=False)
        return None

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._table.rules

    @property
    def unscoped(self) -> tuple[str, ...]:
        """The names of the rules under which principals share keys; a door warns of each."""
        return tuple(rule.name for rule in (*self.rules, self.default) if rule.unscoped)

    def rule(self, name: str) -> Rule:
        """The rule of that name."""
        names = self._table.names
        if name not in names:
            raise ConfigurationError(f"{self._source} has no rule named {name!r}{did_you_mean(name, names)}")
        return names[name]

    def add(self, *rules: Rule) -> None:
        """Add rules, all or none of them; what they do not say, this contract's defaults say.

        A rule that is there already, word for word, is not added again: a door may find it on its function, too.
        """
        with self._lock:
            faults, known = Faults(), self._table.rules
            there = [(rule.match, rule.given) for rule in known]
            new = [rule for rule in rules if (rule.match, rule.given) not in there]
            table = table_of([*known, *read_rules(python_rules(new, len(known)), self._base, faults)], faults)
            if faults.found:
                raise listing(self._source, faults.found)
            self._table = table
            self._remember()

    def check(self) -> None:
        """Raise a ConfigurationError where rules name others that are not there; for doors, after all rules are added."""
        faults = reversal_faults(self._table)
        if faults:
            raise listing(self._source, faults)

    def idempotent(self, match: str, **settings: Unpack[Settings]) -> Callable[[F], F]:
        """A decorator that adds a rule, and attaches it to the function that serves it."""
        rule = Rule(match, **settings)

        def declare(function: F) -> F:
            self.add(rule)
            return attach(rule, function)

        return declare

    def table(self) -> list[dict[str, Any]]:
        """One row for each rule, with every setting that holds, for documents and tools."""
        return [rule.row() for rule in self.rules]
