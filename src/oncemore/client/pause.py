"""Waiting between attempts, and the public switch that lets tests skip it while time still seems to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

_recorded: list[float] | None = None
_skipped = 0.0  # never reset: a clock that went back would be worse than one that is ahead


def now() -> float:
    """Seconds on a clock that only goes forward, counting the pauses that were skipped."""
    return time.monotonic() + _skipped


@contextmanager
def no_sleeping() -> Iterator[list[float]]:
    """A list that fills with the delays, in seconds, that would have been slept; deadlines still see them pass.

    For tests, of a whole process: every retry in it is affected until the block ends.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


class Pause:
    """Let *seconds* pass before the next attempt."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self) -> None:
        if not self._skip():
            time.sleep(self.seconds)

    async def arun(self) -> None:
        await asyncio.sleep(0 if self._skip() else self.seconds)

    def _skip(self) -> bool:
        global _skipped
        if _recorded is None:
            return False
        _recorded.append(self.seconds)
        _skipped += self.seconds
        return True
