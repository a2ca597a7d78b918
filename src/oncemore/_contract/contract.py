"""The contract: the table of rules that middlewares enforce, tools check and documents show.

A setting that a rule does not give comes from `[defaults]`, and else from the profile.  Reading a contract finds every
problem in it and reports them in one error, each with its rule, its line if there is a file, and its remedy.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Unpack

from ..errors import ConfigurationError
from .loading import (
    Undeclared,
    WrittenRule,
    read_defaults,
    read_rules,
    reversal_problems,
    rules_in_file,
    rules_in_python,
    table_of,
)
from .paths import SAFE_METHODS
from .problems import Problems, did_you_mean, listing
from .rule import Rule, read_rule
from .settings import Settings

# Longer paths are not remembered: clients could fill the memory with them.
LONGEST_REMEMBERED = 255


class Match(NamedTuple):
    """The rule of a request, and the values of the parameters in its path.

    *route* is the scope of the key: the name of the rule if it has one route, else the request's own method and path, so
    that `/t/1` and `/t/2` are two operations.
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
        given = {"profile": profile, "undeclared": undeclared, **defaults} | ({"match": match} if match else {})
        self._read("Contract", given, rules_in_python(rules), Problems())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Contract:
        """Return the contract in a TOML file."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{os.fspath(path)} cannot be read: {error}") from error
        return cls.parse(text, os.fspath(path))

    @classmethod
    def parse(cls, text: str, source: str = "contract") -> Contract:
        """Return the contract in a TOML text; errors call it *source*."""
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{source} is not TOML: {error}") from error
        problems, contract = Problems(), cls.__new__(cls)
        for name in sorted(document.keys() - {"defaults", "rule"}):
            problems.append(f"[{name}] means nothing here{did_you_mean(name, ('defaults', 'rule'))}: drop it")
        rules = list(rules_in_file(document.get("rule", []), text, problems))
        contract._read(source, document.get("defaults", {}), rules, problems)
        return contract

    def _read(self, source: str, defaults: Mapping[str, Any], rules: Sequence[WrittenRule], problems: Problems) -> None:
        self._source, self._lock = source, Lock()
        self.profile, self.undeclared, self._base = read_defaults(defaults, problems)
        self._table = table_of(list(read_rules(rules, self._base, problems)), problems)
        problems += reversal_problems(self._table, (rule.name for rule in rules))
        if problems:
            raise listing(source, problems)
        self.default = Rule.of(read_rule(None, {}, self._base)[0])
        self._remember()

    def _remember(self) -> None:
        """Remember the latest matches, because most requests go to few paths.  Called again if the rules change."""
        self._recent = lru_cache(maxsize=1024)(self._find)

    def match(self, method: str, path: str) -> Match | None:
        """Return the rule of a request, by its method and decoded path; None if the request is not guarded.

        Safe methods have no rule.  If no rule declares the request, *undeclared* decides: the default rule, or None.  With
        `refuse`, the middleware refuses requests that are not declared.
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
        if self.undeclared == "refuse" or (
            self.undeclared != "pass" and self.default.pattern.find(method, path) is not None
        ):
            return Match(self.default, {}, own, declared=False)
        return None

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._table.rules

    @property
    def unscoped(self) -> tuple[str, ...]:
        """The names of the rules under which principals share keys; middlewares warn of each."""
        return tuple(rule.name for rule in (*self.rules, self.default) if rule.unscoped)

    def rule(self, name: str) -> Rule:
        """Return the rule of that name."""
        names = self._table.names
        if name not in names:
            raise ConfigurationError(f"{self._source} has no rule named {name!r}{did_you_mean(name, names)}")
        return names[name]

    def add(self, *rules: Rule) -> None:
        """Add rules, all or none of them.  The settings that they do not give come from this contract's defaults.

        A rule that the contract has already, word for word, is not added again: a middleware may also find it on its
        function.
        """
        with self._lock:
            problems, known = Problems(), self._table.rules
            same = [(rule.match, rule.given) for rule in known]
            new = [rule for rule in rules if (rule.match, rule.given) not in same]
            table = table_of([*known, *read_rules(rules_in_python(new, len(known)), self._base, problems)], problems)
            if problems:
                raise listing(self._source, problems)
            self._table = table
            self._remember()

    def check(self) -> None:
        """Raise a ConfigurationError if a rule names another that does not exist; called after all rules are added."""
        problems = reversal_problems(self._table)
        if problems:
            raise listing(self._source, problems)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each rule, with every setting that holds, for documents and tools."""
        return [rule.row() for rule in self.rules]
