"""The contract: the table of rules that middlewares enforce, tools check and documents show.

A setting that a rule does not give comes from `[defaults]`, otherwise from the profile.  Reading a contract finds every
problem in it and reports them in one error, each with its rule, its line if there is a file, and its remedy.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple, Unpack, get_args

from ..errors import ConfigurationError
from .keysource import key_table, merged_key
from .paths import SAFE_METHODS, Matcher
from .problems import Problems, did_you_mean, listing
from .profiles import PROFILES
from .rule import Rule, read_rule
from .settings import SETTINGS, Settings, one_of

# Longer paths are not remembered: clients could fill the memory with them.
LONGEST_REMEMBERED = 255


class Match(NamedTuple):
    """The rule of a request, and the values of the parameters in its path.

    *route* is part of the scope: the name of the rule if it has one route, else the request's own method and path, so
    that `/t/1` and `/t/2` are two operations.
    """

    rule: Rule
    params: Mapping[str, str]
    route: str
    declared: bool = True


class Contract:
    """All rules of an application, and the default rule for requests that no rule matches.

    Rules may be added while other threads read.  Each `match` sees the rules of one moment.
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
        """Return the contract in a TOML text.  Errors call it *source*."""
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
        """Remember the latest matches, because most requests go to few paths.  Call it again if the rules change."""
        self._recent = lru_cache(maxsize=1024)(self._find)

    def match(self, method: str, path: str) -> Match | None:
        """Return the rule of a request, by its method and decoded path, or None if the request is not guarded.

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
        """The names of the rules under which principals share keys.  Middlewares warn of each."""
        return tuple(rule.name for rule in (*self.rules, self.default) if rule.unscoped)

    def rule(self, name: str) -> Rule:
        """Return the rule of that name."""
        names = self._table.names
        if name not in names:
            raise ConfigurationError(f"{self._source} has no rule named {name!r}{did_you_mean(name, names)}")
        return names[name]

    def add(self, *rules: Rule) -> None:
        """Add *rules*, all or none.  Settings that they do not give come from this contract's defaults.

        A rule that the contract has already, word for word, is not added again, because a middleware may also find it on
        its function.
        """
        with self._lock:
            problems, known = Problems(), self._table.rules
            same = [(rule.match, rule.given) for rule in known]
            new = [rule for rule in rules if (rule.match, rule.given) not in same]
            if not new:
                return
            table = table_of([*known, *read_rules(rules_in_python(new, len(known)), self._base, problems)], problems)
            if problems:
                raise listing(self._source, problems)
            self._table = table
            self._remember()

    def check(self) -> None:
        """Raise a ConfigurationError if a rule reverses one that does not exist.  Called after all rules are added."""
        problems = reversal_problems(self._table)
        if problems:
            raise listing(self._source, problems)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each rule, with every setting that applies, for documents and tools."""
        return [rule.row() for rule in self.rules]


# Reading: defaults and rules as they were written, and every problem in them.

# The treatment of an unsafe request that no rule matches: it is guarded under the defaults if it has a key; the same, with
# a warning; it is refused; or it passes untouched.
Undeclared = Literal["guard if keyed", "warn", "refuse", "pass"]

RULE_LINE = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WrittenRule:
    """A rule as it was written, and its *place* in the words of errors."""

    place: str
    match: str | None
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.settings.get("name", self.match))


@dataclass(frozen=True, slots=True)
class Table:
    """The rules at one moment.  Adding a rule makes a new table, so that readers need no lock."""

    rules: tuple[Rule, ...]
    names: Mapping[str, Rule]
    matcher: Matcher[Rule]


def rules_in_python(rules: Iterable[Rule], known: int = 0) -> list[WrittenRule]:
    """Return the rules that were given as objects.  *known* is the number of rules that the contract has already."""
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ConfigurationError(
                f"{rule!r} is not a rule: write Contract(Rule('POST /refunds'), ...), each by itself, or Contract.load(path)"
            )
    return [
        WrittenRule(rule.place or f"rule {n} {rule.name!r}", rule.match, rule.given)
        for n, rule in enumerate(rules, known + 1)
    ]


