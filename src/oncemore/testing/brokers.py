"""BrokerContract: the tests that every broker must pass.  Subclass it, and give it a `make` fixture.

class TestMyBroker(BrokerContract):
    @pytest.fixture
    def make(self):
        channel = f"test{uuid4().hex}"
        return lambda: connect(f"mybroker://localhost/{channel}?visibility=2")
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import wraps
from typing import Any

import pytest

from ..errors import BrokerError
from ..messages.broker import Broker, Delivery, Subscription
from ..messages.envelope import Envelope

Make = Callable[[], Broker]
PATIENCE = 30.0  # seconds for anything that must happen
QUIET = 1.0  # seconds in which nothing must happen

AWKWARD: list[Any] = [
    {"amount": "10.00", "nested": [1, 2.5, None, True, {"ž": "\u2028"}]},
    [],
    "text",
    0,
    None,
    "x" * 50_000,
    b"",
    b"\x00\xff\xfe raw",
]


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own, without a plugin of pytest."""

    @wraps(test)
    def run(*arguments: Any, **more: Any) -> None:
        asyncio.run(test(*arguments, **more))

    return run


def message(number: int, *, subject: str | None = "rf_1", data: Any = None, **more: Any) -> Envelope:
    """Return an envelope with its number in its id."""
    values: dict[str, Any] = {"id": f"event-{number}", "source": "payments", "subject": subject, **more}
    return Envelope("refund.succeeded", {"number": number} if data is None else data, **values)


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    return [int(each.envelope.id.removeprefix("event-")) for each in deliveries if each.envelope is not None]


