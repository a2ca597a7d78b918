"""The consumer: takes messages from a broker, has each handled once by the inbox, and acknowledges it after the commit."""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import inspect
import logging
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakSet

from .._fingerprint.fingerprint import parse_fields, select
from .._ledger.model import Operation
from .._ledger.transaction_attempt import NO_LENDER
from .._runtime.backoff import Backoff
from .._runtime.plan import Plan, arun, run
from .._runtime.service import run_service
from ..errors import BrokerError, ConfigurationError, InProgress, OncemoreError, StoreError
from .broker import PREFETCH, Broker, Delivery, Subscription, connect
from .envelope import Envelope, structured
from .inbox import EventHandler, Inbox, OnDead, Received, handler_for, tell_dead
from .tracing import process_span

log = logging.getLogger("oncemore.messages")

T = TypeVar("T")
Unknown = Literal["ignore", "dead"]

CONCURRENCY = 8
GRACE = 30.0  # seconds that running handlers have when the consumer stops
POLL = 1.0  # seconds of one wait for messages
AFTERWARDS = 0.1  # the same, in one round, after its first messages
MEETINGS = 10  # looks at a message that is in progress elsewhere, in one round
REQUEUED = 5.0  # seconds between two looks for requeued dead letters
# Between the attempts of one message, between looks at one that is in progress elsewhere, and before connecting again.
ATTEMPTS = Backoff(base=0.5, cap=30.0, jitter="equal")
BUSY = Backoff(base=0.02, cap=5.0, jitter="equal")
RECONNECT = Backoff(base=0.1, cap=5.0, jitter="equal")


