"""Keeps the leases of running performers alive: one thread for all that block, one timer per event loop for the rest.

A performer that ends before a third of its lease has passed costs no more than an entry in a set.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any

from .._runtime.clock import Clock
from .._runtime.forks import reset_in_child
from .._runtime.plan import Call, Plan, arun, run
from ..errors import ProviderDuplicate, Refusal
from .context import Op
from .events import log
from .model import Lease
from .transactions import unawaited

# How long the thread stays when there is nothing to renew: long enough to serve the next request, and not for ever.
IDLE = 5.0
# The thread looks at least as often as the shortest lease it has met asks for, but not more often than this.
BRIEFEST = 0.05
NEVER = float("inf")


class Beat:
    """A lease to be kept alive; *lost* once the store has refused to renew it.

    *begun* once its performer may have been called, *over* once that one has ended, *tried* where it raised a refusal itself.
    """

    __slots__ = ("begun", "due", "lease", "lost", "over", "seconds", "tried")

    def __init__(self, lease: Lease, seconds: float, due: float) -> None:
        self.lease = lease
        self.seconds = seconds
        self.due = due
        self.begun = self.lost = self.over = self.tried = False


class Heartbeat:
    """Renews every lease given to it, three times per lease, until it is taken away again."""

    def __init__(self, renew: Callable[[Beat], Plan[None]], clock: Clock) -> None:
        self.renew = renew
        self.now = clock.monotonic
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self.threads = ThreadBeats(self)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBeats] = weakref.WeakKeyDictionary()
        self._latest: tuple[Callable[[], object], LoopBeats] = (lambda: None, LoopBeats(self))

    def beat(self, lease: Lease, seconds: float) -> Beat:
        return Beat(lease, seconds, self.now() + seconds / 3)

    def on_loop(self) -> LoopBeats:
        """The beats of the running loop."""
        loop = asyncio.get_running_loop()
        known, beats = self._latest  # nearly always there is one loop, and a look into the dictionary takes longer
        if known() is not loop:
            beats = self._loops.get(loop) or self._loops.setdefault(loop, LoopBeats(self))
            self._latest = (weakref.ref(loop), beats)
        return beats

    def due(self, beats: set[Beat]) -> list[Beat]:
        """Those to be renewed now, with their next time set; the lost are dropped."""
        now = self.now()
        due = [beat for beat in beats.copy() if beat.due <= now]
        beats.difference_update([beat for beat in due if beat.lost])
        for beat in due:
            beat.due = now + beat.seconds / 3
        return [beat for beat in due if not beat.lost]

    def renewed(self, beat: Beat) -> Plan[None]:
        """One renewal; whatever goes wrong with it, the next beat and the other leases must not suffer."""
        try:
            yield from self.renew(beat)
        except Exception:
            log.exception("A lease could not be renewed; the next beat tries again")

    def close(self) -> None:
        """End the thread; a later performer starts another."""
        self.threads.close()


class Perform(Call):
    """The effect of performing an operation while its lease, and those it depends on, are kept alive."""

    __slots__ = ("beats", "heart", "op")

    def __init__(self, heart: Heartbeat, beats: tuple[Beat, ...], function: Callable[[Op], Any], op: Op) -> None:
        self.function = function
        self.args = (op,)
        self.heart = heart
        self.beats = beats
        self.op = op

    def run(self) -> Any:
        threads = self.heart.threads
        try:
            threads.add(self.beats)
            return super().run()
        except Refusal as refusal:
            return self._existing(refusal)
        finally:
            end(threads.beats, self.beats)

    async def arun(self) -> Any:
        loop = self.heart.on_loop()
        try:
            loop.add(self.beats)
            result = self.function(self.op)
            if hasattr(result, "__await__"):
                return await result
            if self.op.lent:  # what it did there was never done, and its outcome would say that it was
                raise unawaited(self.function)
            return result
        except Refusal as refusal:
            return self._existing(refusal)
        finally:
            end(loop.beats, self.beats)

    def _existing(self, refusal: Refusal) -> Any:
        """The provider's existing result, where it is told: but what was left in the middle of a transaction is not
        committed, nor what was left between two steps finished.  Any other refusal is the performer's own failure."""
        tried(self.beats)
        whole = self.op.transaction is None and self.op.steps is None
        if isinstance(refusal, ProviderDuplicate) and refusal.told and whole:
            return refusal.result
        raise refusal


