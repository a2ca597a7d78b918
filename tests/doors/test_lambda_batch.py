"""SQS batches: each message is performed once, even if delivered again, and only failed messages are delivered again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard
from oncemore.errors import ConfigurationError, Duplicate
from oncemore.web.aws_lambda import current_operation, each_message

from .lambda_shapes import Context, Event, batch, http_api, message

CONTEXT = Context(900)


@pytest.fixture(params=["memory", "sqlite"])
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guard]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/once.db"
    with closing(Guard(url)) as guard:
        yield guard


class Work:
    """Performs messages, and fails on the messages whose body says so."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failing = True

    def __call__(self, message: Event) -> None:
        if "poison" in message["body"] and self.failing:
            raise RuntimeError("cannot")
        self.done.append(message["messageId"])


def failures(answer: Event) -> list[str]:
    return [each["itemIdentifier"] for each in answer["batchItemFailures"]]


class TestStandardQueue:
    def test_redelivered_batch_is_performed_once(self, guard: Guard) -> None:
        work = Work()
        handler, event = each_message(guard)(work), batch(*(message(id=f"m{n}") for n in range(3)))
        assert [failures(handler(event, CONTEXT)) for _ in range(3)] == [[], [], []]
        assert work.done == ["m0", "m1", "m2"]

    def test_only_failed_messages_are_reported_and_performed_again(self, guard: Guard) -> None:
        """A failure is not marked as performed."""
        work = Work()
        handler = each_message(guard)(work)
        event = batch(message(id="a"), message('{"poison": 1}', id="b"), message(id="c"))
        assert failures(handler(event, CONTEXT)) == ["b"]
        work.failing = False
        assert failures(handler(event, CONTEXT)) == []
        assert work.done == ["a", "c", "b"]

    def test_message_delivered_twice_concurrently_is_performed_once(self, guard: Guard) -> None:
        """The second delivery fails, and is acknowledged when it comes again."""
        done, together = [], Barrier(2)
        handler = each_message(guard)(lambda message: done.append(message["messageId"]))

        def deliver() -> list[str]:
            together.wait()
            return failures(handler(batch(message(id="m")), CONTEXT))

        with ThreadPoolExecutor(2) as pool:
            answers = [each.result() for each in [pool.submit(deliver), pool.submit(deliver)]]
        assert done == ["m"]
        assert answers in ([[], []], [["m"], []], [[], ["m"]])
        assert failures(handler(batch(message(id="m")), CONTEXT)) == []
        assert done == ["m"]

    def test_the_operation_is_the_current_one(self, guard: Guard) -> None:
        seen: list[str] = []
        each_message(guard)(lambda _: seen.append(current_operation().key))(batch(message(id="m")), CONTEXT)
        assert seen == ["m"]
        with pytest.raises(ConfigurationError):
            current_operation()

    def test_an_empty_batch_is_done(self, guard: Guard) -> None:
        assert each_message(guard)(Work())(batch(), CONTEXT) == {"batchItemFailures": []}

    @pytest.mark.parametrize("event", [http_api(), {}, None, {"Records": [{"eventSource": "aws:s3"}]}])
    def test_event_of_another_source_is_refused(self, guard: Guard, event: Any) -> None:
        with pytest.raises(ConfigurationError, match="SQS"):
            each_message(guard)(Work())(event, CONTEXT)

    def test_queues_are_kept_apart(self, guard: Guard) -> None:
        work = Work()
        handler = each_message(guard)(work)
        handler(batch(message(id="m", queue="arn:one"), message(id="m", queue="arn:two")), CONTEXT)
        assert work.done == ["m", "m"]