class Consumer:
    """Handles the messages of a channel, each once.

    The handler's statements on `op.connection`, its messages in an outbox, and the inbox's record commit together; then the
    message is acknowledged.  A handler that is `async def` runs on the event loop, any other on a thread.

    A message whose handler fails is tried again, later each time, until it has failed `inbox.attempts` times: then it is a
    dead letter.  Messages of the same source and subject are handled in their order, also while one of them fails; all
    others go on.  With several processes, only a broker that gives a subject to one consumer at a time keeps that order:
    Kafka and SQS FIFO.

    Args:
        inbox: Remembers what was handled.
        broker: The URL of a channel, or a Broker.
        handlers: A function `(op, envelope)` for each type; `*` in a type matches any characters, and the first match wins.
        concurrency: How many handlers may run at the same time.
        prefetch: How many messages may wait in this process, those that are handled included.
        unknown: If no handler matches a message's type, "ignore" acknowledges it, and "dead" makes it a dead letter.
        ignore: Members of the data, or JSON pointers into it, that may differ when a message comes again.
        on_dead: Is called, or awaited, with the envelope (None if it was malformed) and the reason when a message is given up.
        grace: How long running handlers have when the consumer stops.
    """

    def __init__(
        self,
        inbox: Inbox,
        broker: str | Broker,
        handlers: Mapping[str, EventHandler],
        *,
        concurrency: int = CONCURRENCY,
        prefetch: int = PREFETCH,
        unknown: Unknown = "ignore",
        ignore: Sequence[str] = (),
        on_dead: OnDead | None = None,
        grace: float = GRACE,
    ) -> None:
        if not isinstance(inbox, Inbox):
            raise ConfigurationError(f"inbox is {inbox!r}: make one, as in Consumer(Inbox(guard), url, handlers)")
        if not isinstance(handlers, Mapping) or not handlers:
            raise ConfigurationError("handlers must have a function for each type, as in {'refund.succeeded': book}")
        if unknown not in get_args(Unknown):
            raise ConfigurationError(f"unknown = {unknown!r}: choose one of {', '.join(map(repr, get_args(Unknown)))}")
        if concurrency < 1 or prefetch < concurrency:
            raise ConfigurationError(
                f"concurrency = {concurrency}, prefetch = {prefetch}: at least one handler runs, and as many messages wait"
            )
        if inbox.policy.effect == "transaction" and inbox.guard.store.lender is None:
            raise ConfigurationError(NO_LENDER.format(url=inbox.guard.store.url))
        self.inbox = inbox
        self.broker = connect(broker)
        self.handlers = dict(handlers)
        self.concurrency = concurrency
        self.prefetch = prefetch
        self.unknown = unknown
        self.ignore = parse_fields("ignore", list(ignore))
        self.on_dead = on_dead
        self.grace = grace
        # A message that another consumer handles at this moment is looked at later, instead of waiting for it.
        self.policy = inbox.policy.but(in_flight="conflict")
        self._running: ConsumerRun | None = None

    @property
    def group(self) -> str:
        """The name of the group: the URL's, or the inbox's."""
        return self.broker.group or self.inbox.name

    def run(self) -> None:
        """Handle messages until SIGTERM or SIGINT; running handlers are then finished."""
        run_service(self.arun, stop=self.stop)

    async def arun(self) -> None:
        """Handle messages until `stop` is called or the task is cancelled; running handlers are then finished.

        A lost connection is opened again.
        """
        self._running = ConsumerRun(self, once=False)
        try:
            await self._running.forever()
        finally:
            self._running = None

    def run_once(self, wait: float = POLL) -> int:
        """Handle the messages that are there, each at most once; how many were acknowledged.

        A message whose handler fails goes back to the broker, and those behind it go on: only `run` keeps them waiting.
        *wait* is how long to wait for the first message, in seconds.
        """
        return run_service(functools.partial(self.arun_once, wait))

    async def arun_once(self, wait: float = POLL) -> int:
        """Do what `run_once` does, on an event loop."""
        return await ConsumerRun(self, once=True).round(wait)

    def stop(self) -> None:
        """Take no more messages; `run` or `arun` returns when the running handlers have finished.

        May be called on any thread.
        """
        running = self._running
        if running is not None:
            running.loop.call_soon_threadsafe(running.stopping.set)

    # One message

    def operation(self, envelope: Envelope) -> Operation:
        """The operation that handles the envelope.  A repetition must have the same type, subject and data."""
        data = envelope.data
        if self.ignore and isinstance(data, dict | list):
            data = select(copy.deepcopy(data), (), self.ignore)
        return self.inbox.operation(envelope.id, envelope.source, [envelope.type, envelope.subject, data])

    def plan(self, delivery: Delivery, on_dead: OnDead | None) -> tuple[Plan[Received | None], bool]:
        """The plan for a delivery, and whether it must be awaited."""
        envelope = delivery.envelope
        if envelope is None:
            return self._bury_malformed(delivery, delivery.problem, on_dead), False
        try:
            operation, kept = self.operation(envelope), structured(envelope)
        except Exception as error:  # whatever it is, the next attempt would meet it again
            return self._bury_malformed(delivery, f"{type(error).__name__}: {error}", on_dead), False
        try:
            handler = handler_for(self.handlers, envelope)
        except LookupError as error:
            return self._unknown(operation, envelope, str(error), on_dead), False
        received = self.inbox.received(
            operation,
            envelope,
            handler,
            delivery.count,
            kept=kept,
            policy=self.policy,
            on_dead=on_dead,
        )
        return received, is_async(handler)

    def _bury_malformed(self, delivery: Delivery, why: str, on_dead: OnDead | None) -> Plan[Received]:
        """Make an unreadable message a dead letter of the channel, under the digest of its bytes."""
        raw = delivery.raw
        if not raw and delivery.envelope is not None:
            raw = repr(delivery.envelope).encode(errors="replace")
        source = self.broker.channel
        key = f"malformed-{hashlib.sha256(raw).hexdigest()[:32]}"
        operation = Operation(self.inbox.scope(source), key, name=f"inbox.{source}")
        if (yield from self.inbox.bury(operation, raw, f"malformed: {why}")):
            log.error("A message of %s is malformed, and a dead letter now: %s", self.broker.url, why)
            yield from tell_dead(on_dead, None, why)
        self.inbox.guard.emit("received", operation, detail="malformed")
        return Received("dead")

    def _unknown(
        self, operation: Operation, envelope: Envelope, why: str, on_dead: OnDead | None
    ) -> Plan[Received | None]:
        if self.unknown == "ignore":
            log.debug("Ignored %s: %s", envelope.id, why)
            self.inbox.guard.emit("received", operation, detail="ignored")
            return None
        if (yield from self.inbox.bury(operation, structured(envelope), why)):
            log.error("The message %s of %s is a dead letter: %s", envelope.id, envelope.source, why)
            yield from tell_dead(on_dead, envelope, why)
        self.inbox.guard.emit("received", operation, detail="dead")
        return Received("dead")


