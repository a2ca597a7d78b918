"""A flight without a task: effects that give their result at once, or tell of it later, or must be awaited after all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from oncemore._runtime.batching import Ask, Lane
from oncemore._runtime.drive import AWAITED, TOLD, Drive
from oncemore._runtime.plan import Plan
from oncemore.errors import StoreError, StoreUnavailable


class Begun:
    """An effect whose `begin` is *begin*; awaited, it gives "awaited"."""

    def __init__(self, begin: Callable[[Drive], Any]) -> None:
        self.begin = begin

    def run(self) -> str:
        raise AssertionError("it is not for threads")

    async def arun(self) -> str:
        await asyncio.sleep(0)
        return "awaited"


def at_once(drive: Drive) -> str:
    return "at once"


def later(drive: Drive) -> Any:
    asyncio.get_running_loop().call_later(0.01, drive.go_on, "later")
    return TOLD


def failing(drive: Drive) -> Any:
    raise StoreUnavailable("at once")


def failing_later(drive: Drive) -> Any:
    asyncio.get_running_loop().call_later(0.01, drive.throw, StoreUnavailable("later"))
    return TOLD


def not_yet(drive: Drive) -> Any:
    return AWAITED


def lane_of(*begins: Callable[[Drive], Any]) -> Lane[int]:
    """A lane whose flights have these effects, and answer with what each has given or raised."""

    def fly(items: list[int]) -> Plan[list[Any]]:
        story = []
        for begin in begins:
            try:
                story.append((yield Begun(begin)))
            except StoreUnavailable as error:
                story.append(f"failed {error.detail}")
        return [story for _ in items]

    return Lane(fly)


def tasks_besides(count: int) -> int:
    return len(asyncio.all_tasks()) - count


async def test_what_can_be_done_without_a_task_is() -> None:
    lane = lane_of(at_once, later, failing, failing_later)
    future = lane.enqueue(1)
    await asyncio.sleep(0)
    assert tasks_besides(1) == 0
    assert await future == ["at once", "later", "failed at once", "failed later"]
    await lane.drain()


async def test_what_must_be_awaited_is_and_all_that_comes_after_it() -> None:
    lane = lane_of(at_once, not_yet, later)
    future = lane.enqueue(1)
    await asyncio.sleep(0)
    assert tasks_besides(1) == 1
    assert await future == ["at once", "awaited", "awaited"]


async def test_a_failure_that_the_plan_lets_out_is_each_callers_own() -> None:
    def fly(items: list[int]) -> Plan[list[Any]]:
        yield Begun(failing_later)
        return items

    lane = Lane(fly)
    answers = await asyncio.gather(*(Ask(lane, item).arun() for item in (1, 2)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreUnavailable, StoreUnavailable]
    assert answers[0] is not answers[1]


async def test_several_may_wait_for_the_last_flight_and_one_of_them_give_up() -> None:
    lane = lane_of(later)
    future = lane.enqueue(1)
    patient, impatient = (asyncio.create_task(lane.drain()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await patient
    assert future.done()


@pytest.mark.parametrize("later", [False, True])
def test_an_interrupt_reaches_the_loop_and_those_on_the_flight_hear_of_it(later: bool) -> None:
    begun: list[Drive] = []

    def begin(drive: Drive) -> Any:
        begun.append(drive)
        if len(begun) > 1:
            return "at once"
        if not later:
            raise KeyboardInterrupt
        asyncio.get_running_loop().call_soon(drive.throw, KeyboardInterrupt())
        return TOLD

    lane = lane_of(begin)
    with asyncio.Runner() as runner:

        async def asking() -> Any:
            return await Ask(lane, 1).arun()

        async def started() -> asyncio.Task[Any]:
            return asyncio.create_task(asking())

        struck = runner.run(started())
        with pytest.raises(KeyboardInterrupt):
            runner.run(asyncio.sleep(5))

        async def ended() -> None:
            with pytest.raises(StoreError, match="may or may not have happened"):
                await struck
            assert await Ask(lane, 2).arun() == ["at once"]

        runner.run(ended())
