"""A second copy of a slow request, sent beside the first: whichever is answered first wins."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from .._runtime.plan import Effect
from .effects import unbroken

if TYPE_CHECKING:
    from .attempts import Work

Ending = tuple[Any, Exception | None]


class Hedge:
    """Carry out *first*; if it has not ended *after* so many seconds, carry out *second* as well.

    The first ending that is final wins, and the other copy is dropped.  An ending that asks for another attempt (the
    copy may be told that its twin is in progress) only counts when nothing better can come.
    """

    __slots__ = ("after", "first", "second", "twice", "work")

    def __init__(self, first: Effect[Any], second: Callable[[], Effect[Any] | None], after: float, work: Work) -> None:
        self.first = first
        self.second = second
        self.after = after
        self.work = work
        self.twice = False

    def launch(self) -> Effect[Any] | None:
        """The second copy, if it may be sent."""
        second = self.second()
        self.twice = second is not None
        return second

    def wins(self, ending: Ending) -> bool:
        """Whether nothing better can come of waiting for the other copy."""
        reply, error = ending
        verdict = self.work.judge(reply) if error is None else self.work.judge_error(error)
        return not verdict.again

    def run(self) -> Any:
        race = _Race(self)
        race.start(self.first)
        try:
            try:
                ending = race.endings.get(timeout=self.after)
            except Empty:
                if second := self.launch():
                    race.start(second)
                ending = race.endings.get()
                if second and not self.wins(ending):
                    self._drop(ending)
                    ending = race.endings.get()
        finally:
            race.over()
        return _unwrap(ending)

    async def arun(self) -> Any:
        running = {asyncio.ensure_future(_ending(self.first))}
        try:
            done, _ = await asyncio.wait(running, timeout=self.after)
            if not done and (second := self.launch()):
                running.add(asyncio.ensure_future(_ending(second)))
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ending = done.pop().result()
                running |= done
                if not running or self.wins(ending):
                    break
                await self._adrop(ending)
        finally:
            for task in running:
                task.cancel()
            if running:  # their cleaning up must not be cancelled, too: their connections would be lost to the pool
                await unbroken(self._drop_late(running))
        return _unwrap(ending)

    async def _drop_late(self, running: set[asyncio.Task[Ending]]) -> None:
        for ending in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(ending, BaseException):
                await self._adrop(ending)

    def _drop(self, ending: Ending) -> None:
        if ending[1] is None and (effect := self.work.discard(ending[0])):
            effect.run()

    async def _adrop(self, ending: Ending) -> None:
        if ending[1] is None and (effect := self.work.discard(ending[0])):
            await effect.arun()


class _Race:
    """The threads of one hedged request.  They end by themselves: each attempt has its limit."""

    def __init__(self, hedge: Hedge) -> None:
        self.hedge = hedge
        self.endings: SimpleQueue[Ending] = SimpleQueue()
        self._over = False
        self._lock = threading.Lock()

    def start(self, effect: Effect[Any]) -> None:
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._carry_out, effect), daemon=True).start()

    def _carry_out(self, effect: Effect[Any]) -> None:
        try:
            ending: Ending = (effect.run(), None)
        except Exception as error:
            ending = (None, error)
        with self._lock:
            if not self._over:
                self.endings.put(ending)
                return
        self.hedge._drop(ending)

    def over(self) -> None:
        """From now on, whoever arrives is late."""
        with self._lock:
            self._over = True
        while not self.endings.empty():
            self.hedge._drop(self.endings.get())


async def _ending(effect: Effect[Any]) -> Ending:
    try:
        return await effect.arun(), None
    except Exception as error:
        return None, error


def _unwrap(ending: Ending) -> Any:
    reply, error = ending
    if error is not None:
        raise error
    return reply
