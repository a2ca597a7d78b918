"""`oncemore contract`: check a contract, or show its rules."""

from __future__ import annotations

import re
from typing import Any

import click

from ..._contract.policy import UNITS
from ..._contract.problems import listing
from ...errors import ConfigurationError
from ...web.unserved import Route, UnknownRoutes, flask_served, starlette_served, unserved
from .options import json_option, load_contract, load_object
from .output import Output, print_pairs, print_table

LINE = re.compile(r"\(line (\d+)\)")
COLUMNS = ("match", "name", "key", "ttl", "in_flight", "on_duplicate", "effect", "on_unknown")

path_argument = click.argument("path", default="oncemore.toml", type=click.Path())


@click.group()
def contract() -> None:
    """Check a contract, or show its rules."""


@contract.command(short_help="find every fault in a contract")
@path_argument
@click.option("--app", metavar="MODULE:NAME", help="Also report the rules that no route of this app serves.")
@json_option
@click.pass_obj
def check(output: Output, path: str, app: str | None) -> None:
    """Check the contract in PATH (oncemore.toml), and print every fault with its line and its correction.

    Rules with a scope that all callers share are listed, because one caller could get another's response.
    """
    try:
        loaded = load_contract(path)
        problems = unserved(loaded, routes_of(load_object(app, "an app"))) if app is not None else []
        if problems:
            raise listing(path, problems)
    except ConfigurationError as error:
        if output.json and error.faults:
            output.show({"path": path, "faults": [fault_row(fault) for fault in error.faults]}, "")
        raise
    unscoped = list(loaded.unscoped)
    data: dict[str, Any] = {
        "path": path,
        "profile": loaded.profile,
        "rules": len(loaded.rules),
        "unguarded": [rule.name for rule in loaded.rules if not rule.idempotent],
        "unscoped": unscoped,
        "faults": [],
    }
    warning = "its scope is shared by all callers; make sure that its responses are for everyone"
    output.show(
        data,
        "\n".join([f"{path}: {len(loaded.rules)} rules, no faults", *(f"  {name}: {warning}" for name in unscoped)]),
    )


def fault_row(fault: str) -> dict[str, Any]:
    """Return a fault, and the line that it names, or None."""
    line = LINE.search(fault)
    return {"line": int(line[1]) if line else None, "fault": fault}


def routes_of(app: Any) -> list[Route]:
    """Return the routes of an app, or raise ConfigurationError if they cannot be listed."""
    try:
        if type(app).__module__.startswith("django.core.handlers."):
            from ...web.django.views import served

            return list(served())
        found = list(starlette_served(app)) or list(flask_served(app))
    except UnknownRoutes:
        found = []
    if not found:
        raise ConfigurationError(f"The routes of {app!r} cannot be listed: give an app of Starlette, Flask or Django")
    return found


@contract.command(short_help="show the rules with all their settings")
@path_argument
@click.option("--rule", metavar="NAME", help="Show every setting of this rule.")
@json_option
@click.pass_obj
def show(output: Output, path: str, rule: str | None) -> None:
    """Show the rules of the contract in PATH (oncemore.toml), with the defaults and the profile applied.

    The last line has the defaults themselves: they hold for requests that no rule names.
    """
    loaded = load_contract(path)
    if rule is not None:
        row = loaded.rule(rule).row()
        output.show(row, lambda: print_pairs((name, setting_text(value)) for name, value in row.items()))
        return
    rules = loaded.table()

    defaults = {**loaded.default.row(), "name": "(defaults)"}

    def print_rules() -> None:
        click.echo(f"profile {loaded.profile}, undeclared requests: {loaded.undeclared}\n")
        print_table(COLUMNS, map(rule_cells, [*rules, defaults]))

    data = {"profile": loaded.profile, "undeclared": loaded.undeclared, "defaults": defaults, "rules": rules}
    output.show(data, print_rules)


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
