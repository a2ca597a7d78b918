"""`oncemore schedule`: run the jobs of a schedule, list their slots, and run missed slots."""

from __future__ import annotations

import asyncio
import datetime
import signal
from collections.abc import Callable
from typing import Any

import click
import msgspec

from ...jobs.schedule import Schedule
from ...jobs.scheduler import SlotCounts
from .options import json_option, load_object
from .output import Output, print_table

Counts = dict[str, int]

place_argument = click.argument("place", metavar="MODULE:SCHEDULE")
job_option = click.option("--job", metavar="NAME", help="Only this job of the schedule, with or without its module.")


@click.group()
def schedule() -> None:
    """Run the jobs of a Schedule, which MODULE:SCHEDULE names.

    Any number of processes may run the same schedule: each slot is run by one of them.
    """


@schedule.command("run", short_help="run jobs when they are due")
@place_argument
@click.option("--once", is_flag=True, help="Run what is due now, instead of running until SIGTERM or Ctrl-C.")
@json_option
@click.pass_obj
def run_schedule(output: Output, place: str, once: bool) -> int:
    """Run jobs when they are due.  SIGTERM lets running slots end first.

    With --once, the exit code is 1 if a slot has failed or is held.
    """
    found = load_schedule(place)
    if not once:
        asyncio.run(run_until_signal(found))
        return 0
    return show_counts(output, asyncio.run(found.arun_once()))


@schedule.command("list", short_help="list the slots of a day")
@place_argument
@click.option(
    "--day",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help="The day, in the jobs' time zones; by default the date in UTC.",
)
@job_option
@json_option
@click.pass_obj
def list_slots(output: Output, place: str, day: datetime.datetime | None, job: str | None) -> None:
    """List the slots of a day, with their states."""
    found = load_schedule(place)
    date = day.date() if day is not None else datetime.datetime.now(datetime.UTC).date()

    async def look() -> list[Any]:
        return [slot for name in ([job] if job else found.jobs()) for slot in await found.aslots(name, date)]

    slots = asyncio.run(look())
    rows = [(slot.job, slot.slot, slot.at.isoformat(), slot.state, slot.attempts, slot.note) for slot in slots]
    output.show(
        msgspec.to_builtins(slots), lambda: print_table(("job", "slot", "at", "state", "attempts", "note"), rows)
    )


@schedule.command("missed", short_help="list scheduled times that were missed")
@place_argument
@job_option
@json_option
@click.pass_obj
def list_missed(output: Output, place: str, job: str | None) -> None:
    """List the scheduled times that passed without their slots."""
    found = load_schedule(place)
    missed = asyncio.run(found.amissed(job))
    rows = [(each.job, each.slot, each.at.isoformat(), each.why) for each in missed]
    output.show(msgspec.to_builtins(missed), lambda: print_table(("job", "slot", "at", "why"), rows))


@schedule.command("backfill", short_help="run the slots of past days")
@place_argument
@click.argument("start", type=click.DateTime(["%Y-%m-%d"]), metavar="START")
@click.argument("end", type=click.DateTime(["%Y-%m-%d"]), metavar="END")
@job_option
@json_option
@click.pass_obj
def backfill(output: Output, place: str, start: datetime.datetime, end: datetime.datetime, job: str | None) -> int:
    """Run the slots of the days from START to END (YYYY-MM-DD), both included, that are not completed.

    It can be interrupted and run again.  The exit code is 1 if a slot has failed or is held.
    """
    found = load_schedule(place)
    with output.progress(total=0) as bar:
        counts = asyncio.run(found.abackfill(start.date(), end.date(), job, progress=bar))
    return show_counts(output, counts)


@schedule.command("trigger", short_help="run a job now")
@place_argument
@click.argument("job", metavar="JOB")
@json_option
@click.pass_obj
def trigger(output: Output, place: str, job: str) -> int:
    """Run JOB now, for all its items.  A completed slot stays as it is; a failed one is tried again."""
    found = load_schedule(place)
    return show_counts(output, asyncio.run(found.atrigger(job)))


def load_schedule(place: str) -> Schedule:
    found: Schedule = load_object(place, "a schedule", Schedule)
    return found


def show_counts(output: Output, counts: SlotCounts) -> int:
    """Print how the slots have ended, and return the exit code."""
    data: Counts = msgspec.to_builtins(counts)
    output.show(data, ", ".join(f"{count} {name}" for name, count in data.items() if count) or "nothing was due")
    return 1 if counts.failed or counts.retrying or counts.held else 0


async def run_until_signal(found: Schedule) -> None:
    """Run the schedule until SIGTERM or SIGINT.  Running slots are finished first, or released."""
    running = asyncio.ensure_future(found.arun())
    stop: Callable[[], object] = running.cancel
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop)
    try:
        await running
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
