"""A lane on event loops: a caller may be cancelled, a flight may be stopped, a loop may vanish; nobody else suffers."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import pytest
import uvloop

from oncemore._runtime.batching import Ask, Lane, Tell
from oncemore._runtime.plan import Call, Plan, arun
from oncemore.errors import StoreError, StoreUnavailable


class Sky:
    """The far end of a lane: it notes each group, and keeps flights in the air while it is closed."""

    def __init__(self, answer: Callable[[list[Any]], Sequence[Any]] = lambda items: [f"<{item}>" for item in items]):
        self.answer = answer
        self.groups: list[list[Any]] = []
        self.taken_off = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    def fly(self, items: list[Any]) -> Plan[Sequence[Any]]:
        self.groups.append(items)
        self.taken_off.set()
        yield Call(self.open.wait)
        return self.answer(items)


def ask(lane: Lane[Any], item: Any) -> asyncio.Task[Any]:
    def plan() -> Plan[Any]:
        return (yield Ask(lane, item))

    return asyncio.create_task(arun(plan()))


async def take_off(lane: Lane[Any], sky: Sky, *items: Any) -> list[asyncio.Task[Any]]:
    """A flight that stays in the air until the sky opens."""
    sky.open.clear()
    sky.taken_off.clear()
    tasks = [ask(lane, item) for item in items]
    await sky.taken_off.wait()
    return tasks


async def queue_up(lane: Lane[Any], *items: Any) -> list[asyncio.Task[Any]]:
    """Tasks that have asked, and wait while another group flies."""
    tasks = [ask(lane, item) for item in items]
    await asyncio.sleep(0)
    return tasks


def fail(error: BaseException) -> Any:
    raise error


async def test_a_lone_caller_flies_at_once() -> None:
    sky = Sky()
    lane = Lane(sky.fly)
    assert [await Ask(lane, item).arun() for item in (1, 2)] == ["<1>", "<2>"]
    assert sky.groups == [[1], [2]]


async def test_those_who_ask_in_one_turn_of_the_loop_fly_together() -> None:
    sky = Sky()
    lane = Lane(sky.fly)
    assert await asyncio.gather(*(ask(lane, item) for item in range(5))) == [f"<{item}>" for item in range(5)]
    assert sky.groups == [[0, 1, 2, 3, 4]]


async def test_a_group_is_what_came_in_while_the_last_one_flew_up_to_the_most_in_its_order() -> None:
    sky = Sky()
    lane = Lane(sky.fly, most=3)
    tasks = await take_off(lane, sky, 0)
    tasks += await queue_up(lane, *range(1, 8))
    sky.open.set()
    assert await asyncio.gather(*tasks) == [f"<{item}>" for item in range(8)]
    assert sky.groups == [[0], [1, 2, 3], [4, 5, 6], [7]]


async def twice(lane: Lane[Any], item: int, *, turns: int = 1) -> None:
    """A caller who asks, does something that takes a few turns of the loop, and asks again, as one who settles does."""
    await Ask(lane, item).arun()
    for _ in range(turns):
        await asyncio.sleep(0)
    await Ask(lane, -item).arun()


async def test_those_who_come_back_at_once_fly_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Turns are what counts, and a busy machine's are long.
    monkeypatch.setattr("oncemore._runtime.batching.LONGEST_BOARDING", 60.0)
    sky = Sky()
    lane = Lane(sky.fly)
    await asyncio.gather(*(twice(lane, item, turns=item % 3) for item in range(1, 9)))
    assert [len(group) for group in sky.groups] == [8, 8]


async def test_nobody_waits_for_those_who_do_not_come_back() -> None:
    sky = Sky()
    lane = Lane(sky.fly)
    away = [asyncio.create_task(twice(lane, item, turns=10_000)) for item in range(1, 5)]
    await asyncio.sleep(0)
    first = await take_off(lane, sky, 5)
    sky.open.set()
    await asyncio.wait_for(asyncio.gather(*first), 5)
    assert [item for group in sky.groups for item in group] == [1, 2, 3, 4, 5]
    for task in away:
        task.cancel()


async def test_a_loop_whose_turns_are_long_keeps_nobody_waiting_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at the clock in each turn, though each turn brings someone."""
    monkeypatch.setattr("oncemore._runtime.batching.LONGEST_BOARDING", -1.0)
    sky = Sky()
    lane = Lane(sky.fly)
    await asyncio.gather(*(twice(lane, item, turns=item) for item in range(1, 5)))
    assert len(sky.groups[0]) == 4
    assert len(sky.groups) > 2


