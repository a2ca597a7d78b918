"""Plans: the same generator, driven by blocking and by awaiting, sees the same results, errors and ends."""

from __future__ import annotations

import _thread
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._runtime.plan import Call, Plan, Sleep, arun, run
from oncemore.errors import ConfigurationError

Drive = Callable[[Plan[Any]], Awaitable[Any]]


async def blocking(plan: Plan[Any]) -> Any:
    return run(plan)


DRIVERS = [pytest.param(blocking, id="run"), pytest.param(arun, id="arun")]
both = pytest.mark.parametrize("drive", DRIVERS)


class Boom(Exception):
    pass


def fail(error: BaseException) -> Any:
    raise error


@both
async def test_a_plan_is_sent_the_result_of_each_effect(drive: Drive) -> None:
    def plan() -> Plan[list[int]]:
        first = yield Call(lambda: 1)
        second = yield Call(lambda a, b: a + b, first, 10)
        return [first, second]

    assert await drive(plan()) == [1, 11]


@both
async def test_a_plan_without_effects_has_a_result(drive: Drive) -> None:
    def plan() -> Plan[str]:
        return "done"
        yield

    assert await drive(plan()) == "done"


@both
async def test_an_effects_error_is_thrown_into_the_plan(drive: Drive) -> None:
    def plan() -> Plan[str]:
        try:
            yield Call(fail, Boom())
        except Boom:
            return "mended by " + (yield Call(lambda: "another effect"))
        raise AssertionError

    assert await drive(plan()) == "mended by another effect"


@both
@pytest.mark.parametrize("error", [Boom(), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
async def test_error_uncaught_by_the_plan_is_raised(drive: Drive, error: BaseException) -> None:
    tidied = []

    def plan() -> Plan[None]:
        try:
            yield Call(fail, error)
        finally:
            tidied.append(True)

    with pytest.raises(type(error)) as caught:
        await drive(plan())
    assert caught.value is error
    assert tidied == [True]


@both
async def test_a_plans_own_error_is_the_callers(drive: Drive) -> None:
    def plan() -> Plan[None]:
        yield Call(lambda: None)
        raise Boom

    with pytest.raises(Boom):
        await drive(plan())


@both
async def test_stop_iteration_from_effect_is_not_the_plans_end(drive: Drive) -> None:
    def plan() -> Plan[str]:
        yield Call(fail, StopIteration("not the result"))
        return "the result"

    with pytest.raises(RuntimeError):
        await drive(plan())


@both
@given(steps=st.lists(st.integers() | st.sampled_from([Boom("a"), Boom("b")]), max_size=8))
async def test_both_drivers_see_the_same_story(drive: Drive, steps: list[Any]) -> None:
    def plan() -> Plan[list[Any]]:
        seen: list[Any] = []
        for step in steps:
            try:
                seen.append((yield Call(fail, step) if isinstance(step, Boom) else Call(lambda step=step: step)))
            except Boom as error:
                seen.append(error)
        return seen

    assert await drive(plan()) == steps


async def test_cancellation_in_mid_effect_is_thrown_into_the_plan() -> None:
    story: list[str] = []
    begun = asyncio.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    def plan() -> Plan[None]:
        try:
            yield Call(hang)
        except asyncio.CancelledError:
            yield Sleep(0.001)
            story.append("tidied")
            raise

    task = asyncio.create_task(arun(plan()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert story == ["tidied"]


async def test_a_second_cancellation_ends_the_tidying_up() -> None:
    hanging: asyncio.Queue[str] = asyncio.Queue()

    async def hang(where: str) -> None:
        hanging.put_nowait(where)
        await asyncio.Event().wait()

    def plan() -> Plan[None]:
        try:
            yield Call(hang, "effect")
        finally:
            yield Call(hang, "tidying")

    task = asyncio.create_task(arun(plan()))
    for _ in range(2):
        await hanging.get()
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_plan_whose_driver_is_dropped_is_closed() -> None:
    closed: list[bool] = []

    def plan() -> Plan[None]:
        try:
            yield Call(asyncio.sleep, 60)
        finally:
            closed.append(True)

    driver = arun(plan())
    driver.send(None)
    driver.close()
    assert closed == [True]


# Effects


async def test_a_plain_function_may_be_called_in_an_awaited_plan() -> None:
    assert await Call(lambda: 5).arun() == 5


def test_async_function_on_a_thread_is_refused_unstarted() -> None:
    begun = []

    async def perform() -> None:
        begun.append(True)

    with pytest.raises(ConfigurationError, match=r"perform.* is async: use the awaited form"):
        Call(perform).run()
    assert begun == []


async def test_sleep_lets_time_pass() -> None:
    begun = time.monotonic()
    Sleep(0.01).run()
    await Sleep(0.01).arun()
    assert time.monotonic() - begun >= 0.02


def test_threads_that_were_replaced_after_the_import_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any) -> None:
        pass

    start.__module__ = "gevent.thread"
    monkeypatch.setattr(_thread, "start_new_thread", start)
    with pytest.raises(ConfigurationError, match=r"monkey\.patch_all"):
        run(effect for effect in ())


def test_threads_that_a_debugger_starts_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """pydevd, once it is attached to a process, wraps the function that starts them."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda *args: None)
    assert run(effect for effect in ()) is None


def test_awaited_plan_without_asyncio_is_refused_by_name() -> None:
    """Another kind of event loop resumes the coroutine, and no loop of asyncio is running."""
    with pytest.raises(ConfigurationError, match="asyncio only"):
        arun(effect for effect in (Sleep(0.0),)).send(None)
