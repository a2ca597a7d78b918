"""The scheduler behind a schedule: finds the slots that are due, and tries each of them, one round after another.

Every process computes the same ticks and slots, and tries each slot; the ledger gives it to one process.  If a slot
failed or its process crashed, every schedule that has the job finds it in the ledger and tries it again.
"""

from __future__ import annotations

import datetime
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import msgspec

from .._fingerprint.fingerprint import fingerprint_of
from .._ledger.completer import identity
from .._ledger.events import log
from .._ledger.guard import Guard, check_guard
from .._ledger.model import Operation, Record
from .._ledger.steps import unpack_request
from .._ledger.store import Filter
from .._runtime.plan import Call, Plan
from ..errors import (
    ConfigurationError,
    Fenced,
    InProgress,
    OncemoreError,
    Refusal,
    StoreError,
    UnknownOutcome,
)
from .job import Job, SlotEnd, is_failed, slot_end
from .marks import Marks, Missed
from .runner import Runner
from .ticks import Tick, Trigger, between

CatchUp = Literal["none", "last", "all"]
Overlap = Literal["skip", "queue"]

ON_TIME = 60.0  # seconds; a slot that is less late than this runs whatever `catch_up` says
POLL = 0.5  # the longest pause between two rounds, in seconds
FIND_PAUSE = 5.0  # the shortest pause between two searches for slots that failed or were killed, in seconds
FIND_SHARE = 20  # searches take at most a twentieth of the time, however many records there are
ZONES_KNOWN = 30.0  # seconds for which the items' time zones are assumed not to change
ITEMS_AGAIN = 5.0  # seconds after which items that could not be found are asked for again
SAVED_EVERY = 5.0
MOST_TICKS = 1000  # the most ticks of one entry that a round handles or records as missed
PAGE = 100


class SlotCounts(msgspec.Struct, kw_only=True):
    """Counts how slots have ended.

    *conflict*: it was done before, or is running elsewhere.  *retrying*: it failed, and will be tried again.  *failed*:
    it failed too often.  *held*: an earlier attempt was killed, and nobody knows whether it took effect.
    """

    completed: int = 0
    conflict: int = 0
    retrying: int = 0
    failed: int = 0
    held: int = 0
    missed: int = 0

    def add(self, end: str) -> None:
        setattr(self, end, getattr(self, end) + 1)


@dataclass(eq=False)
class ScheduledJob:
    """An entry of the schedule: a job, when it is due, and for which items."""

    job: Job[Any, Any]
    trigger: Trigger
    tz: str | Callable[[Any], str]
    each: Iterable[Any] | Callable[[], Any] | None
    concurrency: int
    catch_up: CatchUp
    overlap: Overlap
    jitter: float
    seen: float | None = None  # the time until which this process has handled its ticks
    next_at: float = 0.0  # the time at which it has to be looked at again
    saved: float = 0.0  # the value of `reached` that was last saved
    saved_at: float = 0.0
    zones: tuple[str, ...] = ()  # the time zones of its items, when they were last asked for
    zones_at: float = float("-inf")
    chains: dict[str, deque[PendingSlot]] = field(default_factory=dict)  # by item: the slots to run, in their order

    @property
    def name(self) -> str:
        zone = self.tz if isinstance(self.tz, str) else "each"
        return f"{self.job.name}:{self.trigger.text}:{zone}"

    @property
    def skips(self) -> bool:
        """Whether a slot is skipped if the item's previous slot is still running."""
        return self.overlap == "skip" and self.catch_up != "all"

    def reached(self) -> float:
        """Return the time until which all its slots are done, or are in the ledger, where other processes find them."""
        assert self.seen is not None
        return min(
            [self.seen, *(pending.tick.at - 1.0 for chain in self.chains.values() for pending in chain if pending.tick)]
        )


@dataclass(eq=False)
class PendingSlot:
    """A slot that this process has to try."""

    entry: ScheduledJob
    operation: Operation
    arguments: Mapping[str, Any]
    tick: Tick | None
    item: str = ""
    due: float = 0.0
    started: bool = False
    looked: int = 0  # how often it was found to be running elsewhere
    again: tuple[float, float] = (0.0, 0.0)  # if it has failed: the pause until it is due, and that time in the store
    by_hand: bool = False

    @property
    def job(self) -> Job[Any, Any]:
        return self.entry.job


End = SlotEnd | Literal["running"]