async def test_one_items_error_is_its_own() -> None:
    sky = Sky(lambda items: [ValueError("bad") if item == 1 else item for item in items])
    good, bad = await asyncio.gather(
        *(ask(lane, item) for lane in [Lane(sky.fly)] for item in (0, 1)), return_exceptions=True
    )
    assert good == 0
    assert isinstance(bad, ValueError)


async def test_a_failing_flight_fails_each_with_an_error_of_its_own() -> None:
    error = StoreUnavailable("gone", retry_after=3)
    lane = Lane(Sky(lambda items: fail(error)).fly)
    mine, yours = await asyncio.gather(ask(lane, 1), ask(lane, 2), return_exceptions=True)
    assert isinstance(mine, StoreUnavailable)
    assert isinstance(yours, StoreUnavailable)
    assert mine is not yours
    assert mine.__cause__ is yours.__cause__ is error
    assert mine.retry_after == 3


async def test_a_flight_carries_nobodys_context() -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    lane = Lane(Sky(lambda items: [user.get()] * len(items)).fly)
    user.set("the first caller")
    assert await Ask(lane, 1).arun() == "nobody"


async def test_a_lane_serves_sixty_four_callers_on_any_loop() -> None:
    """Each answer goes to its own caller, whatever the loop."""

    async def caller(lane: Lane[Any], name: int) -> None:
        for count in range(20):
            assert await Ask(lane, (name, count)).arun() == f"<{(name, count)}>"

    async def callers() -> None:
        sky = Sky()
        lane = Lane(sky.fly)
        await asyncio.gather(*(caller(lane, name) for name in range(64)))
        assert max(map(len, sky.groups)) > 1

    await asyncio.to_thread(uvloop.run, callers())
    await callers()


# Callers that go away


def keep(item: Any, answer: Any) -> Plan[None]:
    """A way to give answers back."""
    return
    yield


async def test_a_caller_cancelled_before_the_flight_is_not_sent() -> None:
    sky = Sky()
    lane = Lane(sky.fly, abandoned=keep)
    (first,) = await take_off(lane, sky, 0)
    alone, gone, stays = await queue_up(lane, "alone", "gone", "stays")
    gone.cancel()
    sky.open.set()
    assert await asyncio.gather(first, alone, stays) == ["<0>", "<alone>", "<stays>"]
    assert sky.groups == [[0], ["alone", "stays"]]


async def test_where_all_are_cancelled_before_the_flight_there_is_none() -> None:
    sky = Sky()
    lane = Lane(sky.fly, abandoned=keep)
    (first,) = await take_off(lane, sky, 0)
    (gone,) = await queue_up(lane, "gone")
    gone.cancel()
    sky.open.set()
    assert await first == "<0>"
    await lane.drain()
    assert sky.groups == [[0]]


@pytest.mark.parametrize(("kind", "abandoned"), [(Tell, keep), (Ask, None)])
async def test_what_has_to_be_done_is_sent_though_its_caller_was_cancelled_before(kind: Any, abandoned: Any) -> None:
    """A settle above all: its effect has happened."""
    sky = Sky()
    lane = Lane(sky.fly, abandoned=abandoned)
    (first,) = await take_off(lane, sky, 0)
    gone = asyncio.ensure_future(kind(lane, "settle").arun())
    gone.cancel()
    sky.open.set()
    assert await first == "<0>"
    await lane.drain()
    assert sky.groups == [[0], ["settle"]]


