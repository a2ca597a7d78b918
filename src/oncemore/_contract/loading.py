"""Loading a contract: from what was written to rules that can be matched, noting every fault on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigurationError
from .keysource import key_table, merged_key
from .paths import Matcher
from .problems import Faults, did_you_mean
from .profiles import PROFILES
from .rule import Rule, read_rule
from .settings import SETTINGS

# What happens to a request that may have effects and that no rule matches: guarded under the defaults if it carries a
# key; the same, and doors warn of it; refused; or let pass untouched.
Undeclared = Literal["guard if keyed", "warn", "refuse", "pass"]

RULE_LINE = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """A rule as it was written, and where."""

    place: str
    match: str | None
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.settings.get("name", self.match))


@dataclass(frozen=True, slots=True)
class Table:
    """The rules at one moment; readers hold one while a writer puts the next in its place."""

    rules: tuple[Rule, ...]
    names: Mapping[str, Rule]
    matcher: Matcher[Rule]


def python_rules(rules: Iterable[Rule], known: int = 0) -> list[Said]:
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ConfigurationError(
                f"{rule!r} is not a rule: write Contract(Rule('POST /refunds'), ...), each by itself, or Contract.load(path)"
            )
    return [Said(f"rule {n} {rule.name!r}", rule.match, rule.given) for n, rule in enumerate(rules, known + 1)]


def written_rules(rules: object, written: str, faults: Faults) -> Iterator[Said]:
    """The `[[rule]]` tables of a file, each with its line."""
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        faults.found.append("rule is not a list of tables: begin each rule with [[rule]]")
        return
    lines = [written.count("\n", 0, found.start()) + 1 for found in RULE_LINE.finditer(written)]
    if len(lines) != len(rules):  # inline tables, or a text that looks like a heading: better no line than a wrong one
        lines = [0] * len(rules)
    for number, (table, line) in enumerate(zip(rules, lines, strict=True), 1):
        said = dict(table)
        match = said.pop("match", None)
        named = said.get("name", match)
        place = f"rule {number}" + (f" {named!r}" if named else "") + (f" (line {line})" if line else "")
        if match is None:
            faults.found.append(f"{place}: match is missing; write a method and a path, as in match = 'POST /refunds'")
        yield Said(place, match, said)


def read_defaults(said: object, faults: Faults) -> tuple[str, Undeclared, Mapping[str, Any]]:
    """The profile, what is done with undeclared requests, and the settings that hold wherever a rule says nothing."""
    given = dict(said) if isinstance(said, Mapping) else {}
    if not isinstance(said, Mapping):
        faults.found.append("defaults is not a table: begin it with [defaults]")
    profile = chosen("profile", given.pop("profile", "default"), PROFILES, faults)
    undeclared = chosen("undeclared", given.pop("undeclared", "guard if keyed"), get_args(Undeclared), faults)
    for name in [name for name in given if name in SETTINGS and SETTINGS[name].only_in_rules]:
        faults.found.append(f"[defaults] {name}: it is said of one rule, not of all; move it there")
        del given[name]
    usual = PROFILES[profile]
    base = {**usual, "match": given.pop("match", usual["match"])}
    _, found = read_rule(None, given, base, ("profile", "undeclared", "match"))
    faults.found += [f"[defaults] {fault}" for fault in found]
    if found:  # the rules are read all the same, for their own faults
        return profile, undeclared, usual
    return profile, undeclared, {**base, **given, "key": merged_key(base["key"], key_table(given.get("key", {})))}


def chosen(name: str, value: object, choices: Iterable[Any], faults: Faults) -> Any:
    known = tuple(choices)
    if value in known:
        return value
    hint = did_you_mean(str(value), known)
    faults.found.append(f"[defaults] {name}: {value!r} is unknown{hint}: choose one of {', '.join(map(repr, known))}")
    return known[0]


def read_rules(said: Iterable[Said], base: Mapping[str, Any], faults: Faults) -> Iterator[Rule]:
    """The rules that are free of faults."""
    for one in said:
        values, found = read_rule(one.match, one.settings, base)
        faults.found += [f"{one.place}: {fault}" for fault in found]
        if not found:
            yield Rule.of(values)


def table_of(rules: Sequence[Rule], faults: Faults) -> Table:
    """The rules, ready to be matched; a fault for each that cannot be told from an earlier one."""
    matcher: Matcher[Rule] = Matcher()
    names: dict[str, Rule] = {}
    for rule in rules:
        rival = matcher.add(rule.pattern, rule)
        if rival:
            faults.found.append(
                f"rules {rival.match!r} and {rule.match!r} match the same requests: drop one, or make its path differ"
            )
        elif rule.name in names:
            faults.found.append(
                f"rules {names[rule.name].match!r} and {rule.match!r} are both named {rule.name!r}: rename one"
            )
        names.setdefault(rule.name, rule)
    return Table(tuple(rules), names, matcher)


def reversal_faults(table: Table, also: Iterable[str] = ()) -> list[str]:
    """A fault for each rule that reverses none, or itself; *also* are the names of rules that had faults of their own."""
    names = {*table.names, *also}
    wrong = [rule for rule in table.rules if rule.reverses and rule.reverses not in names - {rule.name}]
    return [
        f"rule {rule.name!r}: reverses {rule.reverses!r}, which is no other rule{did_you_mean(str(rule.reverses), names)}"
        for rule in wrong
    ]
