"""Objects of one event loop are made once and dropped with the loop; kept tasks are finished."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from oncemore._runtime.loops import PerLoop, finish_despite_cancel, keep_task
from oncemore._runtime.service import nothing, run_service


class Thing:
    pass


def test_per_loop_makes_one_thing_for_each_loop() -> None:
    things = PerLoop(Thing)

    async def twice() -> Thing:
        assert things.find() is None
        thing = things.get()
        assert things.get() is thing
        assert things.find() is thing
        return thing

    first, second = asyncio.run(twice()), asyncio.run(twice())
    assert first is not second


def test_per_loop_finds_the_thing_after_another_loop_was_served() -> None:
    things = PerLoop(Thing)

    async def get() -> Thing:
        return things.get()

    loops = [asyncio.new_event_loop() for _ in range(2)]
    served = [loop.run_until_complete(get()) for loop in (*loops, *loops)]
    assert served[:2] == served[2:]
    for loop in loops:
        loop.close()


def test_per_loop_pop_removes_the_thing() -> None:
    things = PerLoop(Thing)

    async def pop() -> None:
        thing = things.get()
        assert things.pop() is thing
        assert things.pop() is None
        assert things.get() is not thing

    asyncio.run(pop())


def test_per_loop_drops_things_that_keep_their_closed_loop_alive() -> None:
    dropped: list[asyncio.Future[None]] = []

    def make() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    async def get() -> weakref.ref[asyncio.AbstractEventLoop]:
        things.get()
        return weakref.ref(asyncio.get_running_loop())

    things = PerLoop(make, dropped.append)
    first = asyncio.run(get())
    assert len(things.things) == 1
    second = asyncio.run(get())
    assert len(dropped) == 1
    things.drop_closed()
    assert len(dropped) == 2
    assert len(things.things) == 0
    dropped.clear()
    gc.collect()
    assert first() is second() is None


def test_per_loop_drops_a_thing_once_if_two_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Thing] = []

    async def get() -> asyncio.AbstractEventLoop:
        things.get()
        return asyncio.get_running_loop()

    things = PerLoop(Thing, dropped.append)
    closed = weakref.ref(loop := asyncio.run(get()))
    monkeypatch.setattr(things.things, "keyrefs", lambda: [closed, closed])
    things.drop_closed()
    assert len(dropped) == 1
    assert closed() is loop


def test_per_loop_lets_go_of_a_collected_loops_thing() -> None:
    async def get() -> weakref.ref[Collected]:
        return weakref.ref(things.get())

    class Collected:
        pass

    things = PerLoop(Collected)
    thing = asyncio.run(get())
    gc.collect()
    things.drop_closed()
    gc.collect()
    assert thing() is None


async def test_kept_task_survives_the_garbage_collector() -> None:
    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    task = weakref.ref(keep_task(work()))
    gc.collect()
    found = task()
    assert found is not None
    assert await found == "done"


def test_kept_task_does_not_keep_its_closed_loop_alive() -> None:
    async def keep() -> None:
        keep_task(asyncio.sleep(60))

    async def keep_another() -> None:
        await keep_task(asyncio.sleep(0))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(keep())
    loop.close()  # the task is pending: nobody has cancelled it, as asyncio.run would have
    closed = weakref.ref(loop)
    del loop
    asyncio.run(keep_another())
    gc.collect()
    assert closed() is None


async def test_finish_despite_cancel_returns_the_result() -> None:
    async def work() -> str:
        return "done"

    assert await finish_despite_cancel(work()) == "done"


@pytest.mark.parametrize("fails", [False, True])
async def test_finish_despite_cancel_finishes_before_it_is_cancelled(fails: bool) -> None:
    async def work() -> None:
        await asyncio.sleep(0.05)
        done.append("done")
        if fails:
            raise ValueError

    done: list[str] = []
    task = asyncio.create_task(finish_despite_cancel(work()))
    for _ in range(2):  # more than one cancellation changes nothing
        await asyncio.sleep(0.01)
        task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert done == ["done"]
    assert isinstance(caught.value.__cause__, ValueError) is fails


async def test_service_does_not_run_inside_an_event_loop() -> None:
    with pytest.raises(RuntimeError, match="await the method with an `a` before its name"):
        run_service(nothing)
