"""The schedule: adds jobs with their times, runs them, and serves operators.  `scheduler.py` finds the due slots."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import msgspec

from .._contract.policy import duration
from .._contract.templates import time_zone
from .._ledger.connect import naming_extras
from .._ledger.guard import Guard
from .._ledger.model import Record
from .._ledger.store import Filter
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError, NotResolvable
from .job import Job, is_failed, job_of
from .marks import Missed
from .runner import Runner, TaskRunner, ThreadRunner, stopped_by_signal
from .scheduler import ON_TIME, PAGE, CatchUp, End, Overlap, PendingSlot, ScheduledJob, Scheduler, SlotCounts
from .ticks import Every, Gap, OnRepeat, Tick, Trigger, instant_tick

SlotState = Literal["waiting", "running", "completed", "retrying", "failed", "held", "missed"]

Progress = Callable[[int, int], object]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot for operators.  *at* is its scheduled time, and *attempts* the number of its attempts."""

    job: str
    slot: str
    at: datetime.datetime
    state: SlotState
    attempts: int = 0
    note: str = ""


class Schedule(Scheduler):
    """Runs jobs at their times: each slot once, in any number of processes and without a leader.

    If `arun` is cancelled, running slots have *grace* seconds to end.  After that, they are cancelled and released.
    """

    def __init__(self, guard: Guard, *, grace: float | str = 30.0) -> None:
        super().__init__(guard)
        self.grace = duration(grace)

    # Adding jobs

    def cron(
        self,
        expression: str,
        job: Callable[..., Any],
        *,
        tz: str | Callable[[Any], str] = "UTC",
        each: Iterable[Any] | Callable[[], Any] | None = None,
        concurrency: int = 8,
        catch_up: CatchUp = "none",
        overlap: Overlap = "skip",
        gap: Gap = "after",
        on_repeat: OnRepeat = "first",
        jitter: float | str = 0.0,
    ) -> None:
        """Run *job* at the times of a cron expression.

        Args:
            expression: Minute, hour, day, month, weekday; or seconds and these five; or a name such as `@daily`.
            job: A function under `@job`.
            tz: The time zone of the expression, or a function that returns the time zone of an item.
            each: The items, or a function that returns them.  The job runs once for each item, its first argument.
            concurrency: The most slots that run at the same time in one process.
            catch_up: For times that passed while no schedule ran: run none, the last one, or all of them.
            overlap: If the item's previous slot is still running: skip this slot, or run it afterwards.
            gap: For times that are skipped when the clocks go forward: run once after the gap, or not at all.
            on_repeat: For times that come twice when the clocks go back: run at the first, the last, or both.
            jitter: Delays each slot by a fixed amount up to this.
        """
        check_choice("gap", gap, Gap)
        check_choice("on_repeat", on_repeat, OnRepeat)
        with naming_extras("A cron expression"):
            trigger: Trigger = importlib.import_module(".cron", __package__).Cron(expression, gap, on_repeat)
        self._add(ScheduledJob(job_of(job), trigger, tz, each, concurrency, catch_up, overlap, duration(jitter)))

    def every(
        self,
        interval: float | str,
        job: Callable[..., Any],
        *,
        tz: str | Callable[[Any], str] = "UTC",
        each: Iterable[Any] | Callable[[], Any] | None = None,
        concurrency: int = 8,
        catch_up: CatchUp = "none",
        overlap: Overlap = "skip",
        jitter: float | str = 0.0,
    ) -> None:
        """Run *job* at each multiple of an interval such as `"15m"` since 1970, in UTC.  *tz* only decides the date."""
        trigger = Every(interval)
        self._add(ScheduledJob(job_of(job), trigger, tz, each, concurrency, catch_up, overlap, duration(jitter)))

    def _add(self, entry: ScheduledJob) -> None:
        """Check the settings of an entry, and add it."""
        job, tz, each = entry.job, entry.tz, entry.each
        check_choice("catch_up", entry.catch_up, CatchUp)
        check_choice("overlap", entry.overlap, Overlap)
        if type(entry.concurrency) is not int or entry.concurrency < 1:
            raise ConfigurationError(f"concurrency = {entry.concurrency!r}: write a whole number, at least 1")
        if job.guard is not self.guard:
            raise ConfigurationError(f"{job.name} has another guard than the schedule: give both the same")
        if not job.is_timed:
            raise ConfigurationError(
                f"{job.name} would run once and never again, because its slot does not name the time: "
                "add {date:ZONE} or {window:1h} to it"
            )
        if isinstance(tz, str):
            time_zone(tz)
        elif each is None:
            raise ConfigurationError("tz is a function of the item, but there are no items: give them by each=")
        if isinstance(each, str):
            raise ConfigurationError(f"each = {each!r} is one text: write a list of items, as in [{each!r}]")
        if each is not None and not callable(each) and not isinstance(each, list):  # a list may grow
            entry.each = list(each)  # an iterator can be read only once
        if entry.name in {other.name for other in self.entries}:
            raise ConfigurationError(f"{job.name} has {entry.trigger.text!r} twice in the schedule: add it once")
        self.entries.append(entry)

    # Running

    def run_once(self, now: datetime.datetime | None = None) -> SlotCounts:
        """Run every slot that is due at *now*, and return when they have ended."""
        return self._run_in_threads(lambda runner: self._run_due(self._moment(now), runner))

    async def arun_once(self, now: datetime.datetime | None = None) -> SlotCounts:
        """The awaited form of `run_once`, for sync and async jobs.  Sync jobs run in threads."""
        return await self._run_in_tasks(lambda runner: self._run_due(self._moment(now), runner))

    def run(self, stop: threading.Event | None = None) -> None:
        """Run slots when they are due, until *stop* is set or SIGTERM comes.  Running slots are finished first."""
        self._check_sync()
        stop = stop or threading.Event()
        runner = ThreadRunner()
        with stopped_by_signal(stop):
            try:
                while not stop.is_set():
                    stop.wait(run(self._try_round(runner)))
            finally:
                runner.close()
                run(self._save_at_end())

    async def arun(self) -> None:
        """Run sync and async jobs when they are due, until cancelled.  Running slots are then finished or released."""
        runner = TaskRunner()
        try:
            while True:
                await asyncio.sleep(await arun(self._try_round(runner)))
        finally:
            await runner.stop(self.grace)
            await arun(self._save_at_end())

    def _run_in_threads(self, work: Callable[[Runner], Plan[SlotCounts]]) -> SlotCounts:
        self._check_sync()
        runner = ThreadRunner()
        try:
            return run(work(runner))
        finally:
            runner.close()

    async def _run_in_tasks(self, work: Callable[[Runner], Plan[SlotCounts]]) -> SlotCounts:
        runner = TaskRunner()
        try:
            return await arun(work(runner))
        finally:
            await runner.stop(self.grace)

    def _check_sync(self) -> None:
        for entry in self.entries:
            if entry.job.awaited:
                raise ConfigurationError(
                    f"{entry.job.name} is async: use arun() or arun_once(), or run it with: oncemore schedule run"
                )

    # For operators

    def jobs(self) -> dict[str, Job[Any, Any]]:
        """Return the jobs by their names."""
        return {entry.job.name: entry.job for entry in self.entries}

    def _entries_of(self, job: Callable[..., Any] | str | None) -> list[ScheduledJob]:
        """Return the entries of *job*, or all entries.  A name may leave out the module if it is still unique."""
        if job is None:
            return self.entries
        name = job if isinstance(job, str) else job_of(job).name
        if name not in self.jobs():
            ends = [each for each in self.jobs() if each.rpartition(".")[2] == name]
            name = ends[0] if len(ends) == 1 else name
        found = [entry for entry in self.entries if entry.job.name == name]
        if not found:
            raise ConfigurationError(f"{name} is not in the schedule: it has {', '.join(self.jobs()) or 'no jobs'}")
        return found

    def pause(self, job: Callable[..., Any] | str | None = None) -> None:
        """Start no slots of *job*, or of any job, in all processes, until `resume`.  Calls by hand still run."""
        run(self._for_each(job, self._marks.pause))

    def resume(self, job: Callable[..., Any] | str | None = None) -> None:
        """Start slots again.  `catch_up` decides about times that have passed meanwhile."""
        run(self._for_each(job, self._marks.resume))

    async def apause(self, job: Callable[..., Any] | str | None = None) -> None:
        """The awaited form of `pause`."""
        await arun(self._for_each(job, self._marks.pause))

    async def aresume(self, job: Callable[..., Any] | str | None = None) -> None:
        """The awaited form of `resume`."""
        await arun(self._for_each(job, self._marks.resume))

    def _for_each(self, job: Callable[..., Any] | str | None, verb: Callable[[str], Plan[None]]) -> Plan[None]:
        for name in dict.fromkeys(entry.job.name for entry in self._entries_of(job)):
            yield from verb(name)

    def missed(self, job: Callable[..., Any] | str | None = None) -> list[Missed]:
        """Return the scheduled times that passed without their slots, the earliest first."""
        return run(self._missed(job))

    async def amissed(self, job: Callable[..., Any] | str | None = None) -> list[Missed]:
        """The awaited form of `missed`."""
        return await arun(self._missed(job))

    def _missed(self, job: Callable[..., Any] | str | None) -> Plan[list[Missed]]:
        found: list[Missed] = []
        for name in dict.fromkeys(entry.job.name for entry in self._entries_of(job)):
            found += yield from self._marks.misses(name)
        return sorted(found, key=lambda missed: missed.at)

    def failed(self, job: Callable[..., Any] | str | None = None) -> list[Slot]:
        """Return the slots that have used up their attempts or their time, including slots of calls by hand."""
        return run(self._failed(job))

    async def afailed(self, job: Callable[..., Any] | str | None = None) -> list[Slot]:
        """The awaited form of `failed`."""
        return await arun(self._failed(job))

    def _failed(self, job: Callable[..., Any] | str | None) -> Plan[list[Slot]]:
        found: list[Slot] = []
        for name in dict.fromkeys(entry.job.name for entry in self._entries_of(job)):
            cursor: str | None = None
            while True:
                page = yield from self.guard.store.list(Filter(scope=name, state="held"), limit=PAGE, cursor=cursor)
                found += [failed_slot(record) for record in page.records if is_failed(record)]
                cursor = page.cursor
                if cursor is None:
                    break
        return sorted(found, key=lambda slot: slot.at)

    def retry(self, job: Callable[..., Any] | str, slot: str) -> SlotCounts:
        """Try a failed slot again, with the arguments of its first attempt."""
        return self._run_batch(self._slots_to_retry(job, slot), None)

    async def aretry(self, job: Callable[..., Any] | str, slot: str) -> SlotCounts:
        """The awaited form of `retry`."""
        return await self._arun_batch(self._slots_to_retry(job, slot), None)

    def _slots_to_retry(self, job: Callable[..., Any] | str, slot: str) -> Plan[list[PendingSlot]]:
        entry = self._entries_of(job)[0]
        record = yield from self.guard.store.find(entry.job.name, slot)
        if record is None or not is_failed(record):
            state = "absent" if record is None else record.state
            raise NotResolvable(f"The slot {slot!r} of {entry.job.name} is {state}; only a failed slot can be retried")
        return [self._kept_slot(entry, record)]

    def slots(self, job: Callable[..., Any] | str, day: datetime.date) -> list[Slot]:
        """Return the slots of *job* on a local *day*, with their states."""
        return run(self._slots(job, day))

    async def aslots(self, job: Callable[..., Any] | str, day: datetime.date) -> list[Slot]:
        """The awaited form of `slots`."""
        return await arun(self._slots(job, day))

    def _slots(self, job: Callable[..., Any] | str, day: datetime.date) -> Plan[list[Slot]]:
        found: list[Slot] = []
        for pending in (yield from self._slots_between(self._entries_of(job), day, day)):
            record = yield from self.guard.store.find(*pending.operation.id)
            found.append(planned_slot(pending, record, self._moment(None)))
        return found

    def _slots_between(
        self, entries: Iterable[ScheduledJob], start: datetime.date, end: datetime.date
    ) -> Plan[list[PendingSlot]]:
        """Return the slots of the local days from *start* to *end*, in the order of their times."""
        found: list[PendingSlot] = []
        for entry in entries:
            for zone, items in (yield from self._by_zone(entry)).items():
                ticks = ticks_of_days(entry.trigger, start, end, zone)
                found += [pending for tick in ticks for pending in self._slots_at(entry, tick, items)]
        return sorted(found, key=lambda pending: pending.tick.at if pending.tick is not None else 0)

    def trigger(self, job: Callable[..., Any] | str, now: datetime.datetime | None = None) -> SlotCounts:
        """Run *job* now, for all its items.  A completed slot stays as it is, and a failed slot is tried again."""
        return self._run_batch(self._slots_to_trigger(job, self._moment(now)), None)

    async def atrigger(self, job: Callable[..., Any] | str, now: datetime.datetime | None = None) -> SlotCounts:
        """The awaited form of `trigger`."""
        return await self._arun_batch(self._slots_to_trigger(job, self._moment(now)), None)

    def _slots_to_trigger(self, job: Callable[..., Any] | str, now: float) -> Plan[list[PendingSlot]]:
        pending: dict[tuple[str, str], PendingSlot] = {}
        for entry in self._entries_of(job):
            for zone, items in (yield from self._by_zone(entry)).items():
                for slot in self._slots_at(entry, instant_tick(int(now), time_zone(zone)), items):
                    pending.setdefault(slot.operation.id, slot)
        return list(pending.values())

    def backfill(
        self,
        start: datetime.date,
        end: datetime.date,
        job: Callable[..., Any] | str | None = None,
        *,
        progress: Progress | None = None,
    ) -> SlotCounts:
        """Run the slots of the local days from *start* to *end*, both included, that are not completed.

        It can be interrupted and called again: completed slots stay as they are, and failed slots are tried again.
        Future slots are not run.  *progress* is called with the number of slots that are done, and the number of all.
        """
        return self._run_batch(self._slots_to_backfill(start, end, job), progress)

    async def abackfill(
        self,
        start: datetime.date,
        end: datetime.date,
        job: Callable[..., Any] | str | None = None,
        *,
        progress: Progress | None = None,
    ) -> SlotCounts:
        """The awaited form of `backfill`, for sync and async jobs."""
        return await self._arun_batch(self._slots_to_backfill(start, end, job), progress)

    def _slots_to_backfill(
        self, start: datetime.date, end: datetime.date, job: Callable[..., Any] | str | None
    ) -> Plan[list[PendingSlot]]:
        if end < start:
            raise ConfigurationError(f"backfill from {start} to {end}: the last day is before the first")
        now = self._moment(None)
        planned = yield from self._slots_between(self._entries_of(job), start, end)
        return [pending for pending in planned if pending.tick is not None and pending.tick.at <= now]

    def _run_batch(self, planned: Plan[list[PendingSlot]], progress: Progress | None) -> SlotCounts:
        return self._run_in_threads(lambda runner: self._batch(planned, runner, progress))

    async def _arun_batch(self, planned: Plan[list[PendingSlot]], progress: Progress | None) -> SlotCounts:
        return await self._run_in_tasks(lambda runner: self._batch(planned, runner, progress))

    def _batch(self, planned: Plan[list[PendingSlot]], runner: Runner, progress: Progress | None) -> Plan[SlotCounts]:
        """Try each slot once, a few at a time, so that an interruption takes effect soon."""
        slots = yield from planned
        now, begun = self._moment(None), 0
        counts, done = SlotCounts(), deque[tuple[PendingSlot, End]]()  # not the schedule's, which may run meanwhile
        if progress is not None:
            progress(0, len(slots))
        while begun < len(slots):
            entry = slots[begun].entry
            some = slots[begun : begun + 4 * entry.concurrency]
            for pending in some:
                pending.by_hand = True
                runner.start(entry, entry.concurrency, self._try_slot(pending, now, done))
            yield runner.drain()
            begun += len(some)
            if progress is not None:
                progress(begun, len(slots))
        for _, end in done:
            counts.add("conflict" if end == "running" else end)
        yield from self._clear_misses(done)
        return counts

    def _clear_misses(self, done: Iterable[tuple[PendingSlot, End]]) -> Plan[None]:
        """Forget that a tick was missed if all its slots are completed now."""
        complete: dict[tuple[str, str], bool] = {}
        for pending, end in done:
            if pending.tick is not None and pending.entry.each is not None:
                mark = (pending.job.name, pending.tick.name)
                complete[mark] = complete.get(mark, True) and end in ("completed", "conflict")
        for (job, name), whole in complete.items():
            if whole:
                yield from self._marks.forget_miss(job, name)


