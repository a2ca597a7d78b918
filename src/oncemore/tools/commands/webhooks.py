"""`oncemore webhooks`: send webhooks, and look after endpoints and deliveries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click

from ...errors import ConfigurationError
from ...webhooks.endpoints import State
from ...webhooks.webhooks import STATES, DeliveryState, Only, Webhooks
from .listen import listen
from .options import json_option, load_object, open_ledger, read_duration, seal_from_environment, store_option
from .output import Output, print_table, struct_fields

tenant_option = click.option("--tenant", metavar="NAME", help="Only those of this tenant.")
limit_option = click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="The most rows.")


@click.group()
def webhooks() -> None:
    """Send webhooks, look after their deliveries, and receive some while you develop."""


webhooks.add_command(listen)


@webhooks.command("run", short_help="deliver webhooks until SIGTERM or Ctrl-C")
@click.argument("place", metavar="MODULE:NAME")
@click.option("--once", is_flag=True, help="Deliver what is due now, instead of running until SIGTERM or Ctrl-C.")
@json_option
@click.pass_obj
def run_sender(output: Output, place: str, once: bool) -> None:
    """Deliver webhooks, with the Sender or the Webhooks that MODULE:NAME names.

    Any number of processes may do so.  SIGTERM lets the requests that are under way be finished first.
    """
    from ...webhooks import Sender  # it needs aiohttp, and the other commands do not

    found: Any = load_object(place, "a Sender or Webhooks")
    if isinstance(found, Webhooks):
        found = Sender(found)
    if not isinstance(found, Sender):
        raise ConfigurationError(
            f"{place!r} is a {type(found).__name__}, not a Sender or Webhooks of oncemore: write module:name of one"
        )
    if not once:
        found.run()
        return
    delivered = found.run_once()
    output.show({"delivered": delivered}, f"Delivered {delivered:,}.")


@webhooks.command(short_help="list endpoints")
@tenant_option
@click.option("--state", type=click.Choice(["enabled", "disabled"]), help="Only those in this state.")
@limit_option
@click.option("--after", default="", metavar="ID", help="Continue behind the endpoint with this id.")
@store_option
@json_option
@click.pass_obj
def endpoints(output: Output, url: str | None, tenant: str | None, state: State | None, limit: int, after: str) -> None:
    """List endpoints.  Secrets and the values of headers are never shown."""
    with opened_webhooks(url) as found:
        page = found.endpoints.list(tenant=tenant, state=state, limit=limit, after=after)
    data = [struct_fields(each, "secret", "headers") for each in page]
    heads = ("id", "tenant", "url", "events", "state", "failing since", "reason")
    rows = [
        (each["id"], each["tenant"], each["url"], ", ".join(each["events"]), each["state"], each["failing_since"], each["reason"])
        for each in data
    ]  # fmt: skip
    output.show(data, lambda: print_table(heads, rows))


@webhooks.command(short_help="list deliveries")
@click.option("--endpoint", metavar="ID", help="Only those for this endpoint.")
@tenant_option
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@click.option("--type", "type_", metavar="TYPE", help="Only events of this type.")
@limit_option
@click.option("--after", default="0", metavar="ID", help="Continue behind the delivery with this id.")
@store_option
@json_option
@click.pass_obj
def deliveries(
    output: Output,
    url: str | None,
    endpoint: str | None,
    tenant: str | None,
    state: DeliveryState | None,
    type_: str | None,
    limit: int,
    after: str,
) -> None:
    """List deliveries, the oldest first.  With --json, each has its attempts."""
    with opened_webhooks(url) as found:
        page = found.deliveries.list(
            endpoint=endpoint, tenant=tenant, state=state, type=type_, limit=limit, after=after
        )
        data = [struct_fields(each) for each in page]
        if output.json:
            for each in data:
                each["attempts"] = [struct_fields(attempt) for attempt in found.deliveries.attempts(each["id"])]
    heads = ("id", "webhook-id", "type", "endpoint", "state", "attempts", "next", "status", "error")
    rows = [
        (each["id"], each["message_id"], each["type"], each["endpoint"], each["state"], each["attempts"], each["next_at"],
         each["status"], each["error"])
        for each in data
    ]  # fmt: skip
    output.show(data, lambda: print_table(heads, rows))


@webhooks.command(short_help="send deliveries once more")
@click.argument("ids", nargs=-1, required=True, metavar="DELIVERY...")
@store_option
@json_option
@click.pass_obj
def resend(output: Output, url: str | None, ids: tuple[str, ...]) -> None:
    """Send deliveries once more, under the same webhook-ids; a sender does it at once."""
    with opened_webhooks(url) as found:
        for id in ids:
            found.resend(id)
    output.show({"resent": list(ids)}, f"{len(ids):,} will be sent once more.")


@webhooks.command(short_help="send again what an endpoint has not got")
@click.argument("endpoint")
@click.option(
    "--since",
    callback=read_duration,
    default="24h",
    show_default=True,
    metavar="AGE",
    help="How far to go back: 24h, 7d.",
)
@click.option(
    "--only",
    type=click.Choice(["failed", "missing", "all"]),
    default="failed",
    show_default=True,
    help="Dead letters; or events that it did not get, because it was disabled or not there; or everything.",
)
@store_option
@json_option
@click.pass_obj
def recover(output: Output, url: str | None, endpoint: str, since: float, only: Only) -> None:
    """Send again what an endpoint has not got.  If it is interrupted, run it again, and it goes on."""
    with opened_webhooks(url) as found:
        start = datetime.now(UTC).timestamp() - since
        with output.progress(total=sum(found.stats().values())) as progress:
            count = found.recover(endpoint, start, only=only, progress=progress)
    output.show({"recovered": count}, f"{count:,} will be sent.")


@contextmanager
def opened_webhooks(url: str | None) -> Iterator[Webhooks]:
    with open_ledger(url) as guard:
        yield Webhooks(guard, seal=seal_from_environment())
