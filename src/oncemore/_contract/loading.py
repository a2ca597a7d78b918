"""Loads a contract: reads its defaults and rules as they were written, and collects every problem on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigurationError
from .keysource import key_table, merged_key
from .paths import Matcher
from .problems import Problems, did_you_mean
from .profiles import PROFILES
from .rule import Rule, read_rule
from .settings import SETTINGS, one_of

# The treatment of a request that may have effects and that no rule matches: guarded under the defaults if it carries a
# key; the same, and the middleware warns of it; refused; or passed on untouched.
Undeclared = Literal["guard if keyed", "warn", "refuse", "pass"]

RULE_LINE = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WrittenRule:
    """A rule as it was written, and the place where errors say that it stands."""

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
    """Return the rules that were given as objects; *known* is how many the contract has already."""
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ConfigurationError(
                f"{rule!r} is not a rule: write Contract(Rule('POST /refunds'), ...), each by itself, or Contract.load(path)"
            )
    return [WrittenRule(f"rule {n} {rule.name!r}", rule.match, rule.given) for n, rule in enumerate(rules, known + 1)]


def rules_in_file(rules: object, text: str, problems: Problems) -> Iterator[WrittenRule]:
    """Yield the `[[rule]]` tables of a file, each with its line in *text*."""
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        problems.append("rule is not a list of tables: begin each rule with [[rule]]")
        return
    lines = [text.count("\n", 0, found.start()) + 1 for found in RULE_LINE.finditer(text)]
    if len(lines) != len(rules):  # inline tables, or a text that looks like a heading: better no line than a wrong one
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
    """Return the profile, the treatment of undeclared requests, and the settings that hold unless a rule gives others."""
    given = dict(written) if isinstance(written, Mapping) else {}
    if not isinstance(written, Mapping):
        problems.append("defaults is not a table: begin it with [defaults]")
    profile = choose("profile", given.pop("profile", "default"), PROFILES, problems)
    undeclared = choose("undeclared", given.pop("undeclared", "guard if keyed"), get_args(Undeclared), problems)
    for name in [name for name in given if name in SETTINGS and SETTINGS[name].only_in_rules]:
        problems.append(f"[defaults] {name}: it is said of one rule, not of all; move it there")
        del given[name]
    usual = PROFILES[profile]
    base = {**usual, "match": given.pop("match", usual["match"])}
    _, found = read_rule(None, given, base, ("profile", "undeclared", "match"))
    problems += [f"[defaults] {problem}" for problem in found]
    if found:  # the rules are read all the same, to find their own problems
        return profile, undeclared, usual
    return profile, undeclared, {**base, **given, "key": merged_key(base["key"], key_table(given.get("key", {})))}


def choose(name: str, value: object, choices: Iterable[Any], problems: Problems) -> Any:
    """Return *value* if it is one of the choices, else the first of them, and a problem."""
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
            yield Rule.of(values)


def table_of(rules: Sequence[Rule], problems: Problems) -> Table:
    """Return the rules, ready to be matched; a problem for each that cannot be told from an earlier one."""
    matcher: Matcher[Rule] = Matcher()
    names: dict[str, Rule] = {}
    for rule in rules:
        rival = matcher.add(rule.pattern, rule)
        if rival:
            problems.append(
                f"rules {rival.match!r} and {rule.match!r} match the same requests: drop one, or make its path differ"
            )
        elif rule.name in names:
            problems.append(
                f"rules {names[rule.name].match!r} and {rule.match!r} are both named {rule.name!r}: rename one"
            )
        names.setdefault(rule.name, rule)
    return Table(tuple(rules), names, matcher)


def reversal_problems(table: Table, also: Iterable[str] = ()) -> list[str]:
    """Return a problem for each rule that reverses no other; *also* are the names of rules with problems of their own."""
    names = {*table.names, *also}
    wrong = [rule for rule in table.rules if rule.reverses and rule.reverses not in names - {rule.name}]
    return [
        f"rule {rule.name!r}: reverses {rule.reverses!r}, which is no other rule{did_you_mean(str(rule.reverses), names)}"
        for rule in wrong
    ]
