"""What is done with a connection though whoever borrowed it has gone: to the end, at once, and not unheard."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from oncemore._ledger.transactions import Do, Loan, at_once, give_back, in_thread
from oncemore._runtime.plan import Plan, run
from oncemore.errors import ConfigurationError


async def test_a_cancelled_caller_waits_for_its_thread_however_often_it_is_cancelled() -> None:
    """The thread uses the connection: nobody else must, before it has ended."""
    let_go, ended = threading.Event(), threading.Event()

    def work() -> None:
        let_go.wait(10)
        ended.set()
        raise LookupError  # which nobody hears any more

    task = asyncio.create_task(in_thread(work))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_a_thread_gives_is_the_callers() -> None:
    assert await in_thread(lambda: 5) == 5


@pytest.mark.parametrize("failing", [True, False])
async def test_what_nobody_waits_for_is_done_by_the_loop(failing: bool) -> None:
    done = asyncio.Event()

    async def work() -> None:
        done.set()
        if failing:
            raise LookupError

    at_once(Do(None, work))
    assert not done.is_set()
    await asyncio.wait_for(done.wait(), 5)


def test_without_a_loop_it_is_done_here_and_now_where_it_can_be() -> None:
    done: list[str] = []

    def plain() -> None:
        done.append("plain")
        raise LookupError

    async def awaited() -> None:
        done.append("awaited")

    at_once(Do(plain, awaited))
    at_once(Do(None, awaited))
    assert done == ["plain"]


def test_a_driver_without_sessions_says_who_has_them() -> None:
    loan = Loan()
    with pytest.raises(ConfigurationError, match="needs SQLAlchemy"):
        loan.session()
    assert not loan.kept()
    loan.connection = object()
    assert loan.kept()


class Wire:
    """A connection that cannot be given back without trouble."""

    dropped = False

    def __init__(self, trouble: BaseException) -> None:
        self.trouble = trouble

    def end(self, **_: Any) -> Plan[None]:
        raise self.trouble
        yield

    def drop(self) -> None:
        self.dropped = True


@pytest.mark.parametrize("committed", [True, False])
def test_trouble_after_a_commit_is_heard_of_and_changes_nothing(
    committed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(LookupError("a hook"))
    with caplog.at_level(logging.ERROR, "oncemore"):
        run(give_back(wire, healthy=True, committed=committed))
    assert ("a hook" in caplog.text) is committed
    assert not wire.dropped


def test_who_is_interrupted_while_giving_back_drops_it() -> None:
    wire = Wire(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(give_back(wire, healthy=True, committed=True))
    assert wire.dropped
