"""Events: each observer sees each transition, and none can disturb the operation."""

from __future__ import annotations

import logging

import msgspec
import pytest

from oncemore import Operation
from oncemore._ledger.events import Event, tell_all

EVENT = Event(kind="settled", operation=Operation("s", "k"), token=3)


def test_every_observer_sees_the_event_in_turn() -> None:
    seen: list[tuple[str, Event]] = []
    tell_all([lambda event: seen.append(("first", event)), lambda event: seen.append(("second", event))], EVENT)
    assert seen == [("first", EVENT), ("second", EVENT)]


def test_failing_observer_is_logged_and_others_see_the_event(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def fail(event: Event) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "oncemore"):
        tell_all([fail, seen.append], EVENT)
    assert seen == [EVENT]
    assert "An observer failed on settled" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_interruption_in_an_observer_is_not_swallowed() -> None:
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tell_all([interrupt], EVENT)


def test_observer_cannot_change_an_event() -> None:
    with pytest.raises(AttributeError):
        EVENT.token = 4  # type: ignore[misc]
    assert msgspec.structs.asdict(EVENT)["token"] == 3
