"""The far end of a lane among threads, for its tests: flights land when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from oncemore._runtime.batching import Lane
from oncemore._runtime.plan import Call, Plan

PATIENCE = 20.0  # far beyond what any of this takes: a wait that long has failed


def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "it never came to that"
        time.sleep(0.001)


class Sky:
    """The far end of a lane: it notes each group, and keeps every flight in the air until it may land."""

    def __init__(self, answer: Callable[[list[Any]], Sequence[Any]] = lambda items: [f"<{item}>" for item in items]):
        self.answer = answer
        self.groups: list[list[Any]] = []
        self.aloft = 0
        self.landings = threading.Semaphore(0)

    def land(self, flights: int = 1000) -> None:
        self.landings.release(flights)

    def fly(self, items: list[Any]) -> Plan[Sequence[Any]]:
        self.aloft += 1
        assert self.aloft == 1, "two flights at once"
        self.groups.append(items)
        try:
            yield Call(self.landings.acquire, True, PATIENCE)
            return self.answer(items)
        finally:
            self.aloft -= 1


def queue_up(pool: ThreadPoolExecutor, lane: Lane[Any], items: Sequence[Any]) -> list[Future[Any]]:
    """Each item asked for by a thread of its own, in this order."""
    asked = []
    for count, item in enumerate(items, len(lane._waiting) + 1):
        asked.append(pool.submit(lane.submit, item))
        until(lambda count=count: len(lane._waiting) == count)
    return asked


def take_off(pool: ThreadPoolExecutor, lane: Lane[Any], sky: Sky, item: Any) -> Future[Any]:
    """A flight of its own."""
    count = len(sky.groups)
    first = pool.submit(lane.submit, item)
    until(lambda: len(sky.groups) > count)
    return first


def fail(error: BaseException) -> Any:
    raise error