@pytest.mark.parametrize(("item", "expected"), [("good", [("good", "<good>")]), ("bad", [])])
async def test_the_answer_of_a_caller_cancelled_in_flight_is_given_back(item: str, expected: list[Any]) -> None:
    given_back: list[Any] = []

    def abandoned(item: Any, answer: Any) -> Plan[None]:
        given_back.append((yield Call(lambda: (item, answer))))

    sky = Sky(lambda items: [ValueError() if item == "bad" else f"<{item}>" for item in items])
    lane = Lane(sky.fly, abandoned=abandoned)
    gone, stays = await take_off(lane, sky, item, "stays")
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert given_back == []
    sky.open.set()
    assert await stays == "<stays>"
    await lane.drain()
    assert given_back == expected


async def test_the_next_flight_waits_until_all_that_nobody_took_has_been_given_back() -> None:
    given_back: list[str] = []

    class Doze:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        async def arun(self) -> None:
            await asyncio.sleep(self.seconds)

    def abandoned(item: Any, answer: Any) -> Plan[None]:
        yield Doze({"slow": 0.05, "quick": 0}[item])
        given_back.append(item)

    sky = Sky(lambda items: [list(given_back) for _ in items])
    lane = Lane(sky.fly, abandoned=abandoned)
    slow, quick = await take_off(lane, sky, "slow", "quick")
    (next_one,) = await queue_up(lane, "next")
    slow.cancel()
    quick.cancel()
    sky.open.set()
    assert await next_one == ["quick", "slow"]
    assert sky.groups == [["slow", "quick"], ["next"]]


async def test_an_answer_that_nobody_takes_may_be_dropped() -> None:
    sky = Sky()
    lane = Lane(sky.fly)
    gone, stays = await take_off(lane, sky, "gone", "stays")
    gone.cancel()
    sky.open.set()
    assert await stays == "<stays>"


async def test_a_failure_to_give_back_is_logged_and_stops_no_flight(caplog: pytest.LogCaptureFixture) -> None:
    sky = Sky()
    lane = Lane(sky.fly, abandoned=lambda item, answer: fail(StoreUnavailable("gone")))
    (gone,) = await take_off(lane, sky, "gone")
    (next_one,) = await queue_up(lane, "next")
    gone.cancel()
    with caplog.at_level(logging.ERROR, "oncemore"):
        sky.open.set()
        assert await next_one == "<next>"
    assert "could not be given back" in caplog.text


@pytest.mark.parametrize(("answer", "told"), [("good", True), (ValueError("bad"), False)])
async def test_where_an_answer_and_a_cancellation_meet_the_caller_is_cancelled(
    caplog: pytest.LogCaptureFixture, answer: Any, told: bool
) -> None:
    """Whatever becomes of the answer: a timeout would else be told as a failure of the store."""
    lane = Lane(Sky(lambda items: [answer]).fly, abandoned=lambda item, answer: fail(StoreUnavailable("gone")))
    asked = ask(lane, "met")
    await asyncio.sleep(0)
    ((_, future),) = lane._loops[asyncio.get_running_loop()].waiting
    while not future.done():
        await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert ("could not be given back" in caplog.text) is told


async def test_between_two_full_groups_the_loop_has_a_turn() -> None:
    """As where an event loop writes by itself, and a flight is over without a wait."""
    turns: list[int] = []

    def fly(items: list[Any]) -> Plan[list[Any]]:
        turns.append(turn)
        return items
        yield

    turn, lane = 0, Lane(fly, most=2)
    tasks = [ask(lane, item) for item in range(6)]
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    assert len(set(turns)) == len(turns) == 3


# Flights that are stopped