class TestKeys:
    def test_template_makes_one_operation_of_two_messages(self, guard: Guard) -> None:
        """The sender sent the order twice: two messages, one operation."""
        work = Work()
        handler = each_message(guard, key="{body.orderId}")(work)
        twice = [message('{"orderId": 7}', id="a"), message('{ "orderId": 7.0 }', id="b")]
        assert failures(handler(batch(*twice, message('{"orderId": 8}', id="c")), CONTEXT)) == []
        assert work.done == ["a", "c"]

    def test_another_payload_under_the_same_key_is_flagged(
        self, guard: Guard, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is not performed, and not silently dropped."""
        work = Work()
        handler = each_message(guard, key="{body.orderId}")(work)
        event = batch(message('{"orderId": 7, "n": 1}', id="a"), message('{"orderId": 7, "n": 2}', id="b"))
        assert failures(handler(event, CONTEXT)) == ["b"]
        assert work.done == ["a"]
        assert "The message b was refused" in caplog.text

    def test_template_may_name_an_attribute(self, guard: Guard) -> None:
        work = Work()
        by_sender = each_message(guard, key="{header.Order-Id}")(work)
        by_sender(batch(message(id="a", **{"Order-Id": "7"}), message(id="b", **{"order-id": "7"})), CONTEXT)
        by_queue = each_message(guard, key="{header.MessageDeduplicationId}")(work)
        spoofed = message(id="c", group="g", messagededuplicationid="d-x")
        by_queue(batch(spoofed, message(id="c", group="g")), CONTEXT)
        assert work.done == ["a", "c"]

    def test_window_is_of_the_time_of_sending(self, guard: Guard) -> None:
        """A second delivery in the next window is the same operation."""
        work = Work()
        handler = each_message(guard, key="{body.order}:{window:1s}")(work)
        for _ in range(2):
            handler(batch(message('{"order": 7}', id="a")), CONTEXT)
        later = message('{"order": 7}', id="b")
        later["attributes"]["SentTimestamp"] = "1794780421500"
        handler(batch(later), CONTEXT)
        assert work.done == ["a", "b"]

    def test_key_function_names_the_operation(self, guard: Guard) -> None:
        work = Work()
        handler = each_message(guard, key=lambda message: message["body"])(work)
        handler(batch(message("same", id="a"), message("same", id="b")), CONTEXT)
        assert work.done == ["a"]

    @pytest.mark.parametrize("body", ["{}", "not json", '{"orderId": ""}', "[1]", '"text"', ""])
    def test_a_message_without_its_key_fails_alone(self, guard: Guard, body: str) -> None:
        work = Work()
        handler = each_message(guard, key="{body.orderId}")(work)
        event = batch(message(body, id="a"), message('{"orderId": 1}', id="b"))
        assert failures(handler(event, CONTEXT)) == ["a"]
        assert work.done == ["b"]

    @given(body=st.text(st.characters(codec="utf-8"), max_size=50))
    def test_any_text_is_a_body(self, body: str) -> None:
        done: list[str] = []
        with closing(Guard("memory://")) as guard:
            handler = each_message(guard)(lambda message: done.append(message["body"]))
            for _ in range(2):
                assert failures(handler(batch(message(body, id="m")), CONTEXT)) == []
        assert done == [body]

    def test_template_with_a_mistake_is_refused_at_start(self, guard: Guard) -> None:
        with pytest.raises(ConfigurationError):
            each_message(guard, key="{bdy.orderId}")(Work())


class TestFifoQueue:
    def test_messages_after_a_failure_in_their_group_wait(self, guard: Guard) -> None:
        """Order within a group is kept, and one group does not hold up another."""
        work = Work()
        handler = each_message(guard)(work)
        event = batch(
            message(id="a1", group="a"),
            message('{"poison": 1}', id="a2", group="a"),
            message(id="b1", group="b"),
            message(id="a3", group="a"),
            message(id="b2", group="b"),
        )
        assert failures(handler(event, CONTEXT)) == ["a2", "a3"]
        work.failing = False
        assert failures(handler(event, CONTEXT)) == []
        assert work.done == ["a1", "b1", "b2", "a2", "a3"]

    def test_failure_in_a_queue_without_order_delays_no_message(self, guard: Guard) -> None:
        work = Work()
        event = batch(message('{"poison": 1}', id="a"), message(id="b"))
        for each in event["Records"]:
            each["attributes"]["MessageGroupId"] = "tenant"
        assert failures(each_message(guard)(work)(event, CONTEXT)) == ["a"]
        assert work.done == ["b"]


class TestTime:
    def test_message_without_time_left_is_reported_as_failed(self, guard: Guard) -> None:
        context, done = Context(10), []

        def work(message: Event) -> None:
            done.append(message["messageId"])
            context.left -= 9.5

        handler, event = each_message(guard)(work), batch(*(message(id=f"m{n}") for n in range(3)))
        assert failures(handler(event, context)) == ["m1", "m2"]
        assert done == ["m0"]

    def test_the_lease_is_the_time_that_is_left(self, guard: Guard) -> None:
        leases: list[float] = []

        def work(message: Event) -> None:
            record = guard.find(current_operation().operation.scope, message["messageId"])
            assert record is not None
            leases.append(record.lease_until - record.now)

        each_message(guard)(work)(batch(message()), Context(5))
        assert 5 <= leases[0] <= 6

    def test_all_messages_are_performed_without_a_context(self, guard: Guard) -> None:
        work = Work()
        each_message(guard)(work)(batch(message(id="m")), None)
        assert work.done == ["m"]


class TestPolicy:
    def test_a_record_outlives_the_queues_longest_retention(self, guard: Guard) -> None:
        handler = each_message(guard)(Work())
        handler(batch(message(id="m")), CONTEXT)
        (record,) = guard.list().records
        assert record.remaining > 13.9 * 86400
        assert each_message(guard, ttl="1h")(Work()).policy.ttl == 3600

    def test_rejected_duplicate_is_acknowledged(self, guard: Guard) -> None:
        work = Work()
        handler = each_message(guard, on_duplicate="reject")(work)
        assert [failures(handler(batch(message(id="m")), CONTEXT)) for _ in range(2)] == [[], []]
        assert work.done == ["m"]

    def test_duplicate_raised_by_the_work_is_its_failure(self, guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
        def work(message: Event) -> None:
            raise Duplicate("of something else")

        assert failures(each_message(guard)(work)(batch(message(id="m")), CONTEXT)) == ["m"]
        assert caplog.records[-1].levelno == logging.WARNING

    def test_an_interruption_ends_the_batch(self, guard: Guard) -> None:
        def work(message: Event) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            each_message(guard)(work)(batch(message(id="m")), CONTEXT)


def test_an_async_function_is_refused_before_a_message_is_lost(guard: Guard) -> None:
    async def function(message: Event) -> None:
        """Is never awaited, so its message would count as performed."""

    with pytest.raises(ConfigurationError, match=r"asyncio\.run"):
        each_message(guard)(function)
    assert failures(each_message(guard)(lambda each: function(each))(batch(message(id="m1")), CONTEXT)) == ["m1"]


def test_batch_setup_fault_is_raised_at_decoration(guard: Guard) -> None:
    """One fault is a window longer than the retention: "once a month" would be once in two weeks."""

    def perform(message: Any) -> None:
        pass

    with pytest.raises(ConfigurationError, match="make ttl as long as the window"):
        each_message(guard, key="{window:30d}")(perform)
    each_message(guard, key="{window:30d}", ttl="31d")(perform)
    with pytest.raises(ConfigurationError, match="5 is not a template"):
        each_message(guard, key=5)(perform)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="guard is a str"):
        each_message("memory://")  # type: ignore[arg-type]


def test_message_without_a_kept_outcome_is_delivered_again(guard: Guard) -> None:
    """A policy that keeps only successes releases an error, so its message was not performed."""
    done: list[str] = []

    def function(message: Event) -> None:
        done.append(message["messageId"])
        raise LookupError

    handler = each_message(guard, keep="success", errors=(LookupError,))(function)
    assert [failures(handler(batch(message(id="m1")), CONTEXT)) for _ in range(2)] == [["m1"], ["m1"]]
    assert done == ["m1", "m1"]


@pytest.mark.parametrize("key", [None, 7, ""])
def test_message_fails_if_its_key_function_gives_no_key(
    guard: Guard, key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()
    assert failures(each_message(guard, key=lambda message: key)(work)(batch(message(id="m1")), CONTEXT)) == ["m1"]
    assert work.done == []
    assert "InvalidKey" in caplog.text


def test_refused_transaction_runs_again_with_the_original_message(tmp_path: Path) -> None:
    runs: list[Any] = []

    class Refused(Exception):
        sqlite_errorcode = 5

    def work(message: Event) -> None:
        runs.append(message.get("body"))
        message.clear()
        if len(runs) == 1:
            raise Refused

    with closing(Guard(f"sqlite:///{tmp_path}/once.db")) as guard:
        assert failures(each_message(guard, effect="transaction")(work)(batch(message("paid")), CONTEXT)) == []
    assert runs == ["paid", "paid"]