class ConsumerRun:
    """One run of a consumer, on one event loop."""

    def __init__(self, consumer: Consumer, *, once: bool) -> None:
        self.consumer = consumer
        self.once = once
        self.loop = asyncio.get_running_loop()
        self.on_dead = None if consumer.on_dead is None else on_any_thread(consumer.on_dead, self.loop)
        self.stopping = asyncio.Event()
        self.free = asyncio.Semaphore(consumer.concurrency)
        self.threads = ThreadPoolExecutor(consumer.concurrency, "oncemore-consumer")
        self.tasks: dict[asyncio.Task[None], Delivery] = {}
        self.busy: set[asyncio.Task[None]] = set()  # of these, the ones whose handler runs
        self.last: dict[tuple[str, str], asyncio.Task[None]] = {}  # by source and subject
        self.unfinished: list[Delivery] = []  # given back when the subscription takes no more
        self.background: list[asyncio.Task[None]] = []  # the search for requeued letters, which it also handles
        self.met: WeakSet[Delivery] = WeakSet()  # those whose message was in progress elsewhere
        self.left: set[str] = set()  # requeued letters for which there is no handler here
        self.acknowledged = 0

    async def forever(self) -> None:
        """Subscribe, again after each loss of the connection, until the consumer is stopped."""
        self.background.append(asyncio.create_task(self._look_for_requeued()))
        failures = 0
        try:
            while not self.stopping.is_set():
                subscription = self.subscribe()
                try:
                    async with self._open(subscription):
                        failures = 0
                        await self._take_all(subscription)
                except BrokerError as error:
                    log.warning("%s; connecting again", error.detail)
                    failures += 1
                    await self._pause(RECONNECT.delay(failures, random.random()))
        finally:
            self.stopping.set()
            await self._finish()  # after a lost connection, handlers of its messages may still run
            await self._close()

    async def round(self, wait: float) -> int:
        """Take the messages that are there, and wait until they are handled."""
        subscription = self.subscribe()
        try:
            async with self._open(subscription):
                await self._handle_requeued()
                while (found := await subscription.receive(max(1, self.room), wait)) or self.tasks:
                    for delivery in found:
                        self._begin(delivery)
                    if self.tasks and (not found or self.room <= 0):
                        await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
                    wait = min(wait, AFTERWARDS)
        finally:
            await self._close()
        return self.acknowledged

    def subscribe(self) -> Subscription:
        return self.consumer.broker.subscribe(self.consumer.group, prefetch=self.consumer.prefetch)

    @property
    def room(self) -> int:
        """How many more messages this process may take."""
        return self.consumer.prefetch - len(self.tasks)

    @asynccontextmanager
    async def _open(self, subscription: Subscription) -> AsyncIterator[None]:
        """Open the subscription, and close it at the end; meanwhile, extend the visibility of its deliveries."""
        try:
            await subscription.aopen()
            self._check_visibility(subscription.visibility)
        except BaseException:
            await subscription.aclose()
            raise
        extending = asyncio.create_task(self._extend(subscription.visibility))
        lost = False
        try:
            yield
        except BrokerError:
            lost = not self.once and not self.stopping.is_set()
            raise
        finally:
            if lost:  # these come again on the next connection
                await cancelled(self.tasks.keys() - self.busy)
            else:  # stopped, or cancelled
                self.stopping.set()
                with suppress(BrokerError):
                    await subscription.stop()
                await self._finish()
            await cancelled([extending])
            await subscription.aclose()

    def _check_visibility(self, visibility: float | None) -> None:
        lease = self.consumer.policy.lease
        if visibility is not None and visibility < lease:
            raise ConfigurationError(
                f"{self.consumer.broker.url} delivers a message again after {visibility:g} s, but a lease lasts {lease:g} s: "
                "a redelivery would meet the lease of a consumer that has crashed, and use up its count.  Make the broker's "
                f"visibility time-out longer, or the lease shorter: Inbox(guard, lease={visibility:g})"
            )

    async def _close(self) -> None:
        await self.consumer.broker.aclose()
        self.threads.shutdown(wait=False)

    async def _take_all(self, subscription: Subscription) -> None:
        """Take messages while there is room for them, until the consumer is stopped."""
        stopping = asyncio.create_task(self.stopping.wait())
        receiving: asyncio.Task[Sequence[Delivery]] | None = None
        try:
            while not self.stopping.is_set():
                if self.room <= 0:
                    await asyncio.wait([stopping, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
                    continue
                receiving = asyncio.ensure_future(subscription.receive(self.room, POLL))
                await asyncio.wait([stopping, receiving], return_when=asyncio.FIRST_COMPLETED)
                for delivery in await receiving:  # also if it is stopped: `_finish` gives them back
                    self._begin(delivery)
        finally:
            await cancelled([stopping] if receiving is None else [stopping, receiving])

    def _begin(self, delivery: Delivery) -> None:
        """Handle the delivery in a task, after the one before it with the same subject."""
        place = place_of(delivery)
        task = asyncio.create_task(self._deliver(delivery, None if place is None else self.last.get(place)))
        self.tasks[task] = delivery
        if place is not None:
            self.last[place] = task

        def end(task: asyncio.Task[None]) -> None:
            self.tasks.pop(task, None)
            self.busy.discard(task)
            if place is not None and self.last.get(place) is task:
                del self.last[place]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("A delivery could not be handled", exc_info=error)

        task.add_done_callback(end)

    async def _finish(self) -> None:
        """Give back deliveries that have not begun, and let the running handlers finish."""
        waiting = {task: delivery for task, delivery in self.tasks.items() if task not in self.busy}
        await cancelled(waiting)
        left = dict(self.tasks)
        if running := [*left, *self.background]:
            await asyncio.wait(running, timeout=self.consumer.grace)
        late = {task: delivery for task, delivery in left.items() if not task.done()}
        await cancelled([*late, *self.background])
        for delivery in (*waiting.values(), *late.values(), *self.unfinished):
            with suppress(BrokerError):
                await delivery.nack()
        self.unfinished.clear()

    # One delivery

    async def _deliver(self, delivery: Delivery, before: asyncio.Task[None] | None) -> None:
        """Try until it is handled or given up; then acknowledge it."""
        if before is not None:
            await asyncio.wait([before])
        task = asyncio.current_task()
        assert task is not None
        attempt = 0
        while True:
            async with self.free:
                self.busy.add(task)
                again = 0.0 if self.stopping.is_set() else await self._attempt(delivery, attempt)
                if again is not None and self.stopping.is_set():
                    self.unfinished.append(delivery)
                    return
                if again is None or self._returns(delivery, attempt):
                    await self._answer(delivery, again)
                    return
                self.busy.discard(task)
            await asyncio.sleep(again)
            attempt += 1

    def _returns(self, delivery: Delivery, attempt: int) -> bool:
        """Whether a delivery waits for its next attempt at the broker, rather than in this process.

        One with a subject waits here, because those behind it must not overtake it.  The others do unless there are many:
        the broker would count each return as a delivery, and the inbox gives up a message that was delivered too often.
        """
        if self.once:
            return delivery not in self.met or attempt >= MEETINGS
        return place_of(delivery) is None and len(self.tasks) > self.consumer.prefetch // 2

    async def _answer(self, delivery: Delivery, again: float | None) -> None:
        try:
            if again is None:
                await delivery.ack()
                self.acknowledged += 1
            else:
                await delivery.nack(again)
        except BrokerError as error:  # it is delivered again, and the inbox knows it
            log.warning("A delivery was not answered: %s", error.detail)

    async def _attempt(self, delivery: Delivery, attempt: int) -> float | None:
        """Have it handled; None if that is done, otherwise the seconds after which to try again."""
        envelope = delivery.envelope
        name, extra = "a malformed message", {}
        if envelope is not None:
            correlation = envelope.correlationid
            name = f"{envelope.type} {envelope.id} of {envelope.source} (correlation {correlation})"
            extra = {"correlationid": correlation}
        pause = ATTEMPTS.delay(attempt + delivery.count, random.random())
        try:
            received = await self._process(delivery)
        except InProgress as error:  # another delivery of it is being handled
            self.met.add(delivery)
            return min(error.retry_after or 1.0, BUSY.delay(attempt + 1, random.random()))
        except StoreError as error:
            log.warning("The ledger failed, so %s waits: %s", name, error.detail, extra=extra)
            return pause
        except Exception as error:
            log.warning("The handler failed on %s, again in %.1f s: %r", name, pause, error, extra=extra)
            return pause
        log.debug("%s: %s", name, "ignored" if received is None else received.how, extra=extra)
        return None

    async def _process(self, delivery: Delivery) -> Received | None:
        """Run the plan of a delivery, in a span of its own."""
        consumer, in_progress = self.consumer, None
        with process_span(consumer.broker.channel, consumer.group, delivery.envelope, delivery.count) as outcome:
            try:
                received = await self._drive(*consumer.plan(delivery, self.on_dead))
                outcome("ignored" if received is None else received.how)
                return received
            except InProgress as error:  # no error of this span
                outcome("in progress")
                in_progress = error
        raise in_progress

    async def _drive(self, plan: Plan[T], awaited: bool) -> T:
        """Run the plan: on this loop if its handler is awaited, otherwise on a thread."""
        if awaited:
            return await arun(plan)
        return await self.loop.run_in_executor(self.threads, copy_context().run, run, plan)

    # In the background

    async def _extend(self, visibility: float | None) -> None:
        """Extend the visibility of all deliveries in this process, so that the broker does not repeat them."""
        while visibility is not None:
            await asyncio.sleep(visibility / 3)
            for delivery in tuple(self.tasks.values()):
                try:
                    await delivery.extend()
                except BrokerError as error:
                    log.warning("A delivery was not extended: %s", error.detail)

    async def _look_for_requeued(self) -> None:
        while not self.stopping.is_set():
            try:
                await self._handle_requeued()
            except StoreError as error:
                log.warning("Requeued dead letters were not looked for: %s", error.detail)
            except Exception:  # or nobody would look for them again
                log.exception("Requeued dead letters could not be handled; looking again in %g s", REQUEUED)
            await self._pause(REQUEUED)

    async def _handle_requeued(self) -> None:
        inbox, handlers = self.consumer.inbox, self.consumer.handlers
        for marker, letter in await self._drive(inbox.requeued(), False):
            if self.stopping.is_set():
                return
            envelope, awaited = None, False
            try:
                envelope, handler = inbox.requeued_event(inbox.kept(letter), handlers)
                awaited = is_async(handler)
            except LookupError as error:  # another consumer of this inbox may have one
                if marker not in self.left:
                    log.warning("The requeued event %r of %s waits: there is %s", letter.key, letter.name, error)
                self.left.add(marker)
                continue
            except OncemoreError:  # `handle_dead` says so
                pass
            with process_span(self.consumer.broker.channel, self.consumer.group, envelope, 1) as outcome:
                done = await self._drive(inbox.handle_dead(marker, letter, handlers, self.on_dead), awaited)
                outcome("requeued" if done else "failed")

    async def _pause(self, seconds: float) -> None:
        """Wait, but not after the consumer was stopped."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)


def place_of(delivery: Delivery) -> tuple[str, str] | None:
    """The source and subject whose messages are handled one after the other; None if it has no subject."""
    envelope = delivery.envelope
    return None if envelope is None or envelope.subject is None else (envelope.source, envelope.subject)


def on_any_thread(function: OnDead, loop: asyncio.AbstractEventLoop) -> OnDead:
    """Let *function*, if it is async, be called on other threads, too: it is then awaited on *loop*."""

    def call(payload: Any, why: str) -> Any:
        result = function(payload, why)
        if inspect.iscoroutine(result) and asyncio._get_running_loop() is not loop:
            return asyncio.run_coroutine_threadsafe(result, loop).result()
        return result

    return call


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait for their end."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


def is_async(handler: EventHandler) -> bool:
    """Whether the handler must be awaited: a coroutine function, a partial of one, or an object with an async call."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
