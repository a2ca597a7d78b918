"""A completer that is interrupted or cancelled ends in order; a cancelled performer does not end it."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import pytest

from oncemore import Guard, Op, Operation
from oncemore._ledger.completer import Completer, Tally
from oncemore._runtime.backoff import Backoff
from oncemore._runtime.plan import arun, run

from .stepping import POLICY, Shop

NO_PAUSE = Backoff(base=0.0, cap=0.0)


def asked(key: str) -> Operation:
    return Operation("customer-1", key, "same", "orders.pay", request=lambda: "the request")


def test_interrupted_round_finishes_the_operations_that_have_begun() -> None:
    guard = Guard("memory://", policy=POLICY)
    begun: list[str] = []

    def pay(op: Op, _: Any) -> Any:
        begun.append(op.key)
        time.sleep(0.1)
        if len(begun) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        return run(Shop().pay(op))

    for key in ("a", "b", "c"):
        with pytest.raises(RuntimeError):
            guard.run(asked(key), lambda op: run(Shop("after charge").pay(op)))
    with pytest.raises(KeyboardInterrupt):
        Completer(guard, {"orders.pay": pay}, pace=NO_PAUSE, at_once=1).run_once()
    assert len(begun) == 1
    assert guard.find(*asked(begun[0]).id).state == "settled"  # type: ignore[union-attr]


async def test_one_that_is_cancelled_from_within_does_not_end_it() -> None:
    """The performer awaits a future that somebody else has cancelled."""
    guard = Guard("memory://", policy=POLICY)

    async def pay(op: Op, _: Any) -> Any:
        gone = asyncio.get_running_loop().create_future()
        if op.key == "a" and op.attempt == 2:
            gone.cancel()
            await gone
        return await arun(Shop().pay(op))

    for key in ("a", "b"):
        with pytest.raises(RuntimeError):
            await guard.arun(asked(key), lambda op: arun(Shop("after charge").pay(op)))
    completer = Completer(guard, {"orders.pay": pay}, pace=NO_PAUSE)
    assert await completer.arun_once() == Tally(completed=1, failing=1)
    assert await completer.arun_once() == Tally(completed=1)


async def test_it_goes_round_until_it_is_cancelled() -> None:
    guard = Guard("memory://", policy=POLICY)
    shop = Shop(*["after charge"] * 2)  # in its first round, the completer fails too
    with pytest.raises(RuntimeError):
        await guard.arun(asked("k"), lambda op: arun(shop.pay(op)))
    completer = Completer(guard, {"orders.pay": lambda op, _: arun(shop.pay(op))}, pace=NO_PAUSE, every=0.01)
    task = asyncio.create_task(completer.arun())
    while guard.find(*asked("k").id).state != "settled":  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