def rules_in_file(rules: object, text: str, problems: Problems) -> Iterator[WrittenRule]:
    """Yield the `[[rule]]` tables of a file, each with its line in *text*."""
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        problems.append("rule is not a list of tables: begin each rule with [[rule]]")
        return
    lines = [text.count("\n", 0, found.start()) + 1 for found in RULE_LINE.finditer(text)]
    if len(lines) != len(
        rules
    ):  # inline tables, or a text that looks like a heading: no line is better than a wrong one
        lines = [0] * len(rules)
    for number, (table, line) in enumerate(zip(rules, lines, strict=True), 1):
        settings = dict(table)
        match = settings.pop("match", None)
        name = settings.get("name", match)
        place = f"rule {number}" + (f" {name!r}" if name else "") + (f" (line {line})" if line else "")
        if match is None:
            problems.append(f"{place}: match is missing; write a method and a path, as in match = 'POST /refunds'")
        yield WrittenRule(place, match, settings)


def read_defaults(written: object, problems: Problems) -> tuple[str, Undeclared, Mapping[str, Any]]:
    """Return the profile, the treatment of undeclared requests, and the default settings of rules."""
    given = dict(written) if isinstance(written, Mapping) else {}
    if not isinstance(written, Mapping):
        problems.append("defaults is not a table: begin it with [defaults]")
    profile = choose("profile", given.pop("profile", "default"), PROFILES, problems)
    undeclared = choose("undeclared", given.pop("undeclared", "guard if keyed"), get_args(Undeclared), problems)
    for name in [name for name in given if name in SETTINGS and SETTINGS[name].only_in_rules]:
        problems.append(f"[defaults] {name}: it belongs to one rule, not to all; move it there")
        del given[name]
    usual = PROFILES[profile]
    base = {**usual, "match": given.pop("match", usual["match"])}
    _, found = read_rule(None, given, base, ("profile", "undeclared", "match"))
    problems += [f"[defaults] {problem}" for problem in found]
    if found:  # the rules are read nevertheless, to find their own problems
        return profile, undeclared, usual
    return profile, undeclared, {**base, **given, "key": merged_key(base["key"], key_table(given.get("key", {})))}


def choose(name: str, value: object, choices: Iterable[Any], problems: Problems) -> Any:
    """Return *value* if it is one of the choices; otherwise add a problem, and return the first choice."""
    known = tuple(choices)
    with problems.collecting(f"[defaults] {name}"):
        return one_of(value, known)
    return known[0]


def read_rules(rules: Iterable[WrittenRule], base: Mapping[str, Any], problems: Problems) -> Iterator[Rule]:
    """Yield the rules that have no problem."""
    for rule in rules:
        values, found = read_rule(rule.match, rule.settings, base)
        problems += [f"{rule.place}: {problem}" for problem in found]
        if not found:
            yield Rule.of(values).written_at(rule.place)


def table_of(rules: Sequence[Rule], problems: Problems) -> Table:
    """Return the table of the rules.  Add a problem for each rule that matches or is named as an earlier one."""
    matcher: Matcher[Rule] = Matcher()
    names: dict[str, Rule] = {}
    for rule in rules:
        rival = matcher.add(rule.pattern, rule)
        if rival:
            problems.append(
                f"rules {rival.match!r} ({rival.place}) and {rule.match!r} ({rule.place}) match the same requests: drop "
                "one, or make its path differ"
            )
        elif rule.name in names:
            problems.append(
                f"rules {names[rule.name].match!r} ({names[rule.name].place}) and {rule.match!r} ({rule.place}) are both "
                f"named {rule.name!r}: rename one"
            )
        names.setdefault(rule.name, rule)
    return Table(tuple(rules), names, matcher)


def reversal_problems(table: Table, also: Iterable[str] = ()) -> list[str]:
    """Return a problem for each `reverses` without a rule.  *also* are the names of rules with problems of their own."""
    names = {*table.names, *also}
    wrong = [rule for rule in table.rules if rule.reverses and rule.reverses not in names - {rule.name}]
    return [
        f"rule {rule.name!r}: reverses {rule.reverses!r}, which is no other rule{did_you_mean(str(rule.reverses), names)}"
        for rule in wrong
    ]
