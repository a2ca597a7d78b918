"""The scheduler behind a schedule: finds the slots that are due, and tries each of them, one round after another.

Every process computes the same ticks and the same slots, and tries each; the ledger lets one of them have it.  A slot that
failed, or was cut off by a crash, is found in the ledger by every schedule that has the job, and tried again.
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

ON_TIME = 60.0  # seconds: a process that was busy or has just started makes up for it, whatever catch_up says
POLL = 0.5  # the longest pause between two looks at the clock
SWEEP = 5.0  # the shortest pause between two looks for slots that failed or were killed
SWEEP_SHARE = 20  # looking takes at most a twentieth of the time, however many records there are
ZONES_KNOWN = 30.0  # for so long the items' time zones are taken to be the same
ITEMS_AGAIN = 5.0  # after so long, items that could not be found are asked for again
SAVED_EVERY = 5.0
MOST_TICKS = 1000  # of one entry in one round, and of its misses that are listed
PAGE = 100


class SlotCounts(msgspec.Struct, kw_only=True):
    """How slots have ended.

    *conflict*: done before, or running elsewhere.  *retrying*: failed, and will be tried again.  *failed*: too often.
    *held*: an earlier attempt was killed, and nobody knows whether it took effect.
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
    """A line of the schedule: a job, when it is due, and for which items."""

    job: Job[Any, Any]
    trigger: Trigger
    tz: str | Callable[[Any], str]
    each: Iterable[Any] | Callable[[], Any] | None
    concurrency: int
    catch_up: CatchUp
    overlap: Overlap
    jitter: float
    seen: float | None = None  # until when its ticks are known to this process
    next_at: float = 0.0  # when to look at it again
    saved: float = 0.0
    saved_at: float = 0.0
    zones: tuple[str, ...] = ()  # of its items, when they were last asked for
    zones_at: float = float("-inf")
    chains: dict[str, deque[Owed]] = field(default_factory=dict)  # by item: the slots to be run, in their order

    @property
    def name(self) -> str:
        zone = self.tz if isinstance(self.tz, str) else "each"
        return f"{self.job.name}:{self.trigger.text}:{zone}"

    @property
    def skips(self) -> bool:
        """Whether a slot is skipped if the item's slot before is still running."""
        return self.overlap == "skip" and self.catch_up != "all"

    def reached(self) -> float:
        """Until when all its slots are done, or are in the ledger for others to find."""
        assert self.seen is not None
        return min([self.seen, *(owed.tick.at - 1.0 for chain in self.chains.values() for owed in chain if owed.tick)])


@dataclass(eq=False)
class Owed:
    """A slot that this process has to try."""

    entry: ScheduledJob
    operation: Operation
    arguments: Mapping[str, Any]
    tick: Tick | None
    item: str = ""
    due: float = 0.0
    started: bool = False
    looked: int = 0  # how often it was found to be running elsewhere
    again: tuple[float, float] = (0.0, 0.0)  # if it has failed: due again after so long, and when by the store's clock
    by_hand: bool = False

    @property
    def job(self) -> Job[Any, Any]:
        return self.entry.job


End = SlotEnd | Literal["running"]