class Scheduler:
    """Runs the rounds of one schedule in one process."""

    def __init__(self, guard: Guard) -> None:
        self.guard = check_guard(guard)
        self.entries: list[ScheduledJob] = []
        self._marks = Marks(guard)
        self._done: deque[tuple[PendingSlot, End]] = deque()
        self._busy: set[tuple[str, str]] = set()  # slots that are being tried here
        # By slot that failed here, the time at which it is due again: by the schedule's clock, and by the store's.
        self._retries: dict[tuple[str, str], tuple[float, float]] = {}
        self._skipped: deque[PendingSlot] = deque()
        self._unfinished: deque[tuple[ScheduledJob, tuple[str, str]]] = deque()  # slots that the last search has found
        self._finding = False  # whether a search for unfinished slots is under way
        self._find_at = float("-inf")  # the time of the next search
        self._round_at = float("-inf")  # the time of the last round
        self._counts = SlotCounts()

    # Rounds

    def _moment(self, now: datetime.datetime | float | None) -> float:
        if now is None:
            return self.guard.clock.time() + self.guard.store.shift
        if isinstance(now, datetime.datetime):
            if now.tzinfo is None:
                raise ConfigurationError(f"now = {now!r} has no time zone: write datetime(..., tzinfo=UTC)")
            return now.timestamp()
        return float(now)

    def _try_round(self, runner: Runner) -> Plan[float]:
        """Run a round, and return the seconds until the next.  If the store is down, the next round tries again."""
        now = self._moment(None)
        try:
            yield from self._round(now, runner)
        except OncemoreError:
            log.exception("The schedule could not look for slots that are due, and tries again in a second")
            return 1.0
        coming = [entry.next_at for entry in self.entries if entry.next_at > now]  # all other entries are paused
        return min(POLL, max(0.01, min(coming, default=now + POLL) - self._moment(None)))

    def _save_at_end(self) -> Plan[None]:
        """Save how far the schedule has come, at its end."""
        self._finding = False
        try:
            self._collect(self._moment(None))
            yield from self._save(self._moment(None), at_end=True)
        except OncemoreError:
            log.warning("The schedule could not save how far it has come, so it will check slots again", exc_info=True)

    def _run_due(self, now: float, runner: Runner) -> Plan[SlotCounts]:
        self._counts = SlotCounts()
        self._find_at, self._finding = float("-inf"), False
        while (yield from self._round(now, runner)):
            yield runner.drain()
        yield from self._save(now, at_end=True)
        return self._counts

    def _round(self, now: float, runner: Runner) -> Plan[int]:
        """Start the slots that are due, and a search for unfinished ones.  Return how many plans were started."""
        self._collect(now)
        if now < self._round_at:  # the clock was set back: do not wait until it shows that time again
            self._find_at = now
            for entry in self.entries:
                entry.next_at, entry.saved = now, 0.0
        was_away = now - self._round_at > ON_TIME
        self._round_at = now
        paused: dict[str, bool] = {}
        for entry in self.entries:
            if entry.next_at <= now and not (yield from self._is_paused(entry.job, paused)):
                try:
                    yield from self._advance(entry, now, was_away)
                except OncemoreError:
                    raise
                except Exception:  # raised by the functions for the items and their zones
                    log.exception("The items of %s cannot be found, trying again in %g s", entry.job.name, ITEMS_AGAIN)
                    entry.next_at = now + ITEMS_AGAIN
                    self._counts.failed += 1
        started = 0
        for entry in self.entries:
            heads = [pending for chain in entry.chains.values() for pending in chain if pending is chain[0]]
            due = [pending for pending in heads if not pending.started and pending.due <= now]
            if due and not (yield from self._is_paused(entry.job, paused)):
                random.shuffle(due)  # so that several processes do not try the same slots at the same time
                for pending in due:
                    self._start(pending, runner, now)
                started += len(due)
        started += yield from self._try_again(now, runner, paused)
        if now >= self._find_at and not self._finding:
            self._finding = True
            active = []
            for entry in self._by_job().values():
                if not (yield from self._is_paused(entry.job, paused)):
                    active.append(entry)
            # Not within the round, because a store without an index takes long.
            runner.start(self, 1, self._find_unfinished(active, now))
            started += 1
        yield from self._save(now)
        return started

    def _is_paused(self, job: Job[Any, Any], known: dict[str, bool]) -> Plan[bool]:
        if job.name not in known:
            known[job.name] = yield from self._marks.is_paused(job.name)
        return known[job.name]

    # From ticks to slots

    def _advance(self, entry: ScheduledJob, now: float, was_away: bool) -> Plan[None]:
        """Add the slots of the ticks that have passed to the entry's chains."""
        seen = entry.seen
        if seen is None or was_away:  # other processes have come further
            reached = yield from self._marks.reached(entry.name)
            seen = max((at for at in (seen, reached) if at is not None), default=None)
        new = seen is None  # the schedule has never had this entry, so there is nothing to catch up with
        since = now - ON_TIME if seen is None or seen > now else seen  # if it is later than now, the clock was set back
        known, known_at = set(entry.zones), entry.zones_at
        zones = yield from self._by_zone(entry)
        until = now
        for zone, items in zones.items():
            begin = since if zone in known or not known else min(since, known_at)
            ticks = list_some(between(entry.trigger, begin, until, zone), first=entry.catch_up == "all")
            if entry.catch_up == "all" and len(ticks) == MOST_TICKS:
                until = ticks[-1].at  # the next round handles further ticks
            chosen = ticks[-1:] if new else choose(ticks, now, entry)
            for tick in chosen:
                for pending in self._slots_at(entry, tick, items):
                    yield from self._add_to_chain(pending, now)
            if not new:
                yield from self._record_missed(entry, [tick for tick in ticks if tick not in chosen])
        entry.seen, entry.zones, entry.zones_at = until, tuple(zones), now
        soonest = [next(entry.trigger.after(until, zone), None) for zone in zones]
        times = [float(tick.at) for tick in soonest if tick is not None]
        if callable(entry.tz):
            times.append(entry.zones_at + ZONES_KNOWN)
        entry.next_at = min(times, default=float("inf"))

    def _by_zone(self, entry: ScheduledJob) -> Plan[dict[str, list[tuple[Any, ...]]]]:
        """Ask for the items, and return them by their time zones."""
        items: list[tuple[Any, ...]] = [()]  # the positional arguments of each call: one item, or none
        if entry.each is not None:
            items = [(item,) for item in ((yield Call(entry.each)) if callable(entry.each) else entry.each)]
        if isinstance(entry.tz, str):
            return {entry.tz: items}
        zones: dict[str, list[tuple[Any, ...]]] = {}
        for item in items:
            zones.setdefault(entry.tz(item[0]), []).append(item)
        return zones

    def _slot(self, entry: ScheduledJob, tick: Tick, item: tuple[Any, ...]) -> PendingSlot:
        """Return the slot of an item at a tick.  A daily job has one slot a day per item, even if the zone changes."""
        bound = entry.job.bind_scheduled(item, tick.at, tick)
        operation = entry.job.slot_of(bound, tick.at, tick)
        name = fingerprint_of(list(item))
        if callable(entry.tz) and entry.trigger.daily:
            operation = msgspec.structs.replace(operation, unique=f"{tick.date}:{name}")
        arguments = {each: bound.arguments[each] for each in entry.job.compared}
        return PendingSlot(entry, operation, arguments, tick, name, due=tick.at + delay_of(operation, entry.jitter))

    def _slots_at(self, entry: ScheduledJob, tick: Tick, items: Iterable[tuple[Any, ...]]) -> Iterator[PendingSlot]:
        """Yield the slots of a tick.  An item without a valid slot is logged, and does not stop the others."""
        for item in items:
            try:
                yield self._slot(entry, tick, item)
            except Exception:
                log.exception("%s has no slot at %s for %r", entry.job.name, tick.name, *item or [()])
                self._counts.failed += 1

    def _add_to_chain(self, pending: PendingSlot, now: float) -> Plan[None]:
        """Add the slot to the chain of its item.  If overlap="skip" and the first slot there is running, skip it."""
        entry = pending.entry
        chain = entry.chains.setdefault(pending.item, deque())
        if any(other.operation.id == pending.operation.id for other in chain):
            return
        if chain and entry.skips:
            if chain[0].started:
                yield from self._record_skipped(pending)
                return
            chain[0].due = min(chain[0].due, now)  # check whether it is still running elsewhere
        chain.append(pending)

    def _record_skipped(self, pending: PendingSlot) -> Plan[None]:
        """Record that the slot is skipped, unless another process has run it."""
        assert pending.tick is not None
        if (yield from self.guard.store.find(*pending.operation.id)) is not None:
            return
        at = datetime.datetime.fromtimestamp(pending.tick.at, datetime.UTC)
        self._counts.missed += 1
        yield from self._marks.miss(Missed(pending.job.name, pending.operation.key, at, "overlap"))

    def _record_missed(self, entry: ScheduledJob, ticks: Sequence[Tick]) -> Plan[None]:
        """Record the ticks that are not run, unless another process has run them."""
        for tick in ticks:
            name = tick.name
            for pending in self._slots_at(entry, tick, [()] if entry.each is None else []):
                name = pending.operation.key
            if (yield from self.guard.store.find(entry.job.name, name)) is not None:
                continue
            self._counts.missed += 1
            at = datetime.datetime.fromtimestamp(tick.at, datetime.UTC)
            yield from self._marks.miss(Missed(entry.job.name, name, at, "downtime"))

    # Trying slots

    def _start(self, pending: PendingSlot, runner: Runner, now: float) -> None:
        pending.started = True
        self._busy.add(pending.operation.id)
        runner.start(pending.entry, pending.entry.concurrency, self._try_slot(pending, now, self._done))

    def _try_slot(self, pending: PendingSlot, now: float, done: deque[tuple[PendingSlot, End]]) -> Plan[None]:
        end: End = "running"
        try:
            end = yield from self._attempt(pending, now)
        except (StoreError, Fenced) as error:  # its end may have been recorded nevertheless
            log.warning("%s %r could not be tried: %s", pending.job.name, pending.operation.key, error)
            end = "failed" if pending.by_hand else "running"  # a schedule tries it again
        except Exception:
            log.exception("%s %r cannot be tried, and counts as failed", pending.job.name, pending.operation.key)
            end = "failed"
        finally:
            done.append((pending, end))

    def _attempt(self, pending: PendingSlot, now: float) -> Plan[End]:
        """Try a slot once, and return how that ended.  The result is "running" if another process has the slot."""
        job, operation = pending.job, pending.operation
        if pending.tick is not None and not pending.by_hand:  # another process may have tried it
            record = yield from self.guard.store.find(*operation.id)
            running = record is not None and record.state == "running"
            if record is not None and running and record.lease_until > record.now:
                if pending.looked:  # the first time, the attempt below counts the conflict
                    return "running"
            elif record is not None and (record.state == "released" or (running and not job.is_due(record))):
                pending.again = (job.retry_at(record) - record.now, job.retry_at(record))  # it has failed elsewhere
                return "retrying"
        if pending.by_hand:
            yield from job.allow_retry(operation)
        delay = max(0.0, now - pending.tick.at) if pending.tick is not None else 0.0
        try:
            answer = yield from job.scheduled(operation, pending.arguments, delay)
        except InProgress:
            return "running"
        except UnknownOutcome:
            record = yield from self.guard.store.find(*operation.id)
            return "failed" if record is not None and is_failed(record) else "held"
        except (StoreError, Fenced):
            raise
        except Refusal as refusal:
            log.error("%s %r is refused: %s", job.name, operation.key, refusal.detail)
            return "failed"
        except Exception:
            record = yield from self.guard.store.find(*operation.id)
            failed = record is not None and is_failed(record)
            again = "is listed as failed" if failed else "will be tried again"
            log.warning("%s %r has failed, and %s", job.name, operation.key, again, exc_info=True)
            if failed:
                return "failed"
            pause = job.backoff.step(1 if record is None else record.attempts)
            pending.again = (pause, 0.0 if record is None else record.now + pause)
            return "retrying"
        return slot_end(answer)

    def _collect(self, now: float) -> None:
        """Count the slots that have ended, and remove them from their chains."""
        while self._done:
            pending, end = self._done.popleft()
            pending.started = False
            self._busy.discard(pending.operation.id)
            if end == "running":
                pending.looked += 1
                pending.due = now + min(2.0 ** (pending.looked - 1), pending.job.policy.lease / 2)
                self._counts.conflict += pending.looked == 1
            else:
                self._counts.add(end)
            if end == "retrying":
                pause, due_there = pending.again
                self._retries[pending.operation.id] = (now + pause, due_there)
            else:
                self._retries.pop(pending.operation.id, None)
            chain = pending.entry.chains.get(pending.item)
            if not chain or chain[0] is not pending:
                continue
            if end != "running":
                chain.popleft()
                if not chain:
                    del pending.entry.chains[pending.item]
            elif pending.entry.skips:
                while len(chain) > 1:  # it runs elsewhere, so the slots after it are skipped
                    self._skipped.append(chain.pop())

    # Slots that failed or were killed, of any process and of calls by hand

    def _find_unfinished(self, entries: Iterable[ScheduledJob], now: float) -> Plan[None]:
        """Look for slots that failed or were killed, so that the next round tries them again."""
        began = self.guard.clock.monotonic()
        try:
            for entry in entries:
                for where in (
                    Filter(scope=entry.job.name, state="released"),
                    Filter(scope=entry.job.name, lapsed=True),
                ):
                    cursor: str | None = None
                    while True:
                        page = yield from self.guard.store.list(where, limit=PAGE, cursor=cursor)
                        self._unfinished += [(entry, record.id) for record in page.records if entry.job.is_due(record)]
                        cursor = page.cursor
                        if cursor is None:
                            break
        except Exception:
            log.exception("The schedule could not look for slots that failed or were killed, trying again")
        finally:
            took = self.guard.clock.monotonic() - began
            self._find_at = now + max(FIND_PAUSE, FIND_SHARE * took)
            self._finding = False

    def _try_again(self, now: float, runner: Runner, paused: dict[str, bool]) -> Plan[int]:
        """Start the slots that the last search has found, and the slots that failed here, if they are due."""
        started = 0
        while self._unfinished:
            started += yield from self._start_unfinished(*self._unfinished.popleft(), now, runner)
        entries = self._by_job()
        for id in [id for id, (at, _) in self._retries.items() if at <= now]:
            entry = entries[id[0]]
            if not (yield from self._is_paused(entry.job, paused)):
                started += yield from self._start_unfinished(entry, id, now, runner)
                if self._retries[id][0] <= now:
                    del self._retries[id]
        return started

    def _by_job(self) -> dict[str, ScheduledJob]:
        """Return the first entry of each job."""
        return {entry.job.name: entry for entry in reversed(self.entries)}

    def _start_unfinished(self, entry: ScheduledJob, id: tuple[str, str], now: float, runner: Runner) -> Plan[int]:
        """Start an unfinished slot if it is due, or list it as failed.  Return the number of started slots: 0 or 1."""
        job = entry.job
        record = (yield from self.guard.store.find(*id)) if id not in self._busy else None
        if record is None or record.state not in ("released", "running"):
            return 0
        if job.is_used_up(record):
            if (yield from job.give_up(identity(record), "its attempts or its time are used up")):
                job.report_end(identity(record), "failed", record.attempts)
                self._counts.failed += 1
            return 0
        due = job.retry_at(record)
        due_here, due_there = self._retries.get(id, (float("inf"), due))
        if due > due_there:  # it has failed once more, elsewhere
            due_here, due_there = self._retries[id] = (now + due - record.now, due)
        if now < due_here and record.now < due_there:
            return 0
        try:
            pending = self._kept_slot(entry, record)
        except ConfigurationError as error:
            log.warning("%s", error.detail)
            return 0
        self._start(pending, runner, now)
        return 1

    def _kept_slot(self, entry: ScheduledJob, record: Record) -> PendingSlot:
        """Return the slot of a record, with the arguments that are stored there."""
        kept = unpack_request(record.request, entry.job.types())
        if kept["request"] is None:
            raise ConfigurationError(
                f"{entry.job.name} {record.key!r} cannot be tried again: its arguments could not be kept; call it by hand"
            )
        last = record.attempts + 1 >= entry.job.attempts
        operation = msgspec.structs.replace(identity(record), unique=kept["unique"], giving_up=last)
        return PendingSlot(entry, operation, kept["request"], None)

    def _save(self, now: float, *, at_end: bool = False) -> Plan[None]:
        """Record skipped slots.  Save how far each entry has come, every few seconds and at the end."""
        while self._skipped:
            yield from self._record_skipped(self._skipped.popleft())
        for entry in self.entries:
            if entry.seen is None or (now - entry.saved_at < SAVED_EVERY and not at_end):
                continue
            reached = entry.reached()
            entry.saved_at = now
            if reached > entry.saved:
                entry.saved = reached
                yield from self._marks.reach(entry.name, reached)


def choose(ticks: list[Tick], now: float, entry: ScheduledJob) -> list[Tick]:
    """Return the ticks to run.  *ticks* have passed since the last round.

    Ticks that are on time always run.  If there are none, `catch_up` decides; "none" still runs the last tick if it is
    less late than the job's `within`.
    """
    if entry.catch_up == "all":
        return ticks
    on_time = [tick for tick in ticks if now - tick.at <= ON_TIME]
    if on_time or not ticks:
        return on_time
    last = ticks[-1]
    return [last] if entry.catch_up == "last" or now - last.at <= entry.job.within else []


def list_some(ticks: Iterator[Tick], *, first: bool) -> list[Tick]:
    """Return the first or the last MOST_TICKS ticks.  After a long downtime, there may be a million."""
    return list(islice(ticks, MOST_TICKS)) if first else list(deque(ticks, maxlen=MOST_TICKS))


def delay_of(operation: Operation, jitter: float) -> float:
    """Return a delay of up to *jitter* seconds, which is the same for a slot in every process."""
    return random.Random(f"{operation.scope}|{operation.key}").random() * jitter if jitter else 0.0