def tried(beats: tuple[Beat, ...]) -> None:
    """Note that the performer was called, so that a refusal which it raises is its own failure."""
    for beat in beats:
        beat.tried = True


def end(kept: set[Beat], beats: tuple[Beat, ...]) -> None:
    """Take *beats* away from those that are kept alive; a renewal of theirs may still be under way."""
    kept.difference_update(beats)
    for beat in beats:
        beat.over = True


class LoopBeats:
    """The beats of one event loop."""

    def __init__(self, heart: Heartbeat) -> None:
        self.heart = heart
        self.beats: set[Beat] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.next = NEVER

    def add(self, beats: tuple[Beat, ...]) -> None:
        if not beats:  # a transaction has no lease to keep
            return
        self.beats.update(beats)
        due = beats[0].due if len(beats) == 1 else min(beat.due for beat in beats)
        if due < self.next:
            self._wake_at(due)

    def _wake_at(self, due: float) -> None:
        self.next = due
        # In a context of its own, for the timer serves whoever comes next as well.
        asyncio.get_running_loop().call_later(max(0.0, due - self.heart.now()), self._tick, due, context=Context())

    def _tick(self, due: float) -> None:
        if due != self.next:  # a sooner one was set since, and has taken over
            return
        for beat in self.heart.due(self.beats):
            task = asyncio.get_running_loop().create_task(arun(self.heart.renewed(beat)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        self.next = NEVER
        dues = [beat.due for beat in self.beats.copy()]  # a thread may take some away meanwhile: it closes a stream
        if dues:
            self._wake_at(min(dues))


class ThreadBeats:
    """The beats of all threads, renewed by one of our own that starts when it is needed."""

    def __init__(self, heart: Heartbeat) -> None:
        self.heart = heart
        self.beats: set[Beat] = set()
        self.next = NEVER  # our thread's promise: it looks at the beats no later than this
        self._rest = IDLE
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = 0.0

    def add(self, beats: tuple[Beat, ...]) -> None:
        if not beats:  # a transaction has no lease to keep
            return
        self.beats.update(beats)
        due = beats[0].due if len(beats) == 1 else min(beat.due for beat in beats)
        if due < self.next:
            self._hasten(due, min(beat.seconds for beat in beats) / 3)

    def _hasten(self, due: float, rest: float) -> None:
        """Have our thread look by *due*, and from now on often enough that the next such beat need not call it."""
        with self._changed:
            if self._thread is None:
                self._rest, self._busy = IDLE, self.heart.now()
                thread = threading.Thread(target=self._run, name="oncemore-heartbeat", daemon=True)
                thread.start()
                self._thread = thread
            self.next = min(self.next, due)  # not before there is a thread to keep the promise
            self._rest = max(BRIEFEST, min(self._rest, rest))
            self._changed.notify_all()

    def _run(self) -> None:
        while self._sleep():
            for beat in self.heart.due(self.beats):
                run(self.heart.renewed(beat))

    def _sleep(self) -> bool:
        """Wait until a beat may be due; False where there has been none for a while, or after close."""
        with self._changed:
            now = self.heart.now()
            # Promise first, then look: a beat that comes in between either can wait for that long, or calls.
            self.next = now + self._rest
            dues = [beat.due for beat in self.beats.copy()]
            self.next = min([self.next, *dues])
            if self._wanted():
                self._changed.wait(self.next - now)
            # And the promise is taken back before the last look, after which the thread may end.
            self.next = NEVER
            if dues or self.beats:
                self._busy = self.heart.now()
            if self._wanted() and self.heart.now() < self._busy + IDLE:
                return True
            self._thread = None if self._wanted() else self._thread
            return False

    def _wanted(self) -> bool:
        return self._thread is threading.current_thread()

    def close(self) -> None:
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=IDLE)