class Scheduler:
    """The rounds of one schedule, in one process."""

    def __init__(self, guard: Guard) -> None:
        self.guard = check_guard(guard)
        self.entries: list[ScheduledJob] = []
        self._marks = Marks(guard)
        self._done: deque[tuple[Owed, End]] = deque()
        self._busy: set[tuple[str, str]] = set()  # slots that are being tried here
        # When a slot that failed here is due again: by the schedule's clock, and by the store's.
        self._retries: dict[tuple[str, str], tuple[float, float]] = {}
        self._skipped: deque[Owed] = deque()
        self._unfinished: deque[tuple[ScheduledJob, tuple[str, str]]] = deque()  # slots that the last sweep has found
        self._sweeping = False
        self._sweep_at = float("-inf")
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

    def _survived(self, runner: Runner) -> Plan[float]:
        """One round; the seconds until the next.  If the store is down, the next round tries again."""
        now = self._moment(None)
        try:
            yield from self._round(now, runner)
        except OncemoreError:
            log.exception("The schedule could not look for slots that are due")
            return 1.0
        coming = [entry.next_at for entry in self.entries if entry.next_at > now]  # the others are paused
        return min(POLL, max(0.01, min(coming, default=now + POLL) - self._moment(None)))

    def _finished(self) -> Plan[None]:
        """Remember how far the schedule has come, at its end."""
        self._sweeping = False
        try:
            self._collect(self._moment(None))
            yield from self._save(self._moment(None), at_once=True)
        except OncemoreError:  # then the slots are looked at again
            log.warning("The schedule could not remember how far it has come", exc_info=True)

    def _once(self, now: float, runner: Runner) -> Plan[SlotCounts]:
        self._counts = SlotCounts()
        self._sweep_at, self._sweeping = float("-inf"), False
        while (yield from self._round(now, runner)):
            yield runner.drain()
        yield from self._save(now, at_once=True)
        return self._counts

    def _round(self, now: float, runner: Runner) -> Plan[int]:
        """Find what is due, and start it; how many slots were started."""
        self._collect(now)
        if now < self._round_at:  # the clock was set back: do not wait until it shows that time again
            self._sweep_at = now
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
                except Exception:  # of the functions that give the items and their zones
                    log.exception("The items of %s cannot be found, trying again", entry.job.name)
                    entry.next_at = now + ITEMS_AGAIN
                    self._counts.failed += 1
        started = 0
        for entry in self.entries:
            heads = [owed for chain in entry.chains.values() for owed in chain if owed is chain[0]]
            due = [owed for owed in heads if not owed.started and owed.due <= now]
            if due and not (yield from self._is_paused(entry.job, paused)):
                random.shuffle(due)  # so that several processes do not try the same slots at the same time
                for owed in due:
                    self._start(owed, runner, now)
                started += len(due)
        started += yield from self._try_again(now, runner, paused)
        if now >= self._sweep_at and not self._sweeping:
            self._sweeping = True
            swept = []
            for entry in self._by_job().values():
                if not (yield from self._is_paused(entry.job, paused)):
                    swept.append(entry)
            runner.start(self, 1, self._sweep(swept, now))  # beside the rounds: a store without an index takes long
            started += 1
        yield from self._save(now)
        return started

    def _is_paused(self, job: Job[Any, Any], known: dict[str, bool]) -> Plan[bool]:
        if job.name not in known:
            known[job.name] = yield from self._marks.is_paused(job.name)
        return known[job.name]

    # From ticks to slots

    def _advance(self, entry: ScheduledJob, now: float, was_away: bool) -> Plan[None]:
        """Add the slots of the ticks that have come to the entry's chains."""
        seen = entry.seen
        if seen is None or was_away:  # other processes have come further
            reached = yield from self._marks.reached(entry.name)
            seen = max((at for at in (seen, reached) if at is not None), default=None)
        new = seen is None  # the schedule has never had this entry: there is nothing to catch up with
        since = now - ON_TIME if seen is None or seen > now else seen  # later than now: the clock was set back
        known, known_at = set(entry.zones), entry.zones_at
        zones = yield from self._by_zone(entry)
        until = now
        for zone, items in zones.items():
            begin = since if zone in known or not known else min(since, known_at)
            ticks = list_some(between(entry.trigger, begin, until, zone), first=entry.catch_up == "all")
            if entry.catch_up == "all" and len(ticks) == MOST_TICKS:
                until = ticks[-1].at  # the others in the next round
            chosen = ticks[-1:] if new else choose(ticks, now, entry)
            for tick in chosen:
                for owed in self._slots_at(entry, tick, items):
                    yield from self._owe(owed, now)
            if not new:
                yield from self._miss(entry, [tick for tick in ticks if tick not in chosen])
        entry.seen, entry.zones, entry.zones_at = until, tuple(zones), now
        soonest = [next(entry.trigger.after(until, zone), None) for zone in zones]
        times = [float(tick.at) for tick in soonest if tick is not None]
        if callable(entry.tz):
            times.append(entry.zones_at + ZONES_KNOWN)
        entry.next_at = min(times, default=float("inf"))

    def _by_zone(self, entry: ScheduledJob) -> Plan[dict[str, list[tuple[Any, ...]]]]:
        """Ask for the items, and sort them by their time zones."""
        items: list[tuple[Any, ...]] = [()]  # the positional arguments of each call: one item, or nothing at all
        if entry.each is not None:
            items = [(item,) for item in ((yield Call(entry.each)) if callable(entry.each) else entry.each)]
        if isinstance(entry.tz, str):
            return {entry.tz: items}
        zones: dict[str, list[tuple[Any, ...]]] = {}
        for item in items:
            zones.setdefault(entry.tz(item[0]), []).append(item)
        return zones

    def _slot(self, entry: ScheduledJob, tick: Tick, item: tuple[Any, ...]) -> Owed:
        """The slot of an item at a tick.  An item that moves to another time zone has one slot a day all the same."""
        bound = entry.job.bind_scheduled(item, tick.at, tick)
        operation = entry.job.slot_of(bound, tick.at, tick)
        name = fingerprint_of(list(item))
        if callable(entry.tz) and entry.trigger.daily:
            operation = msgspec.structs.replace(operation, unique=f"{tick.date}:{name}")
        arguments = {each: bound.arguments[each] for each in entry.job.compared}
        return Owed(entry, operation, arguments, tick, name, due=tick.at + delay_of(operation, entry.jitter))

    def _slots_at(self, entry: ScheduledJob, tick: Tick, items: Iterable[tuple[Any, ...]]) -> Iterator[Owed]:
        """The slots of a tick.  An item that cannot be named does not stop the others."""
        for item in items:
            try:
                yield self._slot(entry, tick, item)
            except Exception:
                log.exception("%s has no slot at %s for %r", entry.job.name, tick.name, *item or [()])
                self._counts.failed += 1

    def _owe(self, owed: Owed, now: float) -> Plan[None]:
        """Put the slot behind those of the same item; with overlap="skip", only if none of them is running."""
        entry = owed.entry
        chain = entry.chains.setdefault(owed.item, deque())
        if any(other.operation.id == owed.operation.id for other in chain):
            return
        if chain and entry.skips:
            if chain[0].started:
                yield from self._skip(owed)
                return
            chain[0].due = min(chain[0].due, now)  # see whether it is still running elsewhere
        chain.append(owed)

    def _skip(self, owed: Owed) -> Plan[None]:
        """Remember that the slot is skipped, unless another process runs it."""
        assert owed.tick is not None
        if (yield from self.guard.store.find(*owed.operation.id)) is not None:
            return
        at = datetime.datetime.fromtimestamp(owed.tick.at, datetime.UTC)
        self._counts.missed += 1
        yield from self._marks.miss(Missed(owed.job.name, owed.operation.key, at, "overlap"))

    def _miss(self, entry: ScheduledJob, ticks: Sequence[Tick]) -> Plan[None]:
        """Remember the ticks that are not made up for."""
        for tick in ticks:
            name = tick.name
            for owed in self._slots_at(entry, tick, [()] if entry.each is None else []):
                name = owed.operation.key
            if (yield from self.guard.store.find(entry.job.name, name)) is not None:
                continue
            self._counts.missed += 1
            at = datetime.datetime.fromtimestamp(tick.at, datetime.UTC)
            yield from self._marks.miss(Missed(entry.job.name, name, at, "downtime"))

    # Trying slots

    def _start(self, owed: Owed, runner: Runner, now: float) -> None:
        owed.started = True
        self._busy.add(owed.operation.id)
        runner.start(owed.entry, owed.entry.concurrency, self._tried(owed, now, self._done))

    def _tried(self, owed: Owed, now: float, done: deque[tuple[Owed, End]]) -> Plan[None]:
        end: End = "running"
        try:
            end = yield from self._attempt(owed, now)
        except (StoreError, Fenced) as error:  # look again later: it may have been recorded all the same
            log.warning("%s %r could not be tried: %s", owed.job.name, owed.operation.key, error)
        except Exception:
            log.exception("%s %r cannot be tried", owed.job.name, owed.operation.key)
            end = "failed"
        finally:
            done.append((owed, end))

    def _attempt(self, owed: Owed, now: float) -> Plan[End]:
        """Try a slot once, and say how that ended; "running" if another process has it."""
        job, operation = owed.job, owed.operation
        if owed.tick is not None and not owed.by_hand:  # another process may have tried it
            record = yield from self.guard.store.find(*operation.id)
            running = record is not None and record.state == "running"
            if record is not None and running and record.lease_until > record.now:
                if owed.looked:  # else the attempt counts the conflict
                    return "running"
            elif record is not None and (record.state == "released" or (running and not job.is_due(record))):
                owed.again = (job.retry_at(record) - record.now, job.retry_at(record))  # it has failed elsewhere
                return "retrying"
        if owed.by_hand:
            yield from job.free(operation)
        delay = max(0.0, now - owed.tick.at) if owed.tick is not None else 0.0
        try:
            answer = yield from job.scheduled(operation, owed.arguments, delay)
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
            owed.again = (pause, 0.0 if record is None else record.now + pause)
            return "retrying"
        return slot_end(answer)

    def _collect(self, now: float) -> None:
        """Take the slots that have ended off their chains."""
        while self._done:
            owed, end = self._done.popleft()
            owed.started = False
            self._busy.discard(owed.operation.id)
            if end == "running":
                owed.looked += 1
                owed.due = now + min(2.0 ** (owed.looked - 1), owed.job.policy.lease / 2)
                self._counts.conflict += owed.looked == 1
            else:
                self._counts.add(end)
            if end == "retrying":
                pause, due_there = owed.again
                self._retries[owed.operation.id] = (now + pause, due_there)
            else:
                self._retries.pop(owed.operation.id, None)
            chain = owed.entry.chains.get(owed.item)
            if not chain or chain[0] is not owed:
                continue
            if end != "running":
                chain.popleft()
                if not chain:
                    del owed.entry.chains[owed.item]
            elif owed.entry.skips:
                while len(chain) > 1:  # it runs elsewhere, so those behind it are skipped
                    self._skipped.append(chain.pop())

    # Slots that failed or were killed, of any process and of calls by hand

    def _sweep(self, entries: Iterable[ScheduledJob], now: float) -> Plan[None]:
        """Look for slots that failed or were killed, for the next round to try them again."""
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
            self._sweep_at = now + max(SWEEP, SWEEP_SHARE * took)
            self._sweeping = False

    def _try_again(self, now: float, runner: Runner, paused: dict[str, bool]) -> Plan[int]:
        """Start the slots that the last sweep has found, and those that failed here, if they are due."""
        started = 0
        while self._unfinished:
            started += yield from self._found(*self._unfinished.popleft(), now, runner)
        entries = self._by_job()
        for id in [id for id, (at, _) in self._retries.items() if at <= now]:
            entry = entries[id[0]]
            if not (yield from self._is_paused(entry.job, paused)):
                started += yield from self._found(entry, id, now, runner)
                if self._retries[id][0] <= now:
                    del self._retries[id]
        return started

    def _by_job(self) -> dict[str, ScheduledJob]:
        """The first entry of each job."""
        return {entry.job.name: entry for entry in reversed(self.entries)}

    def _found(self, entry: ScheduledJob, id: tuple[str, str], now: float, runner: Runner) -> Plan[int]:
        """Try an unfinished slot again if it is due, or list it as failed; 1 if it was started."""
        job = entry.job
        record = (yield from self.guard.store.find(*id)) if id not in self._busy else None
        if record is None or record.state not in ("released", "running"):
            return 0
        if job.is_used_up(record):
            if (yield from job.give_up(identity(record), "its attempts or its time are used up")):
                job.ended(identity(record), "failed", record.attempts)
                self._counts.failed += 1
            return 0
        due = job.retry_at(record)
        due_here, due_there = self._retries.get(id, (float("inf"), due))
        if due > due_there:  # it has failed once more, elsewhere
            due_here, due_there = self._retries[id] = (now + due - record.now, due)
        if now < due_here and record.now < due_there:
            return 0
        try:
            owed = self._kept_slot(entry, record)
        except ConfigurationError as error:
            log.warning("%s", error.detail)
            return 0
        self._start(owed, runner, now)
        return 1

    def _kept_slot(self, entry: ScheduledJob, record: Record) -> Owed:
        """The slot of a record, with the arguments that it keeps."""
        kept = unpack_request(record.request, entry.job.types())
        if kept["request"] is None:
            raise ConfigurationError(
                f"{entry.job.name} {record.key!r} cannot be tried again: its arguments could not be kept; call it by hand"
            )
        last = record.attempts + 1 >= entry.job.attempts
        operation = msgspec.structs.replace(identity(record), unique=kept["unique"], giving_up=last)
        return Owed(entry, operation, kept["request"], None)

    def _save(self, now: float, *, at_once: bool = False) -> Plan[None]:
        """Remember how far each entry has come: every few seconds, and at the end."""
        while self._skipped:
            yield from self._skip(self._skipped.popleft())
        for entry in self.entries:
            if entry.seen is None or (now - entry.saved_at < SAVED_EVERY and not at_once):
                continue
            reached = entry.reached()
            entry.saved_at = now
            if reached > entry.saved:
                entry.saved = reached
                yield from self._marks.reach(entry.name, reached)


def choose(ticks: list[Tick], now: float, entry: ScheduledJob) -> list[Tick]:
    """The ticks to run, of those that have passed since the last round: by `catch_up`, but always those that are on time.

    With "none", a process that was away for a moment still runs the last one, for as long as a slot may be tried again.
    """
    if entry.catch_up == "all":
        return ticks
    on_time = [tick for tick in ticks if now - tick.at <= ON_TIME]
    if on_time or not ticks:
        return on_time
    last = ticks[-1]
    return [last] if entry.catch_up == "last" or now - last.at <= entry.job.within else []


def list_some(ticks: Iterator[Tick], *, first: bool) -> list[Tick]:
    """The first or last MOST_TICKS: after a long time without a schedule, a job may have been due a million times."""
    return list(islice(ticks, MOST_TICKS)) if first else list(deque(ticks, maxlen=MOST_TICKS))


def delay_of(operation: Operation, jitter: float) -> float:
    """Up to *jitter* seconds: the same for a slot in every process."""
    return random.Random(f"{operation.scope}|{operation.key}").random() * jitter if jitter else 0.0
