"""The consumer: takes messages from a broker, has the inbox handle each once, and acknowledges it after the commit."""

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
from .inbox import EventHandler, Inbox, OnDead, Received, call_on_dead, handler_for
from .tracing import process_span

log = logging.getLogger("oncemore.messages")

T = TypeVar("T")
Unknown = Literal["ignore", "dead"]

CONCURRENCY = 8
GRACE = 30.0  # seconds that running handlers have to finish when the consumer stops
POLL = 1.0  # seconds of one wait for messages
LATER_POLL = 0.1  # seconds of one wait in `run_once`, after its first wait
MOST_LOOKS = 10  # attempts of `run_once` at a message that is in progress elsewhere
REQUEUED = 5.0  # seconds between two searches for requeued dead letters
# The pauses after a failed attempt, after an attempt at a message that is in progress elsewhere, and before connecting.
ATTEMPTS = Backoff(base=0.5, cap=30.0, jitter="equal")
BUSY = Backoff(base=0.02, cap=5.0, jitter="equal")
RECONNECT = Backoff(base=0.1, cap=5.0, jitter="equal")


class Consumer:
    """Handles the messages of a channel, each once.

    The handler's statements on `op.connection`, its messages in an outbox, and the inbox's record commit together; then
    the message is acknowledged.  An async handler runs on the event loop, any other on a thread.

    A message whose handler fails is tried again after growing pauses, and is a dead letter after `inbox.attempts`
    failures.  Messages of the same source and subject are handled in order.  If one fails, later ones wait; all others
    go on.  With several processes, the order is kept only by brokers that give a subject to one consumer at a time:
    Kafka and SQS FIFO.

    Args:
        inbox: The inbox that handles each message once.
        broker: The URL of a channel, or a Broker.
        handlers: A function `(op, envelope)` for each type; `*` in a type matches any characters; the first match wins.
        concurrency: How many handlers may run at the same time.
        prefetch: How many messages this process may have, including those that are being handled.
        unknown: If no handler matches a message's type, "ignore" acknowledges it, and "dead" makes it a dead letter.
        ignore: Members of the data, or JSON pointers into it, that may differ when a message comes again.
        on_dead: A function, sync or async, to call with the envelope (None if malformed) and reason of a dead letter.
        grace: How many seconds running handlers have to finish when the consumer stops.
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
            raise ConfigurationError(f"inbox is {inbox!r}: pass an Inbox, as in Consumer(Inbox(guard), url, handlers)")
        if not isinstance(handlers, Mapping) or not handlers:
            raise ConfigurationError("handlers must have a function for each type, as in {'refund.succeeded': book}")
        if unknown not in get_args(Unknown):
            raise ConfigurationError(f"unknown = {unknown!r}: choose one of {', '.join(map(repr, get_args(Unknown)))}")
        if concurrency < 1 or prefetch < concurrency:
            raise ConfigurationError(
                f"concurrency = {concurrency}, prefetch = {prefetch}: need 1 <= concurrency <= prefetch"
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
        # If another consumer is handling a message, do not wait for it, but try again later.
        self.policy = inbox.policy.but(in_flight="conflict")
        self._running: ConsumerRun | None = None

    @property
    def group(self) -> str:
        """The name of the group: from the broker's URL, otherwise from the inbox."""
        return self.broker.group or self.inbox.name

    def run(self) -> None:
        """Handle messages until SIGTERM or SIGINT, then let running handlers finish."""
        run_service(self.arun, stop=self.stop)

    async def arun(self) -> None:
        """Handle messages until `stop` is called or the task is cancelled, then let running handlers finish.

        After a lost connection, connect again.
        """
        self._running = ConsumerRun(self, once=False)
        try:
            await self._running.forever()
        finally:
            self._running = None

    def run_once(self, wait: float = POLL) -> int:
        """Handle the messages that are there, and return how many were acknowledged.

        A message whose handler fails goes back to the broker.  Later messages with its subject are handled; only `run`
        makes them wait.  *wait* is how long to wait for the first message, in seconds.
        """
        return run_service(functools.partial(self.arun_once, wait))

    async def arun_once(self, wait: float = POLL) -> int:
        """The awaited form of `run_once`."""
        return await ConsumerRun(self, once=True).round(wait)

    def stop(self) -> None:
        """Make `run` or `arun` return after the running handlers have finished.  May be called on any thread."""
        running = self._running
        if running is not None:
            running.loop.call_soon_threadsafe(running.stopping.set)

    # One message

    def operation(self, envelope: Envelope) -> Operation:
        """Return the operation that handles the envelope.  A repetition must have the same type, subject and data."""
        data = envelope.data
        if self.ignore and isinstance(data, dict | list):
            data = select(copy.deepcopy(data), (), self.ignore)
        return self.inbox.operation(envelope.id, envelope.source, [envelope.type, envelope.subject, data])

    def plan(self, delivery: Delivery, on_dead: OnDead | None) -> tuple[Plan[Received | None], bool]:
        """Return the plan that handles a delivery, and whether an event loop must drive it."""
        envelope = delivery.envelope
        if envelope is None:
            return self._bury_malformed(delivery, delivery.problem, on_dead), False
        try:
            operation, kept = self.operation(envelope), structured(envelope)
        except Exception as error:  # the next attempt would meet the same error
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
            log.error("A message of %s is malformed, so it is a dead letter: %s", self.broker.url, why)
            yield from call_on_dead(on_dead, None, why)
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
            yield from call_on_dead(on_dead, envelope, why)
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
        self.busy: set[asyncio.Task[None]] = set()  # tasks that are making an attempt
        self.last: dict[tuple[str, str], asyncio.Task[None]] = {}  # the latest task of each source and subject
        self.unfinished: list[Delivery] = []  # deliveries to give back after the subscription has stopped
        self.background: list[asyncio.Task[None]] = []  # finds and handles requeued letters
        self.in_progress: WeakSet[Delivery] = WeakSet()  # deliveries of messages that were in progress elsewhere
        self.without_handler: set[str] = set()  # markers of requeued letters that no handler here is for
        self.acknowledged = 0

    async def forever(self) -> None:
        """Handle messages until the consumer is stopped.  Subscribe again after each lost connection."""
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
                    log.warning("Connecting again: %s", error.detail)
                    failures += 1
                    await self._pause(RECONNECT.delay(failures, random.random()))
        finally:
            self.stopping.set()
            await self._finish()  # handlers may still run if the connection was lost
            await self._close()

    async def round(self, wait: float) -> int:
        """Take the messages that are there, and return after they are handled."""
        subscription = self.subscribe()
        try:
            async with self._open(subscription):
                await self._handle_requeued()
                while (found := await subscription.receive(max(1, self.room), wait)) or self.tasks:
                    for delivery in found:
                        self._begin(delivery)
                    if self.tasks and (not found or self.room <= 0):
                        await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
                    wait = min(wait, LATER_POLL)
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
        """Open the subscription for the block, extend the visibility of its deliveries meanwhile, and close it."""
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
            if lost:  # the broker delivers them again on the next connection
                await cancel_all(self.tasks.keys() - self.busy)
            else:  # stopped, or cancelled
                self.stopping.set()
                with suppress(BrokerError):
                    await subscription.stop()
                await self._finish()
            await cancel_all([extending])
            await subscription.aclose()

    def _check_visibility(self, visibility: float | None) -> None:
        lease = self.consumer.policy.lease
        if visibility is not None and visibility < lease:
            raise ConfigurationError(
                f"{self.consumer.broker.url} delivers a message again after {visibility:g} s, but a lease lasts {lease:g} s: "
                "after a crash, redeliveries would be refused until the lease ends, and would use up attempts.  Make the "
                f"broker's visibility time-out longer, or the lease shorter: Inbox(guard, lease={visibility:g})"
            )

    async def _close(self) -> None:
        await self.consumer.broker.aclose()
        self.threads.shutdown(wait=False)

    async def _take_all(self, subscription: Subscription) -> None:
        """Take messages while there is room, until the consumer is stopped."""
        stopping = asyncio.create_task(self.stopping.wait())
        receiving: asyncio.Task[Sequence[Delivery]] | None = None
        try:
            while not self.stopping.is_set():
                if self.room <= 0:
                    await asyncio.wait([stopping, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
                    continue
                receiving = asyncio.ensure_future(subscription.receive(self.room, POLL))
                await asyncio.wait([stopping, receiving], return_when=asyncio.FIRST_COMPLETED)
                for delivery in await receiving:  # even if the consumer is stopping: `_finish` gives them back
                    self._begin(delivery)
        finally:
            await cancel_all([stopping] if receiving is None else [stopping, receiving])

    def _begin(self, delivery: Delivery) -> None:
        """Handle the delivery in a task, after the previous delivery with the same source and subject."""
        key = ordering_key(delivery)
        task = asyncio.create_task(self._deliver(delivery, None if key is None else self.last.get(key)))
        self.tasks[task] = delivery
        if key is not None:
            self.last[key] = task

        def end(task: asyncio.Task[None]) -> None:
            self.tasks.pop(task, None)
            self.busy.discard(task)
            if key is not None and self.last.get(key) is task:
                del self.last[key]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("A delivery could not be handled; the broker repeats it later", exc_info=error)

        task.add_done_callback(end)

    async def _finish(self) -> None:
        """Let running attempts finish within the grace, and give back all other deliveries."""
        waiting = {task: delivery for task, delivery in self.tasks.items() if task not in self.busy}
        await cancel_all(waiting)
        left = dict(self.tasks)
        if running := [*left, *self.background]:
            await asyncio.wait(running, timeout=self.consumer.grace)
        late = {task: delivery for task, delivery in left.items() if not task.done()}
        await cancel_all([*late, *self.background])
        for delivery in (*waiting.values(), *late.values(), *self.unfinished):
            with suppress(BrokerError):
                await delivery.nack()
        self.unfinished.clear()

    # One delivery

    async def _deliver(self, delivery: Delivery, before: asyncio.Task[None] | None) -> None:
        """Try until the message is handled or a dead letter, and acknowledge it; or return it to the broker."""
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
        """Whether a delivery goes back to the broker until its next attempt, instead of waiting in this process.

        A delivery with a subject waits here, because later ones must not overtake it.  Others wait here unless there
        are many: the broker counts each return as a delivery, and a message with too many is a dead letter.
        """
        if self.once:
            return delivery not in self.in_progress or attempt >= MOST_LOOKS
        return ordering_key(delivery) is None and len(self.tasks) > self.consumer.prefetch // 2

    async def _answer(self, delivery: Delivery, again: float | None) -> None:
        try:
            if again is None:
                await delivery.ack()
                self.acknowledged += 1
            else:
                await delivery.nack(again)
        except BrokerError as error:
            log.warning("A message was not acknowledged or returned, so it will be delivered again: %s", error.detail)

    async def _attempt(self, delivery: Delivery, attempt: int) -> float | None:
        """Try to handle the message.  Return None if it is done, otherwise the seconds until the next attempt."""
        envelope = delivery.envelope
        name, extra = "a malformed message", {}
        if envelope is not None:
            correlation = envelope.correlationid
            name = f"{envelope.type} {envelope.id} of {envelope.source} (correlation {correlation})"
            extra = {"correlationid": correlation}
        pause = ATTEMPTS.delay(attempt + delivery.count, random.random())
        try:
            received = await self._process(delivery)
        except InProgress as error:  # another delivery of the message is being handled
            self.in_progress.add(delivery)
            return min(error.retry_after or 1.0, BUSY.delay(attempt + 1, random.random()))
        except StoreError as error:
            log.warning("The ledger failed; trying %s again in %.1f s: %s", name, pause, error.detail, extra=extra)
            return pause
        except Exception as error:
            log.warning("The handler failed; trying %s again in %.1f s: %r", name, pause, error, extra=extra)
            return pause
        log.debug("%s: %s", name, "ignored" if received is None else received.how, extra=extra)
        return None

    async def _process(self, delivery: Delivery) -> Received | None:
        """Run the plan of a delivery in a span of its own."""
        consumer, in_progress = self.consumer, None
        with process_span(consumer.broker.channel, consumer.group, delivery.envelope, delivery.count) as outcome:
            try:
                received = await self._drive(*consumer.plan(delivery, self.on_dead))
                outcome("ignored" if received is None else received.how)
                return received
            except InProgress as error:  # raised after the span, which must not record it as an error
                outcome("in progress")
                in_progress = error
        raise in_progress

    async def _drive(self, plan: Plan[T], awaited: bool) -> T:
        """Run the plan on this loop if its handler is async, otherwise on a thread."""
        if awaited:
            return await arun(plan)
        return await self.loop.run_in_executor(self.threads, copy_context().run, run, plan)

    # In the background

    async def _extend(self, visibility: float | None) -> None:
        """Keep extending the visibility of all deliveries here, so that the broker does not repeat them."""
        while visibility is not None:
            await asyncio.sleep(visibility / 3)
            for delivery in tuple(self.tasks.values()):
                try:
                    await delivery.extend()
                except BrokerError as error:
                    log.warning("The visibility of a message was not extended, so it may be repeated: %s", error.detail)

    async def _look_for_requeued(self) -> None:
        while not self.stopping.is_set():
            try:
                await self._handle_requeued()
            except StoreError as error:
                log.warning("The search for requeued dead letters failed; again in %g s: %s", REQUEUED, error.detail)
            except Exception:  # the search must go on
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
            except LookupError as error:  # another consumer of this inbox may have a handler
                if marker not in self.without_handler:
                    log.warning("The requeued event %r of %s waits: there is %s", letter.key, letter.name, error)
                self.without_handler.add(marker)
                continue
            except OncemoreError:  # `handle_dead` logs it
                pass
            with process_span(self.consumer.broker.channel, self.consumer.group, envelope, 1) as outcome:
                done = await self._drive(inbox.handle_dead(marker, letter, handlers, self.on_dead), awaited)
                outcome("requeued" if done else "failed")

    async def _pause(self, seconds: float) -> None:
        """Wait until the time is up or the consumer is stopped."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)


def ordering_key(delivery: Delivery) -> tuple[str, str] | None:
    """Return the source and subject of a message that must be handled in order; None if it has no subject."""
    envelope = delivery.envelope
    return None if envelope is None or envelope.subject is None else (envelope.source, envelope.subject)


def on_any_thread(function: OnDead, loop: asyncio.AbstractEventLoop) -> OnDead:
    """Return a function that calls *function* on any thread.  If it is async, *loop* awaits it."""

    def call(payload: Any, why: str) -> Any:
        result = function(payload, why)
        if inspect.iscoroutine(result) and asyncio._get_running_loop() is not loop:
            return asyncio.run_coroutine_threadsafe(result, loop).result()
        return result

    return call


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


def is_async(handler: EventHandler) -> bool:
    """Whether the handler must be awaited: a coroutine function, a partial of one, or an object with an async call."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
