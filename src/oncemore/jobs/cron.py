"""Cron expressions.  Needs `pip install 'oncemore[jobs]'`.

cronsim reads the expression and finds the wall times.  If a change of the clocks skips or repeats a wall time, this
module decides when it runs: cronsim itself runs `30 2` of a skipped hour at 03:00, and `*/15 2` not at all on that day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date, datetime, time, timedelta
from itertools import groupby
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from .._contract.templates import time_zone, utc_text
from ..errors import ConfigurationError
from .ticks import Gap, OnRepeat, Tick, instant_tick, transition, wall_tick

NAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)
LONGEST_GAP = 2 * DAY  # Samoa has skipped a whole day
EPOCH = datetime(1970, 1, 1)


class Cron:
    """The times of a cron expression: five fields, or six with the seconds first.

    If the hour is `*` or `*/n`, the job runs by real time: at each real hour, even if the clock shows it twice.
    Otherwise the wall time counts.  *gap* decides about times that are skipped when the clocks go forward: one run at
    the end of the gap for all of them, or none.  *on_repeat* decides about times that come twice when they go back.
    """

    def __init__(self, text: str, gap: Gap = "after", on_repeat: OnRepeat = "first") -> None:
        self.text = text
        self.gap = gap
        self.on_repeat = on_repeat
        fields = NAMES.get(text.strip().lower(), text).split()
        # With six fields, cronsim does not handle changes of the clocks, so this class can.
        self.expression = " ".join(["0", *fields] if len(fields) == 5 else fields)
        try:
            parsed = CronSim(self.expression, datetime(2026, 1, 1))
        except CronSimError as error:
            raise ConfigurationError(
                f"cron {text!r}: {error}. Write minute, hour, day, month and weekday, as in '0 6 * * *', "
                f"seconds before them if you need them, or one of {', '.join(NAMES)}"
            ) from None
        self.daily = len(parsed.seconds) == len(parsed.minutes) == len(parsed.hours) == 1
        self.by_real_time = parsed.parts[2].startswith("*")

    def after(self, moment: float, zone: str) -> Iterator[Tick]:
        """Yield the ticks later than *moment*, the earliest first."""
        last = ""
        for tick in self._real(moment, zone) if self.by_real_time else self._wall(moment, zone):
            if tick.name != last:  # a skipped time may be due at the same instant as the next time
                yield tick
            last = tick.name

    def _real(self, moment: float, zone: str) -> Iterator[Tick]:
        """Yield ticks by real time: every instant at which a clock on the wall shows a time of the expression.

        Between two changes of the clocks the offset is constant, so the expression is evaluated without a zone.
        """
        local, start = time_zone(zone), int(moment // 1)
        offset = offset_at(start, local)
        while True:
            end = next_change(start, offset, local)
            for wall in CronSim(self.expression, (EPOCH + timedelta(seconds=start) + offset)):
                at = round((wall - offset - EPOCH).total_seconds())
                if at >= end:
                    break
                yield instant_tick(at, local)
            else:
                return
            start, offset = end - 1, offset_at(end, local)

    def _wall(self, moment: float, zone: str) -> Iterator[Tick]:
        """Yield ticks by wall time.  If the clocks change on a day, its ticks have to be sorted."""
        local = time_zone(zone)
        now = datetime.fromtimestamp(moment // 1, local).replace(tzinfo=None)
        calm = not any(self._changes(now.date() + timedelta(days=days), local) for days in (-2, -1, 0, 1))
        walls = CronSim(self.expression, now if calm else datetime.combine(now.date() - LONGEST_GAP, time()) - SECOND)
        for day, group in groupby(walls, key=datetime.date):
            ticks = self._day(group, zone)
            for tick in sorted(ticks, key=lambda tick: tick.at) if self._changes(day, local) else ticks:
                if tick.at > moment:
                    yield tick

    def _changes(self, day: date, zone: ZoneInfo) -> bool:
        """Whether the clocks change on this day, or at its ends."""
        noon = datetime.combine(day, time(12), zone)
        return (noon - DAY).utcoffset() != (noon + DAY).utcoffset()

    def _day(self, walls: Iterable[datetime], zone: str) -> Iterator[Tick]:
        """Yield the ticks of a day's wall times."""
        local = time_zone(zone)
        gaps: set[int] = set()
        for wall in walls:
            first, second = (int(wall.replace(tzinfo=local, fold=fold).timestamp()) for fold in (0, 1))
            if first == second:
                yield self._tick(first, wall, zone)
            elif first < second:  # the clocks go back, and show the time twice
                if self.on_repeat != "last":
                    yield self._tick(first, wall, zone)
                if self.on_repeat != "first":
                    yield self._tick(second, wall, zone, repeated=self.on_repeat == "both")
            elif self.gap == "after":  # the clocks go forward, and skip the time
                end = transition(second, first, local)
                if end not in gaps:
                    gaps.add(end)
                    yield self._tick(end, wall, zone)

    def _tick(self, at: int, wall: datetime, zone: str, *, repeated: bool = False) -> Tick:
        """Return a tick.  It is named by its wall time if it comes at most once a day, otherwise by its instant."""
        return wall_tick(at, wall, zone, repeated=repeated) if self.daily else Tick(at, wall, zone, utc_text(at))


def offset_at(at: int, zone: ZoneInfo) -> timedelta:
    return datetime.fromtimestamp(at, zone).utcoffset() or timedelta()


def next_change(at: int, offset: timedelta, zone: ZoneInfo) -> int:
    """Return the first second after *at* with another offset than *offset*, or *at* + 30 days if there is none."""
    if offset_at(at + 1, zone) != offset:
        return at + 1
    for later in range(at + 86400, at + 31 * 86400, 86400):
        if offset_at(later, zone) != offset:
            return transition(at + 1, later, zone)
    return at + 30 * 86400
