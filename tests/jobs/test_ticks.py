"""Ticks: the instants of a cron expression, above all when the clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from oncemore.errors import ConfigurationError
from oncemore.jobs.cron import NAMES, Cron
from oncemore.jobs.ticks import Every, Tick, Trigger, between

NEW_YORK, BERLIN, CAIRO, LORD_HOWE = "America/New_York", "Europe/Berlin", "Africa/Cairo", "Australia/Lord_Howe"
ZONES = (NEW_YORK, BERLIN, CAIRO, LORD_HOWE, "UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Apia")


def ticks_on(expression: str, zone: str, day: str, **settings: str) -> list[Tick]:
    """Return the ticks with a wall time on *day*."""
    midnight = datetime.fromisoformat(day).replace(tzinfo=UTC)
    start, end = (midnight + timedelta(days=days) for days in (-2, 3))
    cron = Cron(expression, **settings)  # type: ignore[arg-type]
    return [tick for tick in between(cron, start.timestamp(), end.timestamp(), zone) if str(tick.date) == day]


def shown(ticks: list[Tick]) -> list[str]:
    return [f"{datetime.fromtimestamp(tick.at, ZoneInfo(tick.zone)):%H:%M%z}" for tick in ticks]


# The clocks go forward: (expression, zone, day) -> with gap="after", with gap="skip"
FORWARD = {
    ("30 2 * * *", NEW_YORK, "2026-03-08"): (["03:00-0400"], []),
    ("*/15 2 * * *", NEW_YORK, "2026-03-08"): (["03:00-0400"], []),
    ("0 2,3 * * *", NEW_YORK, "2026-03-08"): (["03:00-0400"], ["03:00-0400"]),
    ("30 2,4 * * *", NEW_YORK, "2026-03-08"): (["03:00-0400", "04:30-0400"], ["04:30-0400"]),
    ("0 6 * * *", NEW_YORK, "2026-03-08"): (["06:00-0400"], ["06:00-0400"]),
    ("30 2 * * *", BERLIN, "2026-03-29"): (["03:00+0200"], []),
    ("59 1 * * *", BERLIN, "2026-03-29"): (["01:59+0100"], ["01:59+0100"]),
    ("0 0 * * *", CAIRO, "2026-04-24"): (["01:00+0300"], []),
    ("@daily", CAIRO, "2026-04-24"): (["01:00+0300"], []),
    ("15 2 * * *", LORD_HOWE, "2026-10-04"): (["02:30+1100"], []),
    ("45 2 * * *", LORD_HOWE, "2026-10-04"): (["02:45+1100"], ["02:45+1100"]),
    ("0 12 * * *", "Pacific/Apia", "2011-12-30"): (["00:00+1400"], []),  # a day that Samoa never had
}
# The clocks go back: (expression, zone, day) -> first, last, both
BACK = {
    ("30 1 * * *", NEW_YORK, "2026-11-01"): (["01:30-0400"], ["01:30-0500"], ["01:30-0400", "01:30-0500"]),
    ("*/30 1 * * *", NEW_YORK, "2026-11-01"): (
        ["01:00-0400", "01:30-0400"],
        ["01:00-0500", "01:30-0500"],
        ["01:00-0400", "01:30-0400", "01:00-0500", "01:30-0500"],
    ),
    ("0 6 * * *", NEW_YORK, "2026-11-01"): (["06:00-0500"],) * 3,
    ("30 2 * * *", BERLIN, "2026-10-25"): (["02:30+0200"], ["02:30+0100"], ["02:30+0200", "02:30+0100"]),
    ("30 23 * * *", CAIRO, "2026-10-29"): (["23:30+0300"], ["23:30+0200"], ["23:30+0300", "23:30+0200"]),
    ("45 1 * * *", LORD_HOWE, "2026-04-05"): (["01:45+1100"], ["01:45+1030"], ["01:45+1100", "01:45+1030"]),
    ("15 1 * * *", LORD_HOWE, "2026-04-05"): (["01:15+1100"],) * 3,
}


@pytest.mark.parametrize(("expression", "zone", "day"), FORWARD)
def test_clocks_go_forward(expression: str, zone: str, day: str) -> None:
    after, skip = (shown(ticks_on(expression, zone, day, gap=gap)) for gap in ("after", "skip"))
    assert (after, skip) == FORWARD[expression, zone, day]


@pytest.mark.parametrize(("expression", "zone", "day"), BACK)
def test_clocks_go_back(expression: str, zone: str, day: str) -> None:
    found = tuple(shown(ticks_on(expression, zone, day, on_repeat=which)) for which in ("first", "last", "both"))
    assert found == BACK[expression, zone, day]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("day", ["2026-03-08", "2026-11-01", "2026-03-29", "2026-10-25", "2026-04-24", "2026-10-29"])
def test_every_hour_runs_at_each_real_hour(zone: str, day: str) -> None:
    start = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() - 43200
    ticks = list(between(Cron("0 * * * *"), start, start + 2 * 86400, zone))
    assert {later.at - tick.at for tick, later in pairwise(ticks)} <= {
        3600,
        1800,
        5400,
    }  # Lord Howe shifts by half an hour
    assert len(ticks) in range(47, 50)


def test_gap_is_named_by_its_first_skipped_wall_time() -> None:
    (daily,) = ticks_on("30 2 * * *", NEW_YORK, "2026-03-08")
    assert daily.name == "2026-03-08T0230:America/New_York"
    (often,) = ticks_on("*/15 2 * * *", NEW_YORK, "2026-03-08")
    assert often.wall == datetime(2026, 3, 8, 2, 0)
    assert often.name == "20260308T070000Z"


def test_daily_ticks_are_named_by_wall_time_others_by_instant() -> None:
    names = {
        expression: ticks_on(expression, BERLIN, "2026-02-19")[0].name
        for expression in ("0 6 * * *", "@daily", "30 0 6 * * *", "0 6,18 * * *", "*/15 * * * *", "@hourly")
    }
    assert names == {
        "0 6 * * *": "2026-02-19T0600:Europe/Berlin",
        "@daily": "2026-02-19T0000:Europe/Berlin",
        "30 0 6 * * *": "2026-02-19T060030:Europe/Berlin",
        "0 6,18 * * *": "20260219T050000Z",
        "*/15 * * * *": "20260218T230000Z",
        "@hourly": "20260218T230000Z",
    }


def test_repeated_daily_ticks_have_names_of_their_own() -> None:
    names = [tick.name for tick in ticks_on("30 1 * * *", NEW_YORK, "2026-11-01", on_repeat="both")]
    assert names == ["2026-11-01T0130:America/New_York", "2026-11-01T0130:America/New_York:repeated"]


def test_day_or_weekday_is_or_as_in_debian() -> None:
    start = datetime(2026, 2, 1, tzinfo=UTC).timestamp()
    days = [tick.wall.day for tick in between(Cron("0 0 13 * 5"), start, start + 20 * 86400, "UTC")]
    assert days == [6, 13, 20]  # Fridays, and the 13th, which is one


@pytest.mark.parametrize(
    "expression", ["", "* * * *", "61 * * * *", "0 0 30 2 *", "@reboot", "a b c d e", "* * * * * * *"]
)
def test_wrong_expression_is_refused_with_the_correction(expression: str) -> None:
    with pytest.raises(ConfigurationError, match="Write minute, hour, day, month and weekday"):
        Cron(expression)


@pytest.mark.parametrize("interval", [0, "0s", "500ms", "1.5s", -1, "soon"])
def test_every_needs_whole_seconds(interval: float | str) -> None:
    with pytest.raises(ConfigurationError):
        Every(interval)


def test_every_is_aligned_for_all_processes() -> None:
    ticks = list(between(Every("15m"), 1000.5, 3600.0, NEW_YORK))
    assert [tick.at for tick in ticks] == [1800, 2700, 3600]
    assert ticks[0].name == "19700101T003000Z"
    assert str(ticks[0].date) == "1969-12-31"


# ── For all expressions, zones and times ──────────────────────────────────────────────────────────────────────────────

MINUTES = st.sampled_from(["0", "30", "45", "15,45", "*/15", "*", "59"])
HOURS = st.sampled_from(["0", "1", "2", "3", "23", "0-3", "1,2", "*/2", "*", "6", "22-23"])
DAYS = st.sampled_from(["*", "1", "L", "*/2", "24-31"])
WEEKDAYS = st.sampled_from(["*", "0", "1-5", "SUN"])
EXPRESSIONS = st.builds(lambda *fields: " ".join([*fields[:3], "*", fields[3]]), MINUTES, HOURS, DAYS, WEEKDAYS)
CRONS = st.builds(
    Cron,
    EXPRESSIONS | st.sampled_from([*NAMES]),
    st.sampled_from(["after", "skip"]),
    st.sampled_from(["first", "last", "both"]),
)
TRIGGERS: st.SearchStrategy[Trigger] = CRONS | st.builds(Every, st.sampled_from(["7s", "1m", "15m", "1h", "1d", "1w"]))
# Around the changes of the clocks more often than not.
CHANGES = [
    datetime(2026, month, day, hour, tzinfo=UTC).timestamp()
    for month, day, hour in [
        (3, 8, 7),
        (11, 1, 6),
        (3, 29, 1),
        (10, 25, 1),
        (4, 23, 22),
        (10, 29, 21),
        (4, 4, 15),
        (10, 3, 15),
    ]
] + [datetime(2011, 12, 30, 10, tzinfo=UTC).timestamp()]
NEAR = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])
MOMENTS = st.builds(
    lambda change, offset: change + offset, st.sampled_from(CHANGES), st.floats(-2 * 86400, 2 * 86400) | NEAR
)
SPANS = st.floats(0, 1.5 * 86400)


@given(TRIGGERS, st.sampled_from(ZONES), MOMENTS, SPANS, SPANS)
def test_ticks_of_a_span_are_those_of_its_parts(
    trigger: Trigger, zone: str, start: float, first: float, second: float
) -> None:
    middle, end = start + first, start + first + second

    def some(a: float, b: float) -> list[Tick]:
        return list(islice(between(trigger, a, b, zone), 5000))

    whole = some(start, end)
    if len(whole) < 5000:
        assert whole == some(start, middle) + some(middle, end)


@pytest.mark.parametrize("expression", ["0 */2 * * *", "*/30 * * * *", "*/30 0-3 * * *", "30 1 * * *", "0 0 * * *"])
def test_ticks_after_each_second_around_a_change(expression: str) -> None:
    for zone in ZONES:
        for change in map(int, CHANGES):
            cron, end = Cron(expression, on_repeat="both"), change + 86400
            whole = list(between(cron, change - 86400, end, zone))
            for moment in range(change - 2, change + 2):
                assert list(between(cron, moment, end, zone)) == [tick for tick in whole if tick.at > moment]


@given(TRIGGERS, st.sampled_from(ZONES), MOMENTS)
def test_ticks_come_in_order_and_each_name_once(trigger: Trigger, zone: str, start: float) -> None:
    ticks = list(islice(trigger.after(start, zone), 200))
    assert all(tick.at <= later.at for tick, later in pairwise(ticks))
    assert all(tick.at > start for tick in ticks)
    assert len({tick.name for tick in ticks}) == len(ticks)


@given(CRONS, st.sampled_from(ZONES), st.sampled_from(CHANGES))
def test_each_wall_time_runs_when_a_clock_shows_it(cron: Cron, zone: str, change: float) -> None:
    """The result is compared with a clock on the wall that is read every minute."""
    local, start = ZoneInfo(zone), int(change - 2 * 86400) // 60 * 60
    clock: dict[datetime, list[int]] = {}
    for at in range(start, start + 4 * 86400, 60):
        clock.setdefault(datetime.fromtimestamp(at, local).replace(tzinfo=None), []).append(at)
    first, last = min(clock), max(clock)
    expected: set[int] = set()
    for wall in CronSim(cron.expression, first):
        if wall >= last:
            break
        shown_at = clock.get(wall, [])
        if cron.by_real_time or cron.on_repeat == "both":
            expected.update(shown_at)
        elif shown_at:
            expected.add(shown_at[0] if cron.on_repeat == "first" else shown_at[-1])
        if not shown_at and cron.gap == "after" and not cron.by_real_time:
            expected.add(min(at for later, instants in clock.items() if later > wall for at in instants))
    found = {tick.at for tick in between(cron, start - 1, start + 4 * 86400, zone)}
    inside = range(start + 60, start + 4 * 86400 - 86400 // 2)
    assert {at for at in found if at in inside} == {at for at in expected if at in inside}
