"""Completers for the command to find."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from oncemore import Guard, Op, Operation, Policy
from oncemore._ledger.completer import Completer
from oncemore._runtime.backoff import Backoff

ASKED = Operation("s", "order-1", "f", "orders.pay", request=lambda: {"order": 1})


def left_unfinished(*, fails: int) -> Completer:
    """A completer of a ledger in which one operation was left; it fails so often."""
    guard = Guard("memory://", policy=Policy(effect="steps"))
    failures = [RuntimeError("no luck")] * fails

    def pay(op: Op, request: Any) -> Any:
        op_step = op.step("charge", lambda: request)
        return finish(op_step) if hasattr(op_step, "__await__") else finished(op_step)

    async def finish(step: Any) -> Any:
        return finished(await step)

    def finished(value: Any) -> Any:
        if failures:
            raise failures.pop()
        return value

    if fails:
        with suppress(RuntimeError):
            guard.run(ASKED, lambda op: pay(op, {"order": 1}))
    return Completer(guard, {"orders.pay": pay}, pace=Backoff(base=0, cap=0), every=0.01)


def never_ending() -> Completer:
    """A completer whose performer says that it has begun, and no more."""
    completer = left_unfinished(fails=1)

    async def pay(op: Op, request: Any) -> Any:
        print("it begins")
        await asyncio.sleep(60)

    completer.performers["orders.pay"] = pay
    return completer


lucky = left_unfinished(fails=1)
unlucky = left_unfinished(fails=2)
idle = left_unfinished(fails=0)
slow = never_ending()
nothing = object()
