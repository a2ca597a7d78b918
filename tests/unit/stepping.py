"""Performers in steps, written once as plans, for callers that block and callers that await."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from oncemore import Answer, Guard, Op, Operation, Policy
from oncemore._ledger.steps import StepRetry
from oncemore._runtime.backoff import Backoff
from oncemore._runtime.plan import Call, arun, run
from oncemore.errors import StoreUnavailable

Performing = Generator[Any, Any, Any]
Performer = Callable[[Op], Performing]

POLICY = Policy(effect="steps", errors=(LookupError,))
ASKED = Operation("customer-1", "k", "same", "orders.pay")
AT_ONCE = StepRetry(3, Backoff(base=0.0, cap=0.0))
DONE = ["reserve done", "charge done", "ship done"]  # the result of a `Shop`


def take(op: Op, *args: Any, **options: Any) -> Call:
    """The effect of taking a step."""
    return Call(partial(op.step, *args, **options))


class Caller:
    """Runs performers, blocking or awaiting."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self.runner = runner

    def __call__(self, guard: Guard, perform: Performer, operation: Operation = ASKED, **options: Any) -> Answer:
        options.setdefault("policy", POLICY)
        if self.runner is None:
            return guard.run(operation, lambda op: run(perform(op)), **options)
        return self.runner.run(guard.arun(operation, lambda op: arun(perform(op)), **options))

    def drive(self, plan: Any) -> Any:
        if self.runner is None:
            return run(plan)
        return self.runner.run(arun(plan))


class Shop:
    """An order of three steps.  *log* lists the steps that were called; *fails* names those that fail, once for each mention."""

    def __init__(self, *fails: str, error: type[BaseException] = RuntimeError) -> None:
        self.log: list[str] = []
        self.keys: list[str] = []
        self.fails = list(fails)
        self.error = error

    def do(self, name: str, *, key: str = "") -> str:
        self.log.append(name)
        if key:
            self.keys.append(key)
        self.may_fail(name)
        return f"{name} done"

    def may_fail(self, name: str) -> None:
        if name in self.fails:
            self.fails.remove(name)
            raise self.error(name)

    def pay(self, op: Op) -> Performing:
        """Reserve, charge, ship; fails between two steps where `after <step>` is to fail."""
        reserved = yield take(op, "reserve", lambda: self.do("reserve"), undo=lambda value: self.do(f"undo {value}"))
        self.may_fail("after reserve")
        charged = yield take(
            op,
            "charge",
            lambda key: self.do("charge", key=key),
            undo=lambda value, key: self.do(f"undo {value}", key=key),
            retry=1,
        )
        self.may_fail("after charge")
        shipped = yield take(op, "ship", lambda: self.do("ship"), retry=AT_ONCE)
        self.may_fail("after ship")
        return [reserved, charged, shipped]


def steps_of(guard: Guard) -> list[tuple[str, str]]:
    """Each step in the ledger, by name, with its state."""
    records = guard.list().records
    return [(record.name, record.state) for record in records if record.scope.startswith("step|")]


def elsewhere(function: Callable[[], Any]) -> Any:
    """The result of the function, called on another thread, on which no event loop runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


class Broken:
    """A store whose *verb* fails for operations with this name."""

    def __init__(self, inner: Any, verb: str, name: str) -> None:
        self.inner = inner
        self.verb = verb
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self.inner, attribute)
        if attribute != self.verb:
            return found

        def verb(held: Any, *args: Any, **options: Any) -> Any:
            if held.operation.name == self.name:
                raise StoreUnavailable("it is down, as it was asked to be")
            return (yield from found(held, *args, **options))

        return verb