async def test_a_stopped_flight_is_a_store_error_to_those_on_it_and_the_next_one_flies() -> None:
    sky = Sky()
    lane = Lane(sky.fly)
    (aboard,) = await take_off(lane, sky, "aboard")
    (waiting,) = await queue_up(lane, "waiting")
    [drive] = lane._loops[asyncio.get_running_loop()].drives
    draining = asyncio.create_task(lane.drain())
    assert drive.task is not None
    drive.task.cancel()
    with pytest.raises(StoreError, match="may or may not have happened"):
        await aboard
    await asyncio.sleep(0.01)
    assert not draining.done()
    sky.open.set()
    assert await waiting == "<waiting>"
    await draining


def test_a_loop_that_is_shut_down_lets_its_callers_tidy_up() -> None:
    """asyncio.run cancels all tasks at once, flights included; those who then ask again must not wait for ever."""
    story: list[str] = []

    async def caller(lane: Lane[Any], name: str) -> None:
        try:
            await Ask(lane, name).arun()
        finally:
            story.append(await Ask(lane, f"tidy up {name}").arun())

    async def main() -> None:
        sky = Sky()
        lane = Lane(sky.fly, most=1)
        sky.open.clear()
        tasks.extend(asyncio.create_task(caller(lane, name)) for name in ("aboard", "waiting"))
        await sky.taken_off.wait()
        asyncio.get_running_loop().call_soon(sky.open.set)

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert sorted(story) == ["<tidy up aboard>", "<tidy up waiting>"]


def test_a_loop_that_is_shut_down_before_a_flight_has_begun_lets_its_callers_tidy_up() -> None:
    """The flight's task is then cancelled before its first step, in which it could not even note that it is over."""
    sky_groups: list[list[Any]] = []

    async def settle(lane: Lane[Any]) -> None:
        try:
            await Tell(lane, "settle").arun()
        finally:
            await asyncio.wait_for(Tell(lane, "tidy up").arun(), 5)

    async def main() -> None:
        sky = Sky()
        sky.groups = sky_groups
        tasks.append(asyncio.create_task(settle(Lane(sky.fly))))

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert tasks[0].cancelled()
    assert sorted(item for group in sky_groups for item in group) == ["settle", "tidy up"]


def test_a_loop_that_is_shut_down_before_a_flight_has_begun_still_does_what_has_to_be_done() -> None:
    flown: list[Any] = []

    def fly(items: list[Any]) -> Plan[list[Any]]:
        flown.extend(items)
        return items
        yield

    async def main() -> None:
        asyncio.get_running_loop().call_soon(Tell(Lane(fly), "settle").arun)

    asyncio.run(main())
    assert flown == ["settle"]


def test_a_keyboard_interrupt_in_flight_reaches_the_loop_and_nobody_else() -> None:
    flights: list[Any] = []

    def answer(items: list[Any]) -> list[Any]:
        flights.append(asyncio.current_task())
        return fail(KeyboardInterrupt()) if len(flights) == 1 else items

    with asyncio.Runner() as runner:

        async def asked() -> tuple[Lane[Any], list[asyncio.Task[Any]]]:
            lane = Lane(Sky(answer).fly, most=1)
            return lane, [ask(lane, 1), ask(lane, 2)]

        lane, (struck, spared) = runner.run(asked())
        with pytest.raises(KeyboardInterrupt):
            runner.run(asyncio.sleep(5))

        async def ended() -> None:
            assert isinstance(flights[0].exception(), KeyboardInterrupt)
            with pytest.raises(StoreError):
                await struck
            assert await spared == 2
            assert await Ask(lane, 3).arun() == 3

        runner.run(ended())


# Loops that come and go


