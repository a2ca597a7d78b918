"""The effect of a whole plan, while a lease is kept alive: what takes its time, and is not the performer's own work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._runtime.plan import Plan, arun, run
from .heartbeat import Beat, Heartbeat


class Driven:
    """Drives a plan apart from the one that yields it: to a door, what its own plan performs is the app."""

    __slots__ = ("beat", "heart", "plan")

    def __init__(self, plan: Callable[[], Plan[Any]], heart: Heartbeat, beat: Beat) -> None:
        self.plan = plan
        self.heart = heart
        self.beat = beat

    def run(self) -> Any:
        beats = self.heart.threads
        try:
            beats.add((self.beat,))
            return run(self.plan())
        finally:
            beats.beats.discard(self.beat)

    async def arun(self) -> Any:
        beats = self.heart.on_loop()
        try:
            beats.add((self.beat,))
            return await arun(self.plan())
        finally:
            beats.beats.discard(self.beat)
