"""`oncemore keys`: single operations, for whoever has to find out what became of one, and decide."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..._ledger.decisions import Resolution
from ..._ledger.guard import Guard
from ..._ledger.model import Outcome, Record
from ..._ledger.store import Filter
from ...errors import ConfigurationError, InvalidPayload, NotFound, WrongState
from .options import agreed, json_option, ledger, read_span, read_text, store_option, yes_option
from .records import COLUMNS, cells, fields, outcome_fields
from .screen import Screen, draw_pairs, draw_table, visible

F = TypeVar("F", bound=Callable[..., Any])

STATES = ("running", "settled", "released", "held")
# What a header may say, so that servers can replay it.
NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
# Enough to see that a key means several operations.
MANY = 20

key_argument = click.argument("key", callback=read_text)
scope_option = click.option(
    "--scope",
    callback=read_text,
    help="Who owns the key; needed only if several do.  A large Redis is quicker with it.",
)


@click.group()
def keys() -> None:
    """List, show, resolve and delete the records of operations."""


@keys.command("list", short_help="list records, all or some")
@click.option("--state", type=click.Choice(STATES), help="Only records in this state.")
@click.option("--lapsed", is_flag=True, help="Only running ones whose performer has vanished.")
@click.option("--scope", callback=read_text, help="Only those of this scope.")
@click.option("--key", callback=read_text, help="Only those with this key.")
@click.option("--name", callback=read_text, help="Only this kind of operation.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="How many to show.")
@click.option("--cursor", help="Go on where the last list stopped.")
@store_option
@json_option
@click.pass_obj
def list_keys(
    screen: Screen,
    url: str | None,
    state: Any,
    lapsed: bool,
    scope: str | None,
    key: str | None,
    name: str | None,
    limit: int,
    cursor: str | None,
) -> None:
    """List records.  What they were answered with is not shown: see keys show."""
    where = Filter(state=state, scope=scope, key=key, name=name, lapsed=True if lapsed else None)
    with ledger(url) as guard:
        try:
            page = guard.list(where, limit=limit, cursor=cursor)
        except (ValueError, InvalidPayload) as error:  # as this or that store has it
            raise ConfigurationError(f"--cursor {cursor!r}: that is none which a list has ended with") from error

    def draw(out: Any) -> None:
        draw_table(out, COLUMNS, map(cells, page.records))
        if page.cursor:
            click.echo(f"\nThere are more: --cursor {pasted(page.cursor)}")

    screen.answer({"records": [fields(record) for record in page.records], "cursor": page.cursor}, draw)


@keys.command(short_help="show one record")
@key_argument
@scope_option
@click.option("--outcome", is_flag=True, help="Also what it was answered with, which may be confidential.")
@store_option
@json_option
@click.pass_obj
def show(screen: Screen, url: str | None, key: str, scope: str | None, outcome: bool) -> None:
    """Show the record of KEY."""
    with ledger(url) as guard:
        record = the_one(guard, key, scope)
    told = fields(record)
    if outcome:
        told["outcome"] = outcome_fields(record.outcome)
    screen.answer(told, lambda out: draw_pairs(out, ((name, spoken(value)) for name, value in told.items())))


@keys.command(short_help="decide one whose outcome is unknown")
@key_argument
@scope_option
@click.option("--released", is_flag=True, help="It did not happen: the next request with this key performs it.")
@click.option("--value", metavar="JSON", help="It happened, and this is what the function returned.")
@click.option("--status", type=click.IntRange(100, 599), help="It happened, and this is the status of its response.")
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="With --status; may be repeated.")
@click.option(
    "--body", type=click.File("rb"), help="With --status: the file with the response's body; - is standard input."
)
@click.option(
    "--ttl", metavar="TIME", callback=read_span, default="1d", show_default=True, help="How long the decision is kept."
)
@click.option("--note", default="", callback=read_text, help="Why, for whoever looks at the record later.")
@yes_option
@store_option
@json_option
@click.pass_obj
def resolve(
    screen: Screen,
    url: str | None,
    key: str,
    scope: str | None,
    released: bool,
    value: str | None,
    status: int | None,
    headers: tuple[str, ...],
    body: Any,
    ttl: float,
    note: str,
    yes: bool,
) -> None:
    """Decide an operation whose outcome is unknown: it did not happen, or it did, and this is its outcome.

    Only what is held, or was left by a performer that vanished, can be decided.  Find out first whether it happened: ask the
    provider, look at its records.
    """
    decision = resolution(released, value, status, headers, body)
    meaning = "it did not happen, and may be performed" if released else "it happened, and repeats get this outcome"
    with ledger(url) as guard:
        record = the_one(guard, key, scope)
        confirm(guard, record, f"Decide for {visible(record.key)} of {visible(record.scope)}: {meaning}?", yes=yes)
        decided = guard.resolve(record.scope, record.key, decision, retention=ttl, note=note)
    screen.answer(fields(decided), lambda out: out.print(f"{visible(key)} is {decided.state} now."))


@keys.command(short_help="forget one, so that it runs as new")
@key_argument
@scope_option
@yes_option
@store_option
@json_option
@click.pass_obj
def delete(screen: Screen, url: str | None, key: str, scope: str | None, yes: bool) -> None:
    """Forget the operation KEY: the next request with it is performed as new, even if it already happened."""
    with ledger(url) as guard:
        record = the_one(guard, key, scope)
        confirm(guard, record, f"Forget {visible(record.key)} of {visible(record.scope)} ({record.state})?", yes=yes)
        deleted = guard.delete(record.scope, record.key)
    told = {"scope": record.scope, "key": record.key, "deleted": deleted}
    screen.answer(told, lambda out: out.print(f"{visible(key)} is forgotten." if deleted else "It was gone already."))


def confirm(guard: Guard, record: Record, question: str, *, yes: bool) -> None:
    """Go on only with a yes, and if the record is still the one that the question was about."""
    agreed(question, yes=yes)
    now = guard.find(record.scope, record.key)
    if now is None or (now.token, now.state) != (record.token, record.state):
        raise WrongState("It has changed since you were asked, and nothing was done; look again: oncemore keys show")


def the_one(guard: Guard, key: str, scope: str | None) -> Record:
    """The record that is meant; an error where there is none, or more than one."""
    if scope is not None:
        record = guard.find(scope, key)
        found = [record] if record else []
    else:
        found = owners(guard, key)
    if not found:
        raise NotFound(f"No record has the key {key!r}{f' in {scope!r}' if scope else ''}; see: oncemore keys list")
    if len(found) > 1:
        scopes = "".join(f"\n  --scope {shlex.quote(visible(one.scope))}" for one in found)
        raise ConfigurationError(f"Several operations have the key {key!r}; say which one is meant:{scopes}")
    return found[0]


def owners(guard: Guard, key: str) -> list[Record]:
    """The records with that key, of all scopes; what has expired is as good as none, and is not among them."""
    page = guard.list(Filter(key=key), limit=MANY)
    listed = list(page.records)
    while page.cursor and len(listed) < MANY:
        page = guard.list(Filter(key=key), limit=MANY, cursor=page.cursor)
        listed += page.records
    found = (guard.find(record.scope, record.key) for record in {record.id: record for record in listed}.values())
    return [record for record in found if record]


def resolution(
    released: bool, value: str | None, status: int | None, headers: tuple[str, ...], body: Any
) -> Resolution:
    """What the options say; a mistake if they say nothing, or two things at once."""
    if [released, value is not None, status is not None].count(True) != 1:
        raise click.UsageError("Say what happened, by one of --released, --value JSON and --status NUMBER.")
    if (headers or body) and status is None:
        raise click.UsageError("--header and --body describe a response: give its --status, too.")
    if released:
        return Resolution.released()
    if status is not None:
        return Resolution.settled(
            Outcome("response", status, tuple(map(header, headers)), body.read() if body else b"")
        )
    try:
        return Resolution.settled(json.loads(value or ""))
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--value is not JSON: {error}; a text needs its quotes: --value '\"text\"'") from None


def header(text: str) -> tuple[str, str]:
    name, mark, value = text.partition(":")
    if not mark or not NAME.fullmatch(name.strip()) or not VALUE.fullmatch(value.strip()):
        raise click.UsageError(f"--header {text!r}: write it as 'Content-Type: application/json'")
    return name.strip().lower(), value.strip()


def pasted(cursor: str) -> str:
    """A cursor as a shell takes it.  Where it has words of others, it is JSON: what a terminal would obey is written out."""
    return shlex.quote("".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in cursor))


def spoken(value: object) -> object:
    """A part of an outcome on one line."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
