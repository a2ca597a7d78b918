"""Completers that the tests name on the command line."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from oncemore import Guard, Op, Operation, Policy
from oncemore._ledger.completer import Completer
from oncemore._runtime.backoff import Backoff

OPERATION = Operation("s", "order-1", "f", "orders.pay", request=lambda: {"order": 1})


def completer_with_unfinished_operation(*, fails: int) -> Completer:
    """Return a completer for a ledger with one unfinished operation, which fails *fails* times, first when it is made."""
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
            guard.run(OPERATION, lambda op: pay(op, {"order": 1}))
    return Completer(guard, {"orders.pay": pay}, pace=Backoff(base=0, cap=0), every=0.01)


def completer_that_hangs() -> Completer:
    """Return a completer whose performer prints a line and then sleeps."""
    completer = completer_with_unfinished_operation(fails=1)

    async def pay(op: Op, request: Any) -> Any:
        print("started")
        await asyncio.sleep(60)

    completer.performers["orders.pay"] = pay
    return completer


lucky = completer_with_unfinished_operation(fails=1)
unlucky = completer_with_unfinished_operation(fails=2)
idle = completer_with_unfinished_operation(fails=0)
slow = completer_that_hangs()
nothing = object()
