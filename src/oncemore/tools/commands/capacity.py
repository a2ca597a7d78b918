"""`oncemore capacity`: what a load asks of each store, before anyone buys a disk."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import click

from ..._contract.settings import size
from ...errors import ConfigurationError
from ..storage import STORES, Load, Need, need
from .options import Number, json_option, read_span
from .screen import Screen, draw_table

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
HEADS = ("store", "records", "bytes each", "kept", "written", "syncs", "connections")
MEASURED = (
    "Computed from what settled records took on SQLite, PostgreSQL and Valkey (python -m bench.storage), with outcomes that "
    "do not compress.  Syncs are at most so many: operations that come at the same time share one."
)


def read_size(ctx: click.Context, option: click.Parameter, value: str) -> int:
    """Bytes, or text such as 4KiB."""
    try:
        return size(int(value) if value.isdecimal() else value)
    except ConfigurationError as error:
        raise click.BadParameter(error.detail) from None


@click.command()
@click.option(
    "--rate", type=Number(0, min_open=True), default=100.0, show_default=True, help="New operations a second."
)
@click.option(
    "--ttl", metavar="TIME", callback=read_span, default="1d", show_default=True, help="How long they are kept."
)
@click.option(
    "--outcome", metavar="SIZE", callback=read_size, default="1KiB", show_default=True, help="A response's body."
)
@click.option(
    "--names", metavar="SIZE", callback=read_size, default="80", show_default=True, help="Scope and key together."
)
@click.option("--processes", type=click.IntRange(1), default=4, show_default=True, help="That use the ledger.")
@click.option(
    "--sync", metavar="TIME", callback=read_span, default="2ms", show_default=True, help="What one takes on your disk."
)
@click.option(
    "--on", "stores", type=click.Choice(list(STORES)), multiple=True, help="Only this store; may be repeated."
)
@json_option
@click.pass_obj
def capacity(
    screen: Screen,
    rate: float,
    ttl: float,
    outcome: int,
    names: int,
    processes: int,
    sync: float,
    stores: tuple[str, ...],
) -> None:
    """How much storage, how many connections and how many syncs a load needs, on each store.

    Replays count for nothing here: they write nothing.  Records of failed operations are kept too, without an outcome.
    """
    if ttl <= 0 or sync <= 0:
        raise click.UsageError("--ttl and --sync must be longer than nothing.")
    load = Load(rate=rate, ttl=ttl, outcome=outcome, names=names, processes=processes, sync=sync)
    needs = {name: need(load, STORES[name]) for name in stores or STORES}
    told = {"load": asdict(load), "stores": {name: asdict(each) for name, each in needs.items()}}

    def draw(out: Any) -> None:
        draw_table(out, HEADS, (cells(name, each) for name, each in needs.items()), numbers=True)
        out.print(f"\n{MEASURED}")

    screen.answer(told, draw)


def cells(name: str, each: Need) -> list[object]:
    return [
        name,
        f"{each.records:,}",
        f"{each.record_bytes:,}",
        f"{amount(each.kept_bytes)} of {each.where}",
        f"{amount(each.written_per_second)}/s",
        f"{each.syncs_per_second:,}/s",
        each.connections,
    ]


def amount(count: float) -> str:
    """Bytes, in a unit that leaves at most three digits before the point."""
    power = min(int(math.log10(count)) // 3, len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {UNITS[power]}"