class BrokerContract:
    """The conformance suite.

    The fixture `make` returns a function that makes an unopened broker.  All its brokers in one test are for the same channel,
    which is new in each test.  If the broker has a visibility time-out, set it to two seconds.

    Attributes:
        keeps_order: Whether messages with the same subject arrive in the order in which they were sent.
        has_groups: Whether each group of consumers gets every message.
        too_large: A size of data in bytes that the broker refuses, or None if no such size is known.
    """

    keeps_order = True
    has_groups = True
    too_large: int | None = None

    async def put(self, broker: Broker, body: bytes) -> None:
        """Put *body* into the channel as another program would, without an envelope.  Override it."""
        pytest.skip("the suite was not told how to put a malformed message into this broker")

    # Publishing

    @on_a_loop
    async def test_published_envelope_is_received_with_all_attributes(self, make: Make) -> None:
        async with Used(make) as used:
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            sent = message(1, correlationid="key ž", traceparent=trace, extensions={"tenant": "a b%", "count": 3})
            assert await used.broker.publish([sent]) == [None]
            [delivery] = await used.take(1)
            assert delivery.envelope is not None
            got, wanted = delivery.envelope.attributes, sent.attributes
            assert {name: str(value) for name, value in got.items()} == {name: str(v) for name, v in wanted.items()}
            assert (delivery.envelope.raw, delivery.count, delivery.problem) == (sent.raw, 1, "")

    @on_a_loop
    async def test_any_json_and_raw_bytes_arrive_as_they_were(self, make: Make) -> None:
        async with Used(make) as used:
            sent = [message(n, subject=None, data=data) for n, data in enumerate(AWKWARD) if data is not None]
            assert set(await used.broker.publish(sent)) == {None}
            got = {each.envelope.id: each.envelope for each in await used.take(len(sent)) if each.envelope}
            assert {id: (each.data, each.datacontenttype) for id, each in got.items()} == {
                each.id: (each.data, each.datacontenttype) for each in sent
            }

    @on_a_loop
    async def test_order_of_a_subject_is_kept_over_several_calls(self, make: Make) -> None:
        async with Used(make) as used:
            if not self.keeps_order:
                pytest.skip("this broker keeps no order")
            for first in (0, 50):
                assert set(await used.broker.publish([message(n) for n in range(first, first + 50)])) == {None}
            assert numbers(await used.take(100)) == list(range(100))

    @on_a_loop
    async def test_thousand_messages_in_one_call_all_arrive(self, make: Make) -> None:
        async with Used(make) as used:
            sent = [message(n, subject=f"rf_{n % 7}") for n in range(1000)]
            assert set(await used.broker.publish(sent)) == {None}
            assert sorted(numbers(await used.take(1000))) == list(range(1000))

    @on_a_loop
    async def test_repeated_id_within_the_window_is_delivered_once(self, make: Make) -> None:
        async with Used(make) as used:
            if used.broker.window is None:
                pytest.skip("this broker recognises no repeated ids")
            for _ in range(2):  # a repetition counts as stored
                assert await used.broker.publish([message(1), message(1)]) == [None, None]
            other = message(1, source="orders")  # another source may use the same id
            assert await used.broker.publish([other]) == [None]
            found = [each.envelope.source for each in await used.take(2) if each.envelope]
            assert sorted(found) == ["orders", "payments"]
            await used.expect_nothing()

    @on_a_loop
    async def test_message_that_is_too_large_fails_alone(self, make: Make) -> None:
        if self.too_large is None:
            pytest.skip("no size is known that this broker refuses")
        async with Used(make) as used:
            large = message(2, data="x" * self.too_large)
            first, second, third = await used.broker.publish([message(1), large, message(3)])
            assert (first, third) == (None, None)
            assert isinstance(second, BrokerError)
            assert numbers(await used.take(2)) == [1, 3]

    @on_a_loop
    async def test_empty_batch_is_published_as_nothing(self, make: Make) -> None:
        async with Used(make) as used:
            assert list(await used.broker.publish([])) == []

    def test_broker_is_used_again_on_another_loop(self, make: Make) -> None:
        broker = make()

        async def publish(number: int) -> None:
            assert await broker.publish([message(number)]) == [None]  # it opens itself
            await broker.aclose()
            await broker.aclose()  # does nothing

        async def read() -> list[int]:
            async with Used(lambda: broker) as used:
                return numbers(await used.take(2))

        asyncio.run(publish(1))
        asyncio.run(publish(2))
        assert asyncio.run(read()) == [1, 2]

    # Receiving

    @on_a_loop
    async def test_nothing_there_returns_nothing_after_the_wait(self, make: Make) -> None:
        async with Used(make) as used:
            await used.expect_nothing()

    @on_a_loop
    async def test_limit_bounds_the_deliveries_of_one_call(self, make: Make) -> None:
        async with Used(make) as used:
            await used.broker.publish([message(n) for n in range(5)])
            found: list[Delivery] = []
            ends = time.monotonic() + PATIENCE
            while len(found) < 5 and time.monotonic() < ends:
                some = await used.subscription.receive(2, 1.0)
                assert len(some) <= 2
                for each in some:
                    await each.ack()
                found += some
            assert numbers(found) == [0, 1, 2, 3, 4]

    @on_a_loop
    async def test_acknowledged_message_is_not_delivered_again(self, make: Make) -> None:
        async with Used(make) as used:
            await used.broker.publish([message(1)])
            await used.take(1)
            await used.resubscribe()
            await used.expect_nothing(3.0)

    @on_a_loop
    async def test_unacknowledged_message_is_delivered_again_and_counted(self, make: Make) -> None:
        async with Used(make) as used:
            await used.broker.publish([message(1), message(2)])
            first = await used.take(2, ack=False)
            await used.resubscribe()
            again = await used.take(2)
            assert sorted(numbers(again)) == [1, 2]
            assert (first[0].count, max(each.count for each in again)) == (1, 2)

    @on_a_loop
    async def test_refused_delivery_comes_again_and_is_counted(self, make: Make) -> None:
        async with Used(make) as used:
            await used.broker.publish([message(1)])
            counts = []
            for _ in range(3):
                [delivery] = await used.take(1, ack=False)
                counts.append(delivery.count)
                await delivery.nack()
            assert counts == [1, 2, 3]
            await used.take(1)
            await used.expect_nothing(3.0)

    @on_a_loop
    async def test_delayed_delivery_does_not_come_before_its_time(self, make: Make) -> None:
        async with Used(make) as used:
            await used.broker.publish([message(1)])
            [delivery] = await used.take(1, ack=False)
            begun = time.monotonic()
            await delivery.nack(2.0)
            await used.take(1)
            assert time.monotonic() - begun > 1.0  # brokers count whole seconds, or look now and then

    @on_a_loop
    async def test_extended_delivery_is_not_given_to_another_consumer(self, make: Make) -> None:
        async with Used(make) as used:
            if used.subscription.visibility is None:
                pytest.skip("this broker has no visibility time-out")
            await used.broker.publish([message(1)])
            [delivery] = await used.take(1, ack=False)
            other = used.broker.subscribe("group-1")
            await other.aopen()
            try:
                ends = time.monotonic() + 2 * used.subscription.visibility
                while time.monotonic() < ends:
                    await delivery.extend()
                    assert await other.receive(1, used.subscription.visibility / 4) in ([], ())
                await delivery.ack()
            finally:
                await other.aclose()

    @on_a_loop
    async def test_each_group_gets_every_message(self, make: Make) -> None:
        if not self.has_groups:
            pytest.skip("this broker's channels have one group each")
        async with Used(make) as used, Used(make, group="group-2") as second:
            await used.broker.publish([message(1), message(2)])
            assert numbers(await used.take(2)) == [1, 2]
            assert numbers(await second.take(2)) == [1, 2]

    @on_a_loop
    async def test_consumers_of_a_group_share_the_messages(self, make: Make) -> None:
        async with Used(make) as used:
            other = used.broker.subscribe("group-1")
            await other.aopen()
            try:
                await used.broker.publish([message(n, subject=f"rf_{n}") for n in range(40)])
                found: list[int] = []
                ends = time.monotonic() + PATIENCE
                while len(found) < 40 and time.monotonic() < ends:
                    for subscription in (used.subscription, other):
                        for delivery in await subscription.receive(5, 0.2):
                            found += numbers([delivery])
                            await delivery.ack()
                assert sorted(found) == list(range(40))
            finally:
                await other.aclose()

    @on_a_loop
    async def test_malformed_message_is_delivered_with_its_reason(self, make: Make) -> None:
        async with Used(make) as used:
            for body in (b"not JSON", b"[" * 100_000, b'{"specversion": "0.3", "id": "1"}'):
                await self.put(used.broker, body)
            await used.broker.publish([message(1)])
            found = await used.take(4)
            malformed = [each for each in found if each.envelope is None]
            assert [len(each.raw) for each in malformed] == [8, 100_000, 33]
            assert all(each.problem for each in malformed)
            assert numbers(found) == [1]


