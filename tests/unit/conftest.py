"""Each behaviour of the guard is shown twice: for a caller that blocks, and for one that awaits."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from oncemore import Answer, Guard, Operation
from oncemore._ledger.events import Event


class Caller:
    """Calls a guard, blocking or awaiting."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self.runner = runner

    def __call__(self, guard: Guard, operation: Operation, perform: Any, **options: Any) -> Answer:
        if self.runner is None:
            return guard.run(operation, perform, **options)

        async def awaited(op: Any) -> Any:
            await asyncio.sleep(0)
            return perform(op)

        return self.runner.run(guard.arun(operation, awaited, **options))


@pytest.fixture(params=["sync", "async"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner | None]:
    """The runner of callers that await; None for callers that block."""
    if request.param == "sync":
        yield None
    else:
        with asyncio.Runner() as runner:
            yield runner


@pytest.fixture
def call(runner: asyncio.Runner | None) -> Caller:
    return Caller(runner)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def guard(events: list[Event]) -> Iterator[Guard]:
    guard = Guard("memory://", observers=[events.append])
    yield guard
    guard.close()
