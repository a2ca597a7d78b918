"""asyncio.run ends: it cancels all tasks, flights and callers alike, and what they were saying is still said."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from typing import Any

import pytest
import uvloop

from oncemore._runtime.batching import Ask, Lane, Tell
from oncemore._runtime.plan import Call, Plan
from oncemore._runtime.shutdown import at_shutdown

flown: list[Any] = []
begun: list[Any] = []


def fly(items: list[Any]) -> Plan[list[Any]]:
    """A flight that takes a while, in a task."""
    begun.extend(items)
    yield Call(asyncio.sleep, 0.02)
    flown.extend(items)
    return items


def give_back(item: Any, answer: Any) -> Plan[None]:
    flown.append(f"{item} is given back")
    return
    yield


@pytest.fixture(autouse=True)
def empty_sky() -> None:
    flown.clear()
    begun.clear()


def left_behind(lane: Lane[Any], kind: type[Ask[Any]], *items: str, **loop: Any) -> None:
    """Ask for the items one after another, and go when the first has taken off."""

    async def asking(item: str) -> None:
        await kind(lane, item).arun()

    async def main() -> None:
        tasks.append(asyncio.create_task(asking(items[0])))
        while not begun:
            await asyncio.sleep(0)
        tasks.extend(asyncio.create_task(asking(item)) for item in items[1:])
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    with asyncio.Runner(**loop) as runner:
        runner.run(main())
    assert all(task.cancelled() for task in tasks)


@pytest.mark.parametrize("loop", [{}, {"debug": True}, {"loop_factory": uvloop.new_event_loop}])
def test_what_was_in_flight_and_what_waited_behind_it_is_done(
    loop: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """CASES 23."""
    left_behind(Lane(fly), Tell, "in flight", "behind it", **loop)
    gc.collect()
    assert flown == ["in flight", "behind it"]
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []  # of a task that was destroyed, say


def test_a_claim_in_flight_is_given_back_and_one_that_has_not_been_sent_is_not() -> None:
    left_behind(Lane(fly, abandoned=give_back), Ask, "in flight", "behind it")
    assert flown == ["in flight", "in flight is given back"]


def test_an_errand_is_not_waited_for() -> None:
    left_behind(Lane(fly, stays=False), Ask, "a walk")
    assert flown == []


def test_an_errand_that_has_not_begun_is_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    """Its task would be one that asyncio.run does not know of."""
    tasks: list[asyncio.Task[Any]] = []

    async def asking(lane: Lane[Any]) -> None:
        await Ask(lane, "a walk").arun()

    async def leaving() -> None:
        tasks.append(
            asyncio.create_task(asking(Lane(fly, stays=False)))
        )  # in the loop's last turn but for the shutdown

    asyncio.run(leaving())
    gc.collect()
    assert begun == []
    assert caplog.records == []


def test_a_flight_that_is_stopped_again_and_again_is_not_flown_for_ever() -> None:
    def stopped(items: list[Any]) -> Plan[list[Any]]:
        begun.extend(items)
        yield Call(stop)
        return items

    async def stop() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        future = Tell(Lane(stopped), "settle").arun()
        assert isinstance(future, asyncio.Future)
        future.cancel()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert begun == ["settle", "settle"]


def test_a_store_that_does_not_answer_does_not_keep_the_loop_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CASES 27: each group would be waited for until it fails."""

    def unanswered(items: list[Any]) -> Plan[list[Any]]:
        begun.extend(items)
        yield Call(asyncio.sleep, 10)
        return items

    monkeypatch.setattr("oncemore._runtime.batching.LONGEST_STAY", 0.1)
    began = time.monotonic()
    left_behind(Lane(unanswered), Tell, "in flight", "behind it")
    assert time.monotonic() - began < 5
    assert "the event loop ends without it" in caplog.text
    gc.collect()  # asyncio tells of the flight, too, and not in the next test


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factory", [None, uvloop.new_event_loop])
def test_what_is_asked_for_during_the_shutdown_is_waited_for_by_those_who_ask(factory: Any) -> None:
    """A claim is given back over another lane, which this loop has not seen before."""

    async def work() -> None:
        assert at_shutdown(work) is None
        await Tell(writes, "release").arun()

    async def main() -> None:
        kept.append(at_shutdown(work))

    kept: list[Any] = []
    writes: Lane[Any] = Lane(fly)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert flown == ["release"]


def test_what_is_no_longer_wanted_is_merely_collected_and_keeps_no_loop(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        flown.append("work")

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        at_shutdown(work)  # and nobody keeps it
        kept.append(at_shutdown(work))
        return weakref.ref(asyncio.get_running_loop())

    kept: list[Any] = []
    loop = asyncio.new_event_loop()
    ended = loop.run_until_complete(main())
    loop.close()  # without a shutdown
    del loop
    gc.collect()
    assert ended() is None
    with caplog.at_level(logging.ERROR):
        kept.clear()
        gc.collect()
    assert flown == []
    assert caplog.records == []
