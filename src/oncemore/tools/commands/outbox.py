"""`oncemore outbox` and `oncemore relay`: look after messages that wait to be sent, and send them."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from ..._ledger.guard import Guard
from ...errors import ConfigurationError
from ...messages.outbox import MessageState, Outbox, OutboxMessage, sources_of
from ...messages.relay import Relay
from .options import confirm, json_option, load_object, on_ledger, open_ledger, read_duration, run_or_once, yes_option
from .output import Output, print_table, struct_fields

source_option = click.option(
    "--source", metavar="NAME", help="The outbox's source; not needed if the database has messages of one source only."
)
limit_option = click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="The most messages."
)
type_option = click.option("--type", "type_", metavar="PATTERN", help="Only this type; * stands for any characters.")
after_option = click.option(
    "--after", type=int, default=0, metavar="SEQ", help="Continue behind the message with this seq."
)


@click.group()
def outbox() -> None:
    """Count and list the messages of an outbox, and requeue or delete dead letters."""


@outbox.command(short_help="count the messages")
@source_option
@on_ledger
def stats(output: Output, url: str | None, source: str | None) -> None:
    """Count the messages, by source: pending, dead, and for how long the oldest has been due."""
    with open_ledger(url) as guard:
        names = [source] if source is not None else sources_of(guard)
        found = {name: msgspec.to_builtins(Outbox(guard, source=name).stats()) for name in names}
    heads = ("source", "pending", "oldest_age", "dead", "sent", "waiting")
    rows = [
        (name, f"{each['pending']:,}", f"{each['oldest_age']:.1f} s", each["dead"], each["sent"], each["waiting"])
        for name, each in found.items()
    ]
    output.show(found, lambda: print_table(heads, rows, numbers=True))


@outbox.command("list", short_help="list messages")
@click.option("--state", type=click.Choice(["pending", "sent", "dead"]), default="pending", show_default=True)
@type_option
@click.option("--subject", metavar="TEXT", help="Only this subject.")
@limit_option
@after_option
@source_option
@on_ledger
def list_messages(
    output: Output,
    url: str | None,
    source: str | None,
    state: MessageState,
    type_: str | None,
    subject: str | None,
    limit: int,
    after: int,
) -> None:
    """List messages, the oldest first."""
    with open_ledger(url) as guard:
        found = find_outbox(guard, source).list(state, type=type_, subject=subject, limit=limit, after=after)
    show_messages(output, found)


@outbox.command("dead", short_help="list the dead letters")
@type_option
@limit_option
@after_option
@source_option
@on_ledger
def list_dead(output: Output, url: str | None, source: str | None, type_: str | None, limit: int, after: int) -> None:
    """List the dead letters: messages that have failed too often, with their last error."""
    with open_ledger(url) as guard:
        found = find_outbox(guard, source).dead(type=type_, limit=limit, after=after)
    show_messages(output, found)


@outbox.command(short_help="send dead letters again")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@source_option
@on_ledger
def requeue(output: Output, url: str | None, source: str | None, ids: tuple[str, ...]) -> None:
    """Send dead letters again, under the same ids."""
    with open_ledger(url) as guard:
        found = find_outbox(guard, source)
        for id in ids:
            found.requeue(id)
    output.show({"requeued": list(ids)}, f"Requeued {len(ids):,}.")


@outbox.command(short_help="delete sent messages or dead letters")
@click.option("--dead", is_flag=True, help="Delete dead letters, instead of messages that were sent and kept.")
@click.option("--older-than", callback=read_duration, default="7d", show_default=True, metavar="AGE", help="How old.")
@yes_option
@source_option
@on_ledger
def purge(output: Output, url: str | None, source: str | None, dead: bool, older_than: float, yes: bool) -> None:
    """Delete messages that were sent and kept, or dead letters.  Pending messages stay."""
    with open_ledger(url) as guard:
        found = find_outbox(guard, source)
        what = "dead letters" if dead else "sent messages"
        confirm(f"Delete the {what} of {found.source!r} that are older than {older_than:g} s?", yes=yes)
        counts = found.stats()
        with output.progress(total=counts.dead if dead else counts.sent) as progress:
            removed = found.purge(dead=dead, older_than=older_than, progress=progress)
    output.show({"removed": removed}, f"Removed {removed:,} {what}.")


@click.command()
@click.argument("place", metavar="MODULE:RELAY")
@click.option("--once", is_flag=True, help="Send what is due now, instead of running until SIGTERM or Ctrl-C.")
@json_option
@click.pass_obj
def relay(output: Output, place: str, once: bool) -> None:
    """Send the messages of an outbox, with the Relay that MODULE:RELAY names.

    Any number of processes may run the same relay.  SIGTERM lets the messages that are under way be finished first.
    """
    run_or_once(output, load_object(place, "a relay", Relay), once, "sent", "Sent {:,}.")


def find_outbox(guard: Guard, source: str | None) -> Outbox:
    """Return the outbox of *source*, or the only outbox of the database."""
    if source is None:
        known = sources_of(guard)
        if len(known) != 1:
            names = f"messages of {', '.join(map(repr, known))}" if known else "no messages"
            raise ConfigurationError(f"Say which outbox, with --source: the database has {names}")
        (source,) = known
    return Outbox(guard, source=source)


def show_messages(output: Output, messages: list[OutboxMessage]) -> None:
    data = [message_fields(message) for message in messages]
    rows = [
        (each["seq"], each["id"], each["type"], each["subject"], each["attempts"], each["created_at"], each["error"])
        for each in data
    ]
    heads = ("seq", "id", "type", "subject", "attempts", "created", "error")
    output.show(data, lambda: print_table(heads, rows))


def message_fields(message: OutboxMessage) -> dict[str, Any]:
    """Return the fields of a message without its data, which may be secret."""
    return {**struct_fields(message, "envelope"), "correlationid": message.envelope.correlationid}
