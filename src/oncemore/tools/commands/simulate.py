"""`oncemore simulate`: what retry policies do to a server that falters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ...errors import ConfigurationError
from ..simulate import POLICIES, compare
from ..simulated import Brownout, Report, render_plot, render_table
from .options import Number, json_option
from .screen import Screen


@click.group()
def simulate() -> None:
    """Try things out in virtual time."""


@simulate.command(short_help="compare retry policies under a brownout")
@click.option("--clients", type=click.IntRange(1), default=20_000, show_default=True, help="Operations in all.")
@click.option(
    "--processes", type=click.IntRange(1), default=100, show_default=True, help="That share budgets and circuits."
)
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same figures.")
@click.option("--brownout", type=Number(0, 40), default=5.0, show_default=True, help="How long it falters, in seconds.")
@click.option("--remaining", type=Number(0, 1), default=0.2, show_default=True, help="What capacity it has meanwhile.")
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(list(POLICIES)), help="Only this; may be repeated."
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write an SVG here.")
@json_option
@click.pass_obj
def retries(
    screen: Screen,
    clients: int,
    processes: int,
    seed: int,
    brownout: float,
    remaining: float,
    policies: tuple[str, ...],
    plot: Path | None,
) -> None:
    """Compare retry policies under a brownout: how many operations end well, at what load, and how soon it is over.

    It runs the plans of the retry client itself; only the sockets, the clock and chance are simulated.
    """
    if plot:
        write(plot, "")  # before the long work, in case it cannot be written
    chosen = {name: POLICIES[name] for name in policies or POLICIES}
    trouble = Brownout(clients=clients, ends=Brownout.begins + brownout, remaining=remaining)
    reports = compare(trouble, chosen, seed=seed, processes=processes, progress=show_progress)
    if plot:
        write(plot, render_plot(reports))

    def draw(out: Any) -> None:
        click.echo(render_table(reports))
        if plot:
            click.echo(f"The plot is in {plot}")

    screen.answer([figures(report) for report in reports], draw)


def write(plot: Path, text: str) -> None:
    try:
        plot.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{plot} cannot be written: {error.strerror}") from error


def figures(report: Report) -> dict[str, Any]:
    """The line of the table, for programs: shares and multiples of 1, times in seconds."""
    return {
        "policy": report.name,
        "ended_well": report.success,
        "attempts_per_operation": report.amplification,
        "peak_load": report.peak,
        "recovery": report.recovery,
        "p50": report.latency(0.5),
        "p99": report.latency(0.99),
        "repeated": report.repeated,
    }


def show_progress(name: str, part: float) -> None:
    """A bar on the terminal; a line per policy where there is none."""
    if sys.stderr.isatty():
        bar = "█" * int(30 * part) + "░" * (30 - int(30 * part))
        print(f"\r{name:<16}{bar} {part:4.0%}", end="\n" if part == 1 else "", file=sys.stderr, flush=True)
    elif part == 1:
        print(f"{name}: done", file=sys.stderr)
