"""Finishes operations in steps that crashed or failed, from the requests that their records keep.

Each is claimed like a duplicate of it, so if its caller asks again at the same moment, one of the two goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import msgspec

from .._contract.policy import Policy
from .._runtime.backoff import Backoff
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError, OncemoreError
from .context import Op
from .events import log
from .guard import Guard
from .model import Operation, Record
from .steps import unpack_request
from .store import Filter

PAGE = 100

# The delays between two attempts at an operation, from the end of the lease: a provider that is down needs time.
PACE = Backoff(base=1.0, factor=2.0, cap=600.0, jitter="none")

UNTOUCHED = (
    "%s %r was not continued, because its performer did not claim it: check that its rule still has this name and "
    "effect = 'steps', and that the app is given the path at which its server has mounted it"
)

End = Literal["completed", "failing", "held", "unreadable"]


class Drives(Protocol):
    """Continues an operation: a function under `once`, or an app with its middleware (`oncemore.web.redrive`)."""

    def drive(self, operation: Operation, request: Any) -> Plan[Any]: ...


Redriven = Drives | Callable[[Op, Any], Any]


class Tally(msgspec.Struct, kw_only=True):
    """The counts of one round.  *failing* operations are tried again later; *unreadable* ones have no stored request."""

    completed: int = 0
    failing: int = 0
    held: int = 0
    unreadable: int = 0

    @property
    def total(self) -> int:
        return self.completed + self.failing + self.held + self.unreadable


Progress = Callable[[Record, End], object]


class Completer:
    """Finishes operations in steps that were left unfinished.

    Args:
        performers: Maps an operation's name to the function or app that performs it: a function under `once`, an app with
            its middleware (`oncemore.web.redrive`), or a function of the operation and the stored request.
        policy: For functions of the operation and the stored request; by default the guard's.
        attempts: An operation is given up after this many in all: the steps that were taken are undone, and it is held.
        at_once: The most operations that run side by side.
        pace: The delays between two attempts at an operation.
        every: The seconds between two rounds.
        progress: Called with each record and its end.
    """

    def __init__(
        self,
        guard: Guard,
        performers: Mapping[str, Redriven],
        *,
        policy: Policy | None = None,
        attempts: int = 10,
        at_once: int = 8,
        pace: Backoff = PACE,
        every: float = 5.0,
        progress: Progress | None = None,
    ) -> None:
        self.guard = guard
        self.performers = dict(performers)
        self.policy = policy or guard.policy
        for name, performer in self.performers.items():
            check_performer(name, performer, self.policy)
        if attempts < 1 or at_once < 1 or every < 0:
            raise ConfigurationError(
                f"attempts = {attempts!r}, at_once = {at_once!r}, every = {every!r}: write 1 or more for attempts and "
                "at_once, and 0 or more for every"
            )
        self.attempts = attempts
        self.at_once = at_once
        self.pace = pace
        self.every = every
        self.progress = progress

    def run_once(self) -> Tally:
        """Continue every unfinished operation that is due, once."""
        return run(self._round())

    async def arun_once(self) -> Tally:
        """The awaited form of `run_once`."""
        return await arun(self._round())

    def run(self, stop: threading.Event | None = None) -> None:
        """Run a round every few seconds until *stop* is set."""
        stop = stop or threading.Event()
        while not stop.is_set():
            run(self._round_or_log())
            stop.wait(self.every)

    async def arun(self) -> None:
        """Run a round every few seconds until cancelled."""
        while True:
            await arun(self._round_or_log())
            await asyncio.sleep(self.every)

    def _round_or_log(self) -> Plan[None]:
        """Run a round.  If the store is down, log it; the next round tries again."""
        try:
            yield from self._round()
        except OncemoreError:
            log.exception("The completer could not look for unfinished operations; it tries again in %g s", self.every)

    def _round(self) -> Plan[Tally]:
        tally = Tally()
        for name in self.performers:
            cursor: str | None = None
            while True:
                where = Filter(state="running", name=name, lapsed=True)
                page = yield from self.guard.store.list(where, limit=PAGE, cursor=cursor)
                due = [record for record in page.records if self._is_due(record)]
                ends = yield SideBySide([self._finish(record) for record in due], self.at_once)
                for record, end in zip(due, ends, strict=True):
                    setattr(tally, end, getattr(tally, end) + 1)
                    if self.progress is not None:
                        self.progress(record, end)
                cursor = page.cursor
                if cursor is None:
                    break
        return tally

    def _is_due(self, record: Record) -> bool:
        return record.now >= record.lease_until + self.pace.step(record.attempts)

    def _finish(self, record: Record) -> Plan[End]:
        """Continue one operation, and return how it ended.  Its error does not stop the others."""
        failed = False
        try:
            kept = yield from self._read_request(record)
            if kept["request"] is None:
                return "unreadable"
            yield from self._drive(record, kept)
        except Exception as error:
            failed = True
            log.warning("%s %r is not finished yet: %r", record.name, record.key, error)
        try:
            found = yield from self.guard.store.find(record.scope, record.key)
        except OncemoreError:
            return "failing"
        if found is not None and found.token == record.token and not failed:
            log.warning(UNTOUCHED, record.name, record.key)
        state = found.state if found is not None else "settled"
        return "completed" if state == "settled" else "held" if state == "held" else "failing"

    def _read_request(self, record: Record) -> Plan[dict[str, Any]]:
        """Return the stored request.  Read again singly, because `list` leaves encrypted requests encrypted."""
        types = getattr(self.performers[record.name], "types", lambda: self.policy.types)()
        found = yield from self.guard.store.find(record.scope, record.key)
        return unpack_request(b"" if found is None else found.request, types)

    def _drive(self, record: Record, kept: dict[str, Any]) -> Plan[Any]:
        performer, request = self.performers[record.name], kept["request"]
        giving_up = record.attempts >= self.attempts
        operation = msgspec.structs.replace(identity(record), unique=kept["unique"], giving_up=giving_up)
        if hasattr(performer, "drive"):
            return performer.drive(operation, request)
        return self.guard.guarded(operation, lambda op: performer(op, request), self.policy)


def check_performer(name: str, performer: Any, policy: Policy) -> None:
    """Raise ConfigurationError for a performer that cannot be called, or that would leave its operations held."""
    if hasattr(performer, "drive"):
        return
    if not callable(performer):
        raise ConfigurationError(f"{name!r}: {performer!r} is not a function of the operation and the stored request")
    if policy.effect != "steps":
        raise ConfigurationError(
            f"{name!r}: give the completer the policy under which the operations began, with effect = 'steps'"
        )


def identity(record: Record) -> Operation:
    """Return the operation that the record belongs to."""
    return Operation(record.scope, record.key, record.fingerprint, record.name)


class SideBySide:
    """Effect: run several plans, at most *most* at a time, in threads or in tasks of the running loop."""

    __slots__ = ("most", "plans")

    def __init__(self, plans: list[Plan[End]], most: int) -> None:
        self.plans = plans
        self.most = most

    def run(self) -> list[End]:
        if not self.plans:
            return []
        with ThreadPoolExecutor(min(self.most, len(self.plans)), thread_name_prefix="oncemore-completer") as threads:
            asked = [threads.submit(contextvars.copy_context().run, run, plan) for plan in self.plans]
            try:
                return [each.result() for each in asked]
            except BaseException:  # interrupted: begin no other plan, but wait for the plans that have begun
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    async def arun(self) -> list[End]:
        free = asyncio.Semaphore(self.most)

        async def one(plan: Plan[End]) -> End:
            async with free:
                return await arun(plan)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(plan)) for plan in self.plans]
        # This caller was not cancelled, so a cancelled task was cancelled by its own performer.
        return ["failing" if task.cancelled() else task.result() for task in tasks]
