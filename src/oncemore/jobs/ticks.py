"""The times at which a job is due.  A tick is an instant, the wall time that it stands for, and a name for both."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal, Protocol
from zoneinfo import ZoneInfo

import msgspec

from .._contract.policy import duration
from .._contract.templates import time_zone, utc_text
from ..errors import ConfigurationError

Gap = Literal["after", "skip"]
OnRepeat = Literal["first", "last", "both"]

UTC = datetime.UTC


class Tick(msgspec.Struct, frozen=True):
    """A scheduled time: *at* in seconds since 1970, and the *wall* time that it stands for in the time zone *zone*.

    The two differ if the wall time was skipped because the clocks went forward.  *name* is the same in every process.
    """

    at: int
    wall: datetime.datetime
    zone: str
    name: str

    @property
    def date(self) -> datetime.date:
        return self.wall.date()


class Trigger(Protocol):
    """Decides when a job is due in a time zone.  *text* is the user's text.  *daily*: it is due at most once a day."""

    text: str
    daily: bool

    def after(self, moment: float, zone: str) -> Iterator[Tick]:
        """Yield the ticks later than *moment*, the earliest first."""
        ...


def between(trigger: Trigger, start: float, end: float, zone: str) -> Iterator[Tick]:
    """Yield the ticks later than *start*, until *end*."""
    return takewhile(lambda tick: tick.at <= end, trigger.after(start, zone))


class Every:
    """Due at each multiple of an interval since 1970, in UTC.  All processes compute the same times."""

    daily = False

    def __init__(self, interval: float | str) -> None:
        seconds = duration(interval)
        if seconds < 1 or seconds != int(seconds):
            raise ConfigurationError(f"every({interval!r}): write one or more whole seconds, as in '15m'")
        self.text = f"every {int(seconds)}s"
        self.seconds = int(seconds)

    def after(self, moment: float, zone: str) -> Iterator[Tick]:
        local = time_zone(zone)
        at = int(moment // self.seconds) * self.seconds
        while True:
            at += self.seconds
            yield instant_tick(at, local)


def instant_tick(at: int, zone: ZoneInfo) -> Tick:
    """Return the tick of an instant, named by that instant in UTC."""
    wall = datetime.datetime.fromtimestamp(at, zone).replace(tzinfo=None)
    return Tick(at, wall, zone.key, utc_text(at))


def wall_tick(at: int, wall: datetime.datetime, zone: str, *, repeated: bool = False) -> Tick:
    """Return the tick of a wall time, named by it.  It stays the same slot if the zone's rules change."""
    name = f"{wall:%Y-%m-%dT%H%M%S}".removesuffix("00")
    return Tick(at, wall.replace(fold=0), zone, f"{name}:{zone}{':repeated' if repeated else ''}")


def transition(before: int, after: int, zone: ZoneInfo) -> int:
    """Return the first second after *before* at which the zone has the offset that it has at *after*."""

    def offset(at: int) -> datetime.timedelta | None:
        return datetime.datetime.fromtimestamp(at, zone).utcoffset()

    later = offset(after)
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (before, middle) if offset(middle) == later else (middle, after)
    return after
