"""The relay: sends the messages of an outbox to a broker, and tries each again until the broker has stored it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Literal, get_args

import msgspec

from .._contract.policy import duration
from .._ledger.events import EventKind
from .._ledger.guard import check_positive
from .._ledger.model import Operation
from .._ledger.transactions import TransactionAdapter
from .._runtime.backoff import Backoff
from .._runtime.clock import SYSTEM
from .._runtime.loops import to_the_end
from .._runtime.plan import arun
from .._runtime.service import run_service
from .._runtime.wakeups import Wait
from ..errors import BrokerError, ConfigurationError, OncemoreError
from . import outbox_sql as sql
from .broker import Broker, BrokerDown, connect
from .envelope import Envelope
from .inbox import matches, storable
from .outbox import LONG_WAIT, Outbox, read_envelope
from .tracing import send_span

log = logging.getLogger("oncemore.messages")

Mode = Literal["hold", "lease"]
Target = str | Broker

BATCH = 500
ATTEMPTS = 10
LEASE = 30.0
SHORTEST_POLL, LONGEST_POLL = 0.01, 1.0  # seconds between two rounds; the pause doubles while no message is found
FAILED_POLL = 0.5  # seconds between two claims of rows that have failed before
LOOK_AT_ALL = 1.0  # seconds between two claims that look at all rows
LATE = 60.0  # seconds; a message that commits later than this after it was added is found only by the look at all rows
ROUNDING = 0.001  # seconds by which a time may change when it is converted to a float
PURGE_EVERY = 60.0  # seconds between two deletions of sent messages that were kept long enough
LOOK_FOR_WAITING = 5.0  # seconds between two counts of messages that wait for an old transaction
WARN_WAITING = 60.0  # seconds between two warnings of such messages
AVOIDED = 2.0  # seconds for which one of several brokers is left alone after it was down; longer if it failed slowly
MOST_ROUNDS = 5  # queries of one claim, while it finds only subjects that another relay is sending
MOST_TYPES = 10_000  # types with a remembered broker
LONGEST_ERROR = 500  # characters of an error that are stored
# Between the attempts of one message.  All are made within the two minutes for which NATS recognises a repeated id.
BACKOFF = Backoff(base=0.5, cap=25.0, jitter="equal")
# While the broker or the database is down.
DOWN = Backoff(base=0.1, cap=5.0, jitter="equal")


class Row(msgspec.Struct):
    """A claimed message, with the number of its earlier *attempts*."""

    seq: int
    envelope: Envelope
    attempts: int

    def __str__(self) -> str:
        return f"{self.envelope.id} of type {self.envelope.type} (correlation {self.envelope.correlationid})"


class Relay:
    """Sends the messages of *outbox*.  Any number of relays may share an outbox, in any number of processes.

    Messages with the same subject are sent in order.  If one fails, later messages with its subject wait; others go on.

    In mode "hold", rows are locked, sent and deleted in one transaction.  In mode "lease", the claim is committed first
    and the attempt counted, so no transaction is open while a slow broker stores the messages.  A row that has failed
    is sent under a lease in both modes.

    Args:
        outbox: The outbox with the messages to send.
        to: A broker's URL, a Broker, or a mapping from types to these; `*` in a type matches any characters, the first
            match wins, and a message that matches none is a dead letter.
        batch: How many messages are claimed at a time.
        mode: "hold" or "lease"; by default "lease" on SQLite and behind a connection pooler, otherwise "hold".
        lease: After how long another relay takes over messages that a dead relay has claimed under a lease.
        attempts: How many failures make a message a dead letter.  None is counted while the broker is down.
        backoff: The pauses between the attempts of one message.
        strict: Whether a dead letter holds up later messages with its subject until it is requeued or deleted.
        keep: Replaces the outbox's own `keep`: for how long sent messages are kept for `outbox.replay`.
    """

    def __init__(
        self,
        outbox: Outbox,
        to: Target | Mapping[str, Target],
        *,
        batch: int = BATCH,
        mode: Mode | None = None,
        lease: float | str = LEASE,
        attempts: int = ATTEMPTS,
        backoff: Backoff = BACKOFF,
        strict: bool = False,
        keep: float | str | None = None,
    ) -> None:
        if not isinstance(outbox, Outbox):
            raise ConfigurationError(
                f"outbox is {outbox!r}: pass an Outbox, as in Relay(Outbox(guard, source='shop'), to=url)"
            )
        if mode is not None and mode not in get_args(Mode):
            raise ConfigurationError(f"mode = {mode!r} is unknown: choose 'hold' or 'lease'")
        if mode == "hold" and outbox.tables.dialect == "sqlite":
            raise ConfigurationError("mode = 'hold' would block all other writers of the SQLite file: use 'lease'")
        self.outbox = outbox
        self.routes = read_routes(outbox, to)
        self.batch = check_positive("batch", batch)
        self.mode = mode
        self.lease = duration(lease)
        self.attempts = check_positive("attempts", attempts)
        self.backoff = backoff
        self.strict = strict
        if keep is not None:
            outbox.keep = duration(keep)
        # Returns the broker for a type, or None if no pattern matches.
        self.broker_for = functools.lru_cache(MOST_TYPES)(self._find_broker)
        self._running: RelayRun | None = None
        self._check_windows()

    def _check_windows(self) -> None:
        """Warn if a repeated message may reach a broker that has forgotten its id."""
        span = sum(self.backoff.step(retry) for retry in range(1, self.attempts))
        for _, broker in self.routes:
            if broker.window is not None and span > broker.window:
                log.warning(
                    "The relay may repeat a message for %.0f s, but %s recognises a repeated id for %.0f s only: consumers "
                    "may get it twice.  Use an inbox in each consumer, or lower attempts= or backoff=",
                    span,
                    broker.url,
                    broker.window,
                )

    def run_once(self) -> int:
        """Send the messages that are due now, and return how many the brokers have stored."""
        return run_service(self.arun_once, close=self.outbox.tables.access.aclose)

    async def arun_once(self) -> int:
        """The awaited form of `run_once`."""
        return await RelayRun(self).drain()

    def run(self) -> None:
        """Send messages until SIGTERM or SIGINT, and finish the batch that is under way."""
        run_service(self.arun, stop=self.stop, close=self.outbox.tables.access.aclose)

    async def arun(self) -> None:
        """Send messages until `stop` is called or the task is cancelled, and finish the batch that is under way."""
        self._running = RelayRun(self)
        try:
            await self._running.forever()
        finally:
            self._running = None

    def stop(self) -> None:
        """Make `run` or `arun` return after the batch that is under way.  May be called on any thread."""
        running = self._running
        if running is not None:
            running.stop()

    def _find_broker(self, type: str) -> Broker | None:
        return next((broker for pattern, broker in self.routes if matches(pattern, type)), None)


def read_routes(outbox: Outbox, to: Target | Mapping[str, Target]) -> list[tuple[str, Broker]]:
    """Return each pattern of types with its broker.  Equal URLs share one broker."""
    targets = to if isinstance(to, Mapping) else {"*": to}
    if not targets:
        raise ConfigurationError("to = {} names no broker: pass a URL, or a mapping from types to URLs")
    known: dict[Any, Broker] = {}
    for target in targets.values():
        if isinstance(target, str) and target not in known:
            known[target] = connect(target, channel=outbox.source)
    return [
        (pattern, known[target] if isinstance(target, str) else connect(target)) for pattern, target in targets.items()
    ]


class RelayRun:
    """One run of a relay, on one event loop."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.outbox = relay.outbox
        self.tables = relay.outbox.tables
        self.brokers = list({id(broker): broker for _, broker in relay.routes}.values())
        self.loop = asyncio.get_running_loop()
        self.stopping = False
        # When to do these things next, on the monotonic clock.
        self.failed_due = self.purge_due = self.look_at_all = 0.0
        self.look_for_waiting = SYSTEM.monotonic() + LOOK_FOR_WAITING
        self.since = 0.0  # see `_since`
        self.avoided: dict[str, float] = {}  # types to leave out because their broker is down, and until when
        self._wake: Any = None

    def stop(self) -> None:
        self.stopping = True
        if self._wake is not None:
            self._wake()

    # Rounds

    async def drain(self) -> int:
        """Send all messages that are due, and return how many were sent.

        Raises BrokerError if the only broker is down, or if nothing was sent because one of several is down.
        """
        total, down = 0, None
        try:
            await self._open()
            while True:
                try:
                    sent, found = await self._round()
                except BrokerDown as error:
                    if len(self.brokers) == 1:
                        raise
                    down = error  # the next rounds leave out its types
                    continue
                total += sent
                if not found:
                    if self.since:
                        self.since = 0.0  # the last round must look at all rows
                    elif down is not None and not total:
                        raise down
                    else:
                        return total
        finally:
            await self._close()

    async def forever(self) -> None:
        wakeups, poll, failures = self.outbox.guard.store.wakeups, SHORTEST_POLL, 0
        self.tables.access.listen()
        with wakeups.waiting(self.outbox.wakeup_id) as waiter:
            self._wake = waiter.notify
            try:
                while not self.stopping:
                    try:
                        await self._open()
                        _, found = await self._whole(self._round())
                        failures = 0
                    except ConfigurationError:  # trying again does not help
                        raise
                    except OncemoreError as error:
                        failures += 1
                        log.warning("The relay of %r cannot send, and will try again: %s", self.outbox.source, error)
                        await self._pause(waiter.wait(DOWN.delay(failures, random.random())))
                        continue
                    if found:
                        poll = SHORTEST_POLL
                        continue
                    started = SYSTEM.monotonic()
                    await self._pause(waiter.wait(poll))
                    woken = SYSTEM.monotonic() - started < 0.9 * poll
                    poll = SHORTEST_POLL if woken else min(2 * poll, LONGEST_POLL)
            finally:
                self._wake = None
                await self._close()

    async def _pause(self, wait: Wait) -> None:
        if not self.stopping:
            await wait.arun()

    async def _whole(self, work: Any) -> Any:
        """Await *work* to its end, even if this task is cancelled."""
        return await to_the_end(asyncio.ensure_future(work))

    async def _open(self) -> None:
        """Connect to the broker if there is only one.  Of several, each is opened when needed: one may be down."""
        if len(self.brokers) == 1:
            await self.brokers[0].aopen()

    async def _close(self) -> None:
        for broker in self.brokers:
            with suppress(Exception):
                await broker.aclose()

    async def _round(self) -> tuple[int, int]:
        """Send one batch, and one of failed rows if it is time.  Return how many were stored, and how many found."""
        await self._keep_house()
        if self.tables.dialect == "sqlite":
            return await self._send_leased_on_sqlite()
        if self._uses_leases():
            return await self._send_leased(sql.ALL)
        sent, found = await self._send_held()
        now = SYSTEM.monotonic()
        if now >= self.failed_due:
            more, others = await self._send_leased(sql.FAILED)
            sent, found = sent + more, found + others
            self.failed_due = 0.0 if others else now + FAILED_POLL
        return sent, found

    def _uses_leases(self) -> bool:
        return self.relay.mode == "lease" or (self.relay.mode is None and self.tables.access.pooled)

    async def _keep_house(self) -> None:
        """If it is time, delete messages that were kept long enough, and warn if messages wait for a transaction."""
        now = SYSTEM.monotonic()
        if self.outbox.keep is not None and now >= self.purge_due:
            self.purge_due = now + PURGE_EVERY
            await self.outbox.apurge()
        if self.tables.dialect != "postgres" or now < self.look_for_waiting:
            return
        query = self.tables.query(sql.WAITING, self.outbox.source, LONG_WAIT)
        [[(waiting,)]] = await arun(self.tables.execute(query, patient=True))
        self.look_for_waiting = now + (WARN_WAITING if waiting else LOOK_FOR_WAITING)
        if waiting:
            log.warning(
                "%d messages of %r have waited for %g s or more, because an older transaction is still open and may add a "
                "message that comes before them: find and end the transaction (pg_stat_activity)",
                waiting,
                self.outbox.source,
                LONG_WAIT,
            )

    # Claims

    async def _send_held(self) -> tuple[int, int]:
        """Lock rows, send them and delete them in one transaction."""
        transaction = await arun(self.tables.open())
        try:
            rows = await self._claim(transaction, sql.NEW)
            if not rows:
                return 0, 0
            ends = await self._send(rows, None)
            await arun(transaction.commit(*ends.queries))
        except BaseException:
            await self._roll_back(transaction)
            raise
        return self._tell(ends)

    async def _send_leased(self, which: str) -> tuple[int, int]:
        """Lease rows, send them, and delete them."""
        token, transaction = new_token(), await arun(self.tables.open())
        try:
            rows = await self._claim(transaction, which)
            if not rows:
                return 0, 0
            seqs = as_json([row.seq for row in rows])
            await arun(transaction.commit(self.tables.query(sql.LEASE, seqs, token, self.relay.lease)))
        except BaseException:
            await self._roll_back(transaction)
            raise
        return await self._end_leased(rows, token)

    async def _send_leased_on_sqlite(self) -> tuple[int, int]:
        relay, token = self.relay, new_token()
        values = (self.outbox.source, relay.batch, token, relay.strict, relay.lease, self._avoided())
        _, found = await arun(
            self.tables.execute(
                self.tables.query(sql.CLAIM_SQLITE, *values), self.tables.query(sql.LEASED, self.outbox.source, token)
            )
        )
        if not found:
            return 0, 0
        return await self._end_leased([self._row(row) for row in found], token)

    async def _end_leased(self, rows: list[Row], token: str) -> tuple[int, int]:
        suspect = next((row for row in rows if row.attempts >= self.relay.attempts), None)
        if suspect is not None and len(rows) > 1:
            # Relays have died too often while they sent it.  Send it alone, so that one more death counts for it only.
            others = as_json([row.seq for row in rows if row is not suspect])
            await arun(self.tables.execute(self.tables.query(sql.GIVE_BACK, others, token)))
            rows = [suspect]
        try:
            ends = await self._send(rows, token)
        except BaseException:
            give_back = self.tables.query(sql.GIVE_BACK, as_json([row.seq for row in rows]), token)
            with suppress(OncemoreError):  # if this fails, the rows are free when the lease ends
                await arun(self.tables.execute(give_back))
            raise
        await arun(self.tables.execute(*ends.queries))
        return self._tell(ends)

    async def _roll_back(self, transaction: TransactionAdapter) -> None:
        try:
            await arun(transaction.rollback())
        except BaseException:
            transaction.discard()
            raise

    async def _claim(self, transaction: TransactionAdapter, which: str) -> list[Row]:
        """Begin the transaction and lock a batch of rows that may be sent.  Roll back if there are none.

        If all rows found come after rows that another relay has locked, try again without their subjects.
        """
        others: set[str] = set()
        since = 0.0 if which == sql.FAILED else self._since()
        for _ in range(MOST_ROUNDS):
            values = [self.outbox.source, self.relay.batch, as_json(sorted(others)), self.relay.strict, since]
            statement = sql.CLAIM[which]
            if (avoided := self._avoided()) != "[]":
                statement = sql.CLAIM_EXCEPT_TYPES[which]
                values.append(avoided)
            rows = await arun(transaction.begin(self.tables.query(statement, *values)))
            blockers = {row[3]: row[0] for row in rows if row[-1]}
            eligible = [row for row in rows if not row[-1] and row[0] < blockers.get(row[3], row[0] + 1)]
            if eligible:
                if which != sql.FAILED:
                    full = len(rows) >= self.relay.batch
                    due = [row[8] for row in eligible]
                    self.since = min(due) - ROUNDING if full else max(due) - LATE
                eligible.sort(key=itemgetter(0))
                return [self._row(row) for row in eligible]
            await arun(transaction.rollback())
            if not blockers:
                break
            others |= blockers.keys()
        return []

    def _since(self) -> float:
        """Return the due time at which a claim starts: earlier rows were claimed a moment ago, or are deleted.

        Once a second, return 0.0: an earlier row may have been committed late, or given back by another relay.
        """
        now = SYSTEM.monotonic()
        if now >= self.look_at_all:
            self.look_at_all, self.since = now + LOOK_AT_ALL, 0.0
        return self.since

    def _avoided(self) -> str:
        """Return the types to leave out, as a JSON array, so that messages for a broker that is down fill no batch."""
        now = SYSTEM.monotonic()
        self.avoided = {type: until for type, until in self.avoided.items() if until > now}
        return as_json(sorted(self.avoided))

    def _row(self, row: Sequence[Any]) -> Row:
        seq, id, type, subject, attributes, data, attempts, replays, *_ = row
        envelope = read_envelope(id, self.outbox.source, type, subject, attributes, data)
        envelope.replays = replays
        return Row(seq, envelope, attempts)

    # Sending

    async def _send(self, rows: list[Row], token: str | None) -> Ends:
        """Send the rows, each subject's one after the other, and decide about each row."""
        ends = Ends(self, token)
        ends.found = len(rows)
        latest = SYSTEM.monotonic() + self.relay.lease / 2
        for row in rows:
            if row.attempts > self.relay.attempts:  # the last time, it was sent alone
                ends.bury(row, f"After {row.attempts} attempts: relays have died while they sent it")
        for wave in waves([row for row in rows if row.seq not in ends.decided]):
            if token is not None and SYSTEM.monotonic() > latest and ends.decided:
                break  # the lease may end before the next wave does
            wave = [row for row in wave if row.envelope.subject is None or row.envelope.subject not in ends.stuck]
            await self._send_wave(wave, ends)
            if ends.down is not None:
                break
        ends.give_back([row for row in rows if row.seq not in ends.decided])
        return ends

    async def _send_wave(self, wave: list[Row], ends: Ends) -> None:
        by_broker: dict[int, tuple[Broker, list[Row]]] = {id(broker): (broker, []) for broker in self.brokers}
        for row in wave:
            broker = self.relay.broker_for(row.envelope.type)
            if broker is None:
                ends.bury(row, f"No broker is for messages of type {row.envelope.type!r}: see the relay's to=")
            else:
                by_broker[id(broker)][1].append(row)
        sending = [self._publish(broker, rows) for broker, rows in by_broker.values() if rows]
        started = SYSTEM.monotonic()
        for results in await asyncio.gather(*sending):
            for row, error in results:
                if error is None:
                    ends.succeed(row)
                elif isinstance(error, BrokerDown):
                    ends.down = error
                    if len(self.brokers) > 1:
                        now = SYSTEM.monotonic()
                        self.avoided[row.envelope.type] = now + max(AVOIDED, 5 * (now - started))
                else:
                    ends.fail(row, error)

    async def _publish(self, broker: Broker, rows: list[Row]) -> list[tuple[Row, Exception | None]]:
        """Send rows of different subjects, and return the result of each.

        One message can make others fail: a broker may close the connection because a message is too large.  So rows
        that failed together are sent again, in two halves, until each error belongs to one row.
        """
        results = await self._try(broker, rows)
        lost = [row for row, error in zip(rows, results, strict=True) if isinstance(error, BrokerError)]
        if len(lost) == len(rows) and (down := await self._reconnect(broker)):
            return [(row, down) for row in rows]
        ended = [(row, error) for row, error in zip(rows, results, strict=True) if not isinstance(error, BrokerError)]
        if len(lost) < 2 or any(isinstance(error, BrokerDown) for error in results):
            return list(zip(rows, results, strict=True))
        for half in (lost[: len(lost) // 2], lost[len(lost) // 2 :]):
            ended += await self._publish(broker, half)
        return ended

    async def _try(self, broker: Broker, rows: list[Row]) -> Sequence[Exception | None]:
        try:
            envelopes = [row.envelope for row in rows]
            await broker.aopen()
            with send_span(broker.channel, envelopes):
                results = await broker.publish(envelopes)
        except BrokerError as error:  # it cannot be reached
            return [error] * len(rows)
        except Exception as error:  # from a Broker of the user's; one message may be at fault
            return [BrokerError(describe(error))] * len(rows)
        if len(results) != len(rows):
            raise ConfigurationError(
                f"{broker.url}: publish returned {len(results)} results for {len(rows)} messages: return one for each"
            )
        return results

    async def _reconnect(self, broker: Broker) -> BrokerDown | None:
        """Connect again after all messages have failed.  Return BrokerDown if that fails: no message is at fault."""
        try:
            await broker.aclose()
            await broker.aopen()
        except Exception as error:
            return BrokerDown(describe(error))
        return None

    def _tell(self, ends: Ends) -> tuple[int, int]:
        """Log and emit the end of each row.  Return how many rows were sent, and how many were found."""
        for row in ends.sent:
            log.debug("Sent %s", row)
            self._emit("published", row)
        for row, error, delay in ends.failed:
            log.warning("The message %s could not be sent; trying again in %.1f s: %s", row, delay, error)
            self._emit("unpublished", row, error)
        for row, error in ends.dead:
            log.error("The message %s is a dead letter: %s; outbox.requeue() sends it again", row, error)
            self._emit("dead", row, error)
        if ends.down is not None:
            if not ends.sent:
                raise ends.down
            log.warning("The relay of %r cannot send some messages for now: %s", self.outbox.source, ends.down)
        return len(ends.sent), ends.found

    def _emit(self, kind: EventKind, row: Row, detail: str = "") -> None:
        if self.outbox.guard.observers:
            scope, name = f"outbox|{self.outbox.source}", f"outbox.{row.envelope.type}"
            operation = Operation(scope, row.envelope.id, name=name)
            self.outbox.guard.emit(kind, operation, attempt=row.attempts + 1, detail=detail)


class Ends:
    """The decisions about the rows of a batch, and the statements that write them."""

    def __init__(self, run: RelayRun, token: str | None) -> None:
        self.run = run
        self.token = token
        self.found = 0
        self.sent: list[Row] = []
        self.failed: list[tuple[Row, str, float]] = []
        self.dead: list[tuple[Row, str]] = []
        self.decided: set[int] = set()
        self.stuck: set[str] = set()  # subjects with later rows that must wait
        self.down: BrokerDown | None = None
        self._queries: list[Any] = []

    def succeed(self, row: Row) -> None:
        self.decided.add(row.seq)
        self.sent.append(row)

    def fail(self, row: Row, error: Exception) -> None:
        relay, attempts = self.run.relay, row.attempts + 1
        if attempts >= relay.attempts:
            self.bury(row, describe(error))
            return
        self.decided.add(row.seq)
        if row.envelope.subject is not None:
            self.stuck.add(row.envelope.subject)
        delay = relay.backoff.delay(attempts, random.random())
        self.failed.append((row, describe(error), delay))
        values = (as_json([row.seq]), self.token, attempts, delay, describe(error))
        self._queries.append(self.run.tables.query(sql.FAIL, *values))
        self.run.failed_due = 0.0

    def bury(self, row: Row, error: str) -> None:
        self.decided.add(row.seq)
        self.dead.append((row, error))
        if self.run.relay.strict and row.envelope.subject is not None:
            self.stuck.add(row.envelope.subject)
        values = (as_json([row.seq]), self.token, row.attempts + 1, error[:LONGEST_ERROR])
        self._queries.append(self.run.tables.query(sql.BURY, *values))

    def give_back(self, rows: list[Row]) -> None:
        if rows and self.token is not None:
            query = self.run.tables.query(sql.GIVE_BACK, as_json([row.seq for row in rows]), self.token)
            self._queries.append(query)

    @property
    def queries(self) -> list[Any]:
        if not self.sent:
            return self._queries
        statement = sql.DELETE if self.run.outbox.keep is None else sql.MARK_SENT
        seqs = as_json([row.seq for row in self.sent])
        return [self.run.tables.query(statement, seqs, self.token), *self._queries]


def waves(rows: list[Row]) -> list[list[Row]]:
    """Divide the rows into groups to send one after the other.  No group has two rows with the same subject."""
    counts: dict[str, int] = {}
    groups: list[list[Row]] = [[]]
    for row in rows:
        subject = row.envelope.subject
        number = 0
        if subject is not None:
            number = counts[subject] = counts.get(subject, -1) + 1
            if number == len(groups):
                groups.append([])
        groups[number].append(row)
    return groups


def as_json(values: Sequence[int] | Sequence[str]) -> str:
    return msgspec.json.encode(values).decode()


def describe(error: Exception) -> str:
    detail = error.detail if isinstance(error, OncemoreError) else str(error)
    return storable(f"{type(error).__name__}: {detail}"[:LONGEST_ERROR])


def new_token() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
