"""`oncemore stats` and `oncemore purge`."""

from __future__ import annotations

import click
import msgspec

from ..._ledger.connect import hide_password
from ..._ledger.shadow import count_verdicts
from ..._runtime.plan import run
from .options import confirm, on_ledger, open_ledger, yes_option
from .output import Output, print_table

MEANING = {
    "running": "in progress",
    "settled": "their outcome is stored, and repeats get it",
    "released": "failed; the next request performs them again",
    "held": "their outcome is unknown; decide with: oncemore keys resolve",
    "lapsed": "of the running ones: the process that performed them has crashed",
    "expired": "of all: delete them with: oncemore purge",
    "archived": "kept for the audit",
}


@click.command()
@on_ledger
def stats(output: Output, url: str | None) -> None:
    """Count the records of the ledger, by state; and, in shadow mode, the requests by what would have been done with them."""
    with open_ledger(url) as guard:
        counts: dict[str, int] = msgspec.to_builtins(guard.stats())
        shadow = run(count_verdicts(guard.store))
    rows = [(state, f"{count:,}", MEANING[state]) for state, count in counts.items()]
    verdicts = [(verdict, f"{count:,}", name) for verdict, names in shadow.items() for name, count in names.items()]

    def print_counts() -> None:
        print_table(("state", "records", ""), rows)
        if verdicts:
            click.echo("\nIn shadow mode, requests that would have been")
            print_table(("", "requests", "operation"), verdicts)

    output.show({**counts, **({"shadow": shadow} if shadow else {})}, print_counts)


@click.command()
@click.option("--batch", type=click.IntRange(1), default=1000, show_default=True, help="Records per transaction.")
@yes_option
@on_ledger
def purge(output: Output, url: str | None, batch: int, yes: bool) -> None:
    """Delete expired records, which are never replayed, to free their space.

    Running and held records stay.  Records of rules with expired = "keep" are archived first.  The service may run
    meanwhile: each batch is short.
    """
    with open_ledger(url) as guard:
        expired = guard.stats().expired
        if expired:
            confirm(f"Remove {expired:,} expired records from {hide_password(guard.store.url)}?", yes=yes)
        with output.progress(total=expired) as progress:
            removed = guard.purge(batch=batch, progress=progress)
    output.show({"removed": removed}, f"Removed {removed:,} expired records.")