class Used:
    """An open broker with a subscription, for one test."""

    def __init__(self, make: Make, group: str = "group-1") -> None:
        self.make = make
        self.group = group

    async def __aenter__(self) -> Used:
        self.broker = self.make()
        self.exits = AsyncExitStack()
        await self.broker.aopen()
        self.exits.push_async_callback(self.broker.aclose)
        self.subscription: Subscription = self.broker.subscribe(self.group)
        self.exits.push_async_callback(self._unsubscribe)
        await self.subscription.aopen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.exits.aclose()

    async def _unsubscribe(self) -> None:
        with suppress(BrokerError):
            await self.subscription.aclose()

    async def resubscribe(self) -> None:
        """Close the subscription, as a consumer does when it ends, and open another."""
        await self.subscription.aclose()
        self.subscription = self.broker.subscribe(self.group)
        await self.subscription.aopen()

    async def take(self, number: int, *, ack: bool = True) -> list[Delivery]:
        """Wait for *number* deliveries, and return them."""
        found: list[Delivery] = []
        ends = time.monotonic() + PATIENCE
        while len(found) < number and time.monotonic() < ends:
            some = await self.subscription.receive(min(50, number - len(found)), 1.0)
            if ack:
                for delivery in some:
                    await delivery.ack()
            found += some
        assert len(found) == number, f"{len(found)} of {number} deliveries came"
        return found

    async def expect_nothing(self, seconds: float = QUIET) -> None:
        """Check that nothing is delivered for *seconds*."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            assert numbers(await self.subscription.receive(10, 1.0)) == []
