"""`oncemore contract`: check a contract, or show its rules."""

from __future__ import annotations

from typing import Any

import click

from ..._contract.policy import UNITS
from .options import json_option, load_contract
from .output import Output, print_pairs, print_table

COLUMNS = ("match", "name", "key", "ttl", "in_flight", "on_duplicate", "effect", "on_unknown")

path_argument = click.argument("path", default="oncemore.toml", type=click.Path())


@click.group()
def contract() -> None:
    """Check a contract, or show its rules."""


@contract.command(short_help="find every fault in a contract")
@path_argument
@json_option
@click.pass_obj
def check(output: Output, path: str) -> None:
    """Check the contract in PATH (oncemore.toml), and print every fault with its line and its correction.

    Rules with a scope that all callers share are listed, because one caller could get another's response.
    """
    loaded = load_contract(path)
    unscoped = list(loaded.unscoped)
    data: dict[str, Any] = {
        "path": path,
        "profile": loaded.profile,
        "rules": len(loaded.rules),
        "unguarded": [rule.name for rule in loaded.rules if not rule.idempotent],
        "unscoped": unscoped,
    }
    warning = "its scope is shared by all callers; make sure that its responses are for everyone"
    output.show(
        data,
        "\n".join([f"{path}: {len(loaded.rules)} rules, no faults", *(f"  {name}: {warning}" for name in unscoped)]),
    )


@contract.command(short_help="show the rules with all their settings")
@path_argument
@click.option("--rule", metavar="NAME", help="Show every setting of this rule.")
@json_option
@click.pass_obj
def show(output: Output, path: str, rule: str | None) -> None:
    """Show the rules of the contract in PATH (oncemore.toml), with the defaults and the profile applied."""
    loaded = load_contract(path)
    if rule is not None:
        row = loaded.rule(rule).row()
        output.show(row, lambda: print_pairs((name, setting_text(value)) for name, value in row.items()))
        return
    rules = loaded.table()

    def print_rules() -> None:
        click.echo(f"profile {loaded.profile}, undeclared requests: {loaded.undeclared}\n")
        print_table(COLUMNS, map(rule_cells, rules))

    output.show({"profile": loaded.profile, "undeclared": loaded.undeclared, "rules": rules}, print_rules)


def rule_cells(row: dict[str, Any]) -> list[object]:
    """Return the cells of a rule's line in the table."""
    if not row["idempotent"]:
        return [row["match"], row["name"], "not guarded"]
    return [setting_text(row[name]) for name in COLUMNS]


def setting_text(value: object) -> object:
    """Return *value* as it would be written in a contract."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return duration_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items() if part)
    return value


def duration_text(seconds: float) -> str:
    """Return a duration in the largest unit of which it is a multiple: `30d`, `90s`."""
    for unit, length in sorted(UNITS.items(), key=lambda pair: -pair[1]):
        if unit != "w" and seconds >= length and not seconds % length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"
