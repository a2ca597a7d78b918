"""`oncemore contract`: what may be repeated, and how, checked and shown."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..._contract.contract import Contract
from ..._contract.policy import UNITS
from .options import json_option
from .screen import Screen, draw_pairs, draw_table

COLUMNS = ("match", "name", "key", "ttl", "in_flight", "on_duplicate", "effect", "on_unknown")

path_argument = click.argument("path", default="oncemore.toml", type=click.Path())


@click.group()
def contract() -> None:
    """Check a contract, or show what it says."""


def load(path: str) -> Contract:
    """The contract in the file; functions that it names are looked for in the working folder, too."""
    sys.path.insert(0, "")
    loaded = Contract.load(path)
    loaded.check()
    return loaded


@contract.command(short_help="find every fault in a contract")
@path_argument
@json_option
@click.pass_obj
def check(screen: Screen, path: str) -> None:
    """Check the contract in PATH (oncemore.toml): every fault, with its line and the way to mend it.

    Rules under which callers share keys are named, since one could be answered with what another was told.
    """
    found = load(path)
    unscoped = list(found.unscoped)
    told: dict[str, Any] = {
        "path": path,
        "profile": found.profile,
        "rules": len(found.rules),
        "unguarded": [rule.name for rule in found.rules if not rule.idempotent],
        "unscoped": unscoped,
    }

    def draw(out: Any) -> None:
        out.print(f"{path}: {len(found.rules)} rules, no faults")
        for name in unscoped:
            out.print(f"  {name}: its scope is shared by all callers; make sure that its responses are for everyone")

    screen.answer(told, draw)


@contract.command(short_help="show the rules, and what holds")
@path_argument
@click.option("--rule", metavar="NAME", help="Every setting of one rule.")
@json_option
@click.pass_obj
def show(screen: Screen, path: str, rule: str | None) -> None:
    """Show the rules of the contract in PATH (oncemore.toml), with the defaults and the profile applied."""
    found = load(path)
    if rule is not None:
        row = found.rule(rule).row()
        screen.answer(row, lambda out: draw_pairs(out, ((name, plain(value)) for name, value in row.items())))
        return
    table = found.table()
    told = {"profile": found.profile, "undeclared": found.undeclared, "rules": table}

    def draw(out: Any) -> None:
        out.print(f"profile {found.profile}, undeclared requests: {found.undeclared}\n")
        draw_table(out, COLUMNS, (cells(row) for row in table))

    screen.answer(told, draw)


def cells(row: dict[str, Any]) -> list[object]:
    """The columns of one rule; of one that is not guarded, that it is not."""
    if not row["idempotent"]:
        return [row["match"], row["name"], "not guarded"]
    return [plain(row[name]) for name in COLUMNS]


def plain(value: object) -> object:
    """A value as a contract would say it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return span_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {said}" for name, said in value.items() if said)
    return value


def span_text(seconds: float) -> str:
    """A duration in the largest units that it is a whole number of: `30d`, `90s`."""
    for unit, length in sorted(UNITS.items(), key=lambda pair: -pair[1]):
        if unit != "w" and seconds >= length and not seconds % length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"