def test_several_loops_in_several_threads_share_a_lane() -> None:
    def fly(items: list[Any]) -> Plan[list[Any]]:
        thread = threading.get_ident()
        yield Call(asyncio.sleep, 0)
        assert threading.get_ident() == thread
        return [(item, thread) for item in items]

    lane = Lane(fly)
    faults: list[Any] = []

    async def caller(name: int) -> None:
        for count in range(25):
            answer = await Ask(lane, (name, count)).arun()
            if answer != ((name, count), threading.get_ident()):
                faults.append(answer)

    async def main() -> None:
        await asyncio.gather(*map(caller, range(8)))

    def loops() -> None:
        for _ in range(3):
            asyncio.run(main())

    threads = [threading.Thread(target=loops) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_loop_that_has_ended_is_not_kept() -> None:
    lane: Lane[int] = Lane(land)

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        await Ask(lane, 1).arun()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None
    assert len(lane._loops) == 0


def land(items: list[Any]) -> Plan[list[Any]]:
    return items
    yield


def hang(items: list[Any]) -> Plan[list[Any]]:
    yield Call(asyncio.sleep, 60)
    return items


def test_a_loop_closed_in_mid_flight_is_let_go_by_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    lane: Lane[int] = Lane(hang)

    async def ask_and_go() -> None:
        lane.enqueue(1)
        await asyncio.sleep(0)

    async def ask() -> Any:
        return await Ask(lane, 2).arun()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(ask_and_go())
    loop.close()
    closed = weakref.ref(loop)
    del loop
    lane.fly = land
    assert asyncio.run(ask()) == 2
    gc.collect()
    assert closed() is None
    assert "Task was destroyed but it is pending" in caplog.text


def test_a_plan_whose_loop_was_closed_hears_of_it_with_the_next_call() -> None:
    """So that a store can take back what it was about to get; here the next call is a thread's."""
    story: list[str] = []

    def fly(items: list[Any]) -> Plan[list[Any]]:
        if items == [1]:
            try:
                yield Call(asyncio.sleep, 60)
            finally:
                story.append("closed")
        return items

    async def ask_and_go() -> None:
        lane.enqueue(1)
        await asyncio.sleep(0.01)

    lane: Lane[int] = Lane(fly)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(ask_and_go())
    loop.close()
    assert story == []
    assert lane.submit(2) == 2
    assert story == ["closed"]
    assert lane.submit(3) == 3


async def test_a_lane_is_drained_when_nothing_is_in_flight() -> None:
    sky = Sky()
    lane = Lane(sky.fly, most=1)
    await lane.drain()
    tasks = await take_off(lane, sky, 1)
    tasks += await queue_up(lane, 2)
    draining = asyncio.create_task(lane.drain())
    await asyncio.sleep(0.01)
    assert not draining.done()
    sky.open.set()
    await draining
    assert sky.groups == [[1], [2]]
    assert await asyncio.gather(*tasks) == ["<1>", "<2>"]


@pytest.mark.parametrize(("kind", "expected"), [(Ask, [(1, "answer to 1")]), (Tell, [])])
async def test_an_answer_that_meets_a_cancellation_is_abandoned_unless_it_leaves_nothing_behind(
    kind: type[Ask[int]], expected: list[tuple[int, str]]
) -> None:
    """The answer is there, and its caller is cancelled before it has resumed: nobody else could give it back."""
    abandoned: list[tuple[int, str]] = []

    def fly(items: list[int]) -> Plan[list[str]]:
        return [f"answer to {item}" for item in items]
        yield

    def gone(item: int, answer: str) -> Plan[None]:
        abandoned.append((item, answer))
        return
        yield

    class Cancelling(Lane[int]):
        def enqueue(self, item: int) -> asyncio.Future[Any]:
            future = super().enqueue(item)
            future.add_done_callback(lambda _: task.cancel())  # runs before the caller is woken
            return future

    async def caller() -> Any:
        return await kind(lane, 1).arun()

    lane = Cancelling(fly, abandoned=gone)
    task = asyncio.create_task(caller())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert abandoned == expected
