"""Carries a plan out on an event loop without a task, as far as its effects allow that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .plan import Effect, Plan, arun


class Later:
    """What an effect's `begin` returns where it does not return the result: that it will be told, or must be awaited."""

    def __init__(self, name: str) -> None:
        self.name = name


TOLD, AWAITED = Later("told"), Later("awaited")


class Drive:
    """Carries out a plan on an event loop, and tells *done* its result, or None where it was interrupted.

    A task costs a lone caller two more turns of the loop, which is as long as some servers need for the whole verb.  So
    effects that can are carried out by callbacks: their `begin(drive)` gives the result at once, or TOLD and then lets the
    drive `go_on` or `throw`.  The first that can do neither (AWAITED) is awaited in a task, with all that come after it.
    """

    __slots__ = ("done", "plan", "task")

    def __init__(self, plan: Plan[Any], done: Callable[[Any], None]) -> None:
        self.plan = plan
        self.done = done
        self.task: asyncio.Task[Any] | None = None

    def go_on(self, value: Any = None) -> None:
        """The last effect has given *value*."""
        self._carry(self.plan.send, value)

    def throw(self, error: BaseException) -> None:
        """The last effect has failed."""
        self._carry(self.plan.throw, error)

    def _carry(self, resume: Callable[[Any], Effect[Any]], value: Any) -> None:
        while True:
            try:
                effect = resume(value)
            except StopIteration as end:
                return self.done(end.value)
            except BaseException:
                self.done(None)
                raise
            try:
                resume, value = self.plan.send, effect.begin(self) if hasattr(effect, "begin") else AWAITED
            except BaseException as error:
                resume, value = self.plan.throw, error
            if value is TOLD:
                return None
            if value is AWAITED:
                self.task = asyncio.get_running_loop().create_task(arun(self.plan, effect))
                return self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.done(None if task.cancelled() or task.exception() is not None else task.result())