def ticks_of_days(trigger: Trigger, start: datetime.date, end: datetime.date, zone: str) -> Iterator[Tick]:
    """Yield the ticks with a wall time on the days from *start* to *end*."""
    midnight = datetime.datetime.combine(start, datetime.time(), datetime.UTC).timestamp()
    for tick in trigger.after(midnight - 2 * 86400, zone):  # every zone is less than two days from UTC
        if tick.date > end:
            return
        if tick.date >= start:
            yield tick


def planned_slot(pending: PendingSlot, record: Record | None, now: float) -> Slot:
    """Return a planned slot for operators, with the state in its record."""
    assert pending.tick is not None
    states: dict[str, SlotState] = {
        "settled": "completed",
        "released": "retrying",
        "running": "running",
        "held": "held",
    }
    late = now - pending.tick.at > ON_TIME + pending.entry.jitter
    state: SlotState = ("missed" if late else "waiting") if record is None else states[record.state]
    attempts, note = (0, "") if record is None else (record.attempts, record.note)
    if record is not None and is_failed(record):
        state, attempts = "failed", attempts - 1  # the last claim only listed it as failed
    at = datetime.datetime.fromtimestamp(pending.tick.at, time_zone(pending.tick.zone))
    return Slot(job=pending.job.name, slot=pending.operation.key, at=at, state=state, attempts=attempts, note=note)


def failed_slot(record: Record) -> Slot:
    """Return a failed slot from its record alone.  Its *at* is the time of its first attempt."""
    at = datetime.datetime.fromtimestamp(record.created_at, datetime.UTC)
    attempts = record.attempts - 1  # the last claim only listed it as failed
    return Slot(job=record.scope, slot=record.key, at=at, state="failed", attempts=attempts, note=record.note)


def check_choice(name: str, value: object, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise ConfigurationError(f"{name} = {value!r} is unknown: choose one of {', '.join(map(repr, known))}")
