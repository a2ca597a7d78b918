"""`oncemore consume` runs a consumer; `oncemore inbox` lists received events, and requeues dead letters."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import click

from ..._ledger.guard import Guard
from ..._ledger.model import Record
from ..._ledger.store import Filter, Page
from ...messages.consumer import Consumer
from ...messages.inbox import DEAD, DEFAULT_NAME, Inbox
from .options import (
    cursor_option,
    json_option,
    limit_option,
    load_object,
    on_ledger,
    open_ledger,
    read_text,
    reading_cursor,
    run_or_once,
)
from .output import Output, escape, iso_date, print_csv, print_page

COLUMNS = ("event_id", "source", "first_seen", "processed", "result")
DEAD_COLUMNS = ("event_id", "inbox", "source", "first_seen", "attempts", "reason")
RESULTS = {"running": "in progress", "settled": "ok", "released": "to be handled", "held": "unknown"}
PREFIX = "inbox:"

name_option = click.option(
    "--inbox",
    "name",
    default=DEFAULT_NAME,
    show_default=True,
    callback=read_text,
    help="The inbox's name, as in Inbox(name=...).",
)
source_filter = click.option(
    "--source", callback=read_text, help="Only events of this source; in a large ledger, name the inbox too."
)
inbox_filter = click.option("--inbox", "name", callback=read_text, help="Only events of the inbox with this name.")


@click.command()
@click.argument("consumer", metavar="MODULE:NAME")
@click.option("--once", is_flag=True, help="Handle the messages that are there, instead of running until SIGTERM.")
@json_option
@click.pass_obj
def consume(output: Output, consumer: str, once: bool) -> None:
    """Handle the messages of a broker, each once, with the Consumer that MODULE:NAME names.

    SIGTERM and Ctrl-C let running handlers finish.  With --once, the number of acknowledged messages is printed.
    """
    run_or_once(output, load_object(consumer, "a consumer", Consumer), once, "acknowledged", "{} acknowledged")


@click.group()
def inbox() -> None:
    """List the events that were received, and requeue dead letters."""


@inbox.command("list", short_help="list the events that were received")
@source_filter
@inbox_filter
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print CSV, with the columns event_id, source, first_seen, processed, result."
)
@limit_option
@cursor_option
@on_ledger
def list_events(
    output: Output,
    url: str | None,
    source: str | None,
    as_csv: bool,
    name: str | None,
    limit: int,
    cursor: str | None,
) -> None:
    """List the events that were received, with the time of the first delivery and the result."""
    with open_ledger(url) as guard, reading_cursor(cursor):
        page = events_of(guard, name, source, limit, cursor)
    events = [event_fields(record) for record in page.records]
    if as_csv:
        print_csv(COLUMNS, ([event[column] for column in COLUMNS] for event in events), page.cursor)
        return
    show_events(output, COLUMNS, events, page.cursor)


@inbox.command(short_help="list the dead letters")
@source_filter
@inbox_filter
@limit_option
@cursor_option
@on_ledger
def dead(output: Output, url: str | None, source: str | None, name: str | None, limit: int, cursor: str | None) -> None:
    """List the dead letters: events that have failed too often, or cannot be read.

    An event that cannot be read has the name of its channel as its source.
    """
    with open_ledger(url) as guard, reading_cursor(cursor):
        page = events_of(guard, name, source, limit, cursor, dead=True)
    # The last claim did not handle the event, but made the record a dead letter.
    letters = [
        {**event_fields(record), "attempts": record.attempts - 1, "reason": record.note} for record in page.records
    ]
    show_events(output, DEAD_COLUMNS, letters, page.cursor)


@inbox.command(short_help="have a dead letter handled after all")
@click.argument("event_id", callback=read_text)
@click.option("--source", required=True, callback=read_text, help="The source of the event.")
@name_option
@on_ledger
def requeue(output: Output, url: str | None, event_id: str, source: str, name: str) -> None:
    """Have the dead letter EVENT_ID handled after all, under the same id.

    A running Consumer takes it within seconds, from what the letter has kept.
    """
    with open_ledger(url) as guard:
        record = Inbox(guard, name=name, effect="lease").requeue(event_id, source)
    output.show(event_fields(record), f"Requeued {escape(event_id)} of {escape(source)}.")


def events_of(
    guard: Guard, name: str | None, source: str | None, limit: int, cursor: str | None, *, dead: bool = False
) -> Page:
    """Return one page of the events of an inbox and a source.  None stands for all of them."""
    # Several inboxes may have this source, so the scope is known only if both names are given.
    scope = None if name is None or source is None else Inbox(guard, name=name, effect="lease").scope(source)
    found: list[Record] = []
    while True:
        page = guard.list(Filter(scope=scope, state="held" if dead else None), limit=limit, cursor=cursor)
        for record in page.records:
            is_wanted = record.scope.startswith(PREFIX) and (record.note.startswith(DEAD) or not dead)
            its_name, its_source = place_of(record)
            if is_wanted and name in (None, its_name) and source in (None, its_source):
                found.append(record)
        cursor = page.cursor
        if cursor is None or found:
            return Page(tuple(found), cursor)


def place_of(record: Record) -> tuple[str, str]:
    """Return the name of the inbox that has received an event, and the event's source: see `Inbox.scope`."""
    _, *names = map(unquote, record.scope.split(":"))
    return (names[0] if len(names) > 1 else DEFAULT_NAME), names[-1] if names else ""


def event_fields(record: Record) -> dict[str, Any]:
    result = "dead" if record.state == "held" and record.note.startswith(DEAD) else RESULTS[record.state]
    if record.outcome is not None and record.outcome.kind == "error":
        result = "error"
    name, source = place_of(record)
    return {
        "event_id": record.key,
        "inbox": name,
        "source": source,
        "first_seen": utc(record.created_at),
        "processed": utc(record.settled_at),
        "result": result,
    }


def utc(seconds: float | None) -> str | None:
    text = iso_date(seconds)
    return None if text is None else text.replace("+00:00", "Z")


def show_events(output: Output, columns: tuple[str, ...], events: list[dict[str, Any]], cursor: str | None) -> None:
    rows = [[event[column] for column in columns] for event in events]
    output.show({"events": events, "cursor": cursor}, lambda: print_page(columns, rows, cursor))
