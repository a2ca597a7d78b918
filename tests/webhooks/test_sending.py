"""Sending webhooks: endpoints, the schedule, health, resending, recovering, order, rates, secrets."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard, Op, Operation, Webhooks
from oncemore._ledger.tables import Sql
from oncemore._runtime.plan import run
from oncemore.encryption import Seal
from oncemore.errors import (
    ConfigurationError,
    CorruptRecord,
    InProgress,
    InvalidPayload,
    NotFound,
    PayloadTooLarge,
    UnsafeTarget,
)
from oncemore.testing.clock import Clock
from oncemore.webhooks import Sender, Signing
from oncemore.webhooks import statements as sql
from oncemore.webhooks.bodies import WebhookMessage
from oncemore.webhooks.claims import MatchingPass
from oncemore.webhooks.endpoints import Endpoint, matches
from oncemore.webhooks.schedule import STEPS, DeliverySchedule
from tests.webhooks.conftest import send
from tests.webhooks.hooks import OK, Hooks, response

Make = Callable[..., Webhooks]
DAY = 86400.0


def states(webhooks: Webhooks) -> dict[str, int]:
    return {state: count for state, count in webhooks.stats().items() if count}


# Sending


def test_event_reaches_each_endpoint_that_wants_it_signed(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoint = webhooks.endpoints.create(
        hooks.url("/all"), tenant="acme", headers={"X-Shop": "7", "User-Agent": "shop"}
    )
    webhooks.endpoints.create(hooks.url("/refunds"), tenant="acme", events=["refund.*"])
    webhooks.endpoints.create(hooks.url("/orders"), tenant="acme", events=["order.*", "refund"])
    webhooks.endpoints.create(hooks.url("/other"), tenant="other")
    (id,) = send(webhooks, {"id": "rf_1"}, tenant="acme")
    assert Sender(webhooks).run_once() == 2
    assert Sender(webhooks).run_once() == 0
    assert sorted(each.path for each in hooks.arrived) == ["/all", "/refunds"]
    arrived = next(each for each in hooks.arrived if each.path == "/all")
    assert endpoint.secret is not None
    assert Signing(endpoint.secret).verify(arrived.headers, arrived.body).id == id
    assert arrived.headers["accept-encoding"] == "identity"  # the response is logged as it comes
    assert arrived.data == {"id": "rf_1"}
    assert (arrived.headers["x-shop"], arrived.headers["user-agent"]) == ("7", "shop")
    assert int(arrived.headers["webhook-retry-until"]) - time.time() == pytest.approx(DAY, abs=120)
    (delivery,) = webhooks.deliveries.list(endpoint=endpoint.id)
    assert (delivery.state, delivery.attempts, delivery.status, delivery.message_id) == ("delivered", 1, 200, id)
    (attempt,) = webhooks.deliveries.attempts(delivery.id)
    assert (attempt.number, attempt.status, attempt.error) == (1, 200, "")


def test_rolled_back_operation_sends_nothing_and_keeps_ids(webhooks: Webhooks, hooks: Hooks) -> None:
    webhooks.endpoints.create(hooks.url())
    ids: list[list[str]] = []

    def perform(op: Op, *, fails: bool) -> None:
        ids.append([webhooks.send(op, "a", 1), webhooks.send(op, "a", 1), webhooks.send(op, "b", 1)])
        if fails:
            raise ValueError

    with pytest.raises(ValueError):
        webhooks.guard.run(Operation("t", "k"), lambda op: perform(op, fails=True))
    assert Sender(webhooks).run_once() == 0
    webhooks.guard.run(Operation("t", "k"), lambda op: perform(op, fails=False))
    assert Sender(webhooks).run_once() == 3
    assert ids[0] == ids[1]
    assert sorted(hooks.ids) == sorted(ids[0])
    assert len(set(hooks.ids)) == 3


def test_chosen_id_is_sent_once(webhooks: Webhooks, hooks: Hooks) -> None:
    webhooks.endpoints.create(hooks.url())
    send(webhooks, 1, id="ev_1")
    send(webhooks, 2, id="ev_1")
    assert Sender(webhooks).run_once() == 1
    assert hooks.ids == ["ev_1"]


@pytest.mark.parametrize("id", ["a.b", "a b", "", "é", "a\n", "x" * 257, 7])
def test_id_that_cannot_be_signed_is_refused(webhooks: Webhooks, id: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be signed"):
        send(webhooks, 1, id=id)


def test_bad_events_are_refused_in_the_transaction(webhooks: Webhooks) -> None:
    for type in ("", "x" * 257, "a\0", "\ud800"):
        with pytest.raises(ConfigurationError):
            send(webhooks, 1, type=type)
    with pytest.raises(InvalidPayload):
        send(webhooks, object())
    with pytest.raises(PayloadTooLarge):
        send(webhooks, "x" * 1024 * 1024)
    assert Sender(webhooks).run_once() == 0


def test_messages_for_many_endpoints_are_matched_in_small_transactions(
    webhooks: Webhooks, hooks: Hooks, monkeypatch: Any
) -> None:
    monkeypatch.setattr("oncemore.webhooks.claims.MOST_DELIVERIES", 10)
    for n in range(4):
        webhooks.endpoints.create(hooks.url(f"/{n}"), order="fifo" if n % 2 else "none")
    send(webhooks, *range(9))
    matching = MatchingPass(webhooks)
    assert [run(matching.match_page()) for _ in range(5)] == [2, 2, 2, 2, 1]
    assert matching.is_over
    Sender(webhooks).run_once()
    for n in range(4):
        data = [each.data for each in hooks.arrived if each.path == f"/{n}"]
        assert (data if n % 2 else sorted(data)) == list(range(9))


def test_patterns_are_compared_once_for_each_type(webhooks: Webhooks, hooks: Hooks, monkeypatch: Any) -> None:
    """The transaction that matches a thousand messages with a thousand endpoints keeps other writers of SQLite waiting."""
    wants, asked = Endpoint.wants, []

    def count(self: Endpoint, type: str) -> bool:
        asked.append(type)
        return wants(self, type)

    monkeypatch.setattr(Endpoint, "wants", count)
    for n in range(5):
        webhooks.endpoints.create(hooks.url(f"/{n}"), events=["refund.*", "order.*"])
    send(webhooks, *range(10))
    send(webhooks, *range(10), type="order.created")
    assert Sender(webhooks).run_once() == 100
    assert sorted(asked) == ["order.created"] * 5 + ["refund.succeeded"] * 5


def test_message_that_no_endpoint_wants_has_no_delivery(webhooks: Webhooks) -> None:
    send(webhooks, 1, tenant="nobody")
    assert Sender(webhooks).run_once() == 0
    assert states(webhooks) == {}


@pytest.mark.parametrize(("body", "media_type", "keys"), [
    ("standard", "application/json", {"type", "timestamp", "data"}),
    ("eventId", "application/json", {"eventId", "eventType", "timestamp", "data"}),
    ("cloudevents", "application/cloudevents+json",
     {"id", "type", "source", "specversion", "time", "data", "subject", "datacontenttype"}),
])  # fmt: skip
def test_body_has_the_chosen_form(make: Make, hooks: Hooks, body: Any, media_type: str, keys: set[str]) -> None:
    webhooks = make(body=body)
    webhooks.endpoints.create(hooks.url())
    (id,) = send(webhooks, {"n": 1.0, "big": 2**70, "text": "é\u2028"}, subject="s")
    Sender(webhooks).run_once()
    (arrived,) = hooks.arrived
    found = json.loads(arrived.body)
    assert set(found) == keys
    assert found["data"] == {"n": 1.0, "big": 2**70, "text": "é\u2028"}
    assert id in (arrived.id, found.get("id"), found.get("eventId"))
    assert arrived.headers["content-type"] == media_type


def test_body_function_gets_the_message_and_may_fail(make: Make, hooks: Hooks) -> None:
    def body(message: WebhookMessage) -> Any:
        return f"{message.type} {message.data['n'] / message.data['n']}".encode()

    webhooks = make(body=body)
    webhooks.endpoints.create(hooks.url())
    send(webhooks, {"n": 1}, {"n": 0})
    assert Sender(webhooks).run_once() == 1
    assert hooks.arrived[0].body == b"refund.succeeded 1.0"
    (failed,) = webhooks.deliveries.list(state="pending")
    assert "ZeroDivisionError" in failed.error


# The schedule


def test_ten_attempts_at_their_times_then_dead_letter(webhooks: Webhooks, hooks: Hooks, caplog: Any) -> None:
    hooks.answer = lambda _: response(500, b"out of order")
    endpoint = webhooks.endpoints.create(hooks.url())
    (id,) = send(webhooks, 1)
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    sender.run_once()
    for before, step in itertools.pairwise(STEPS):
        (delivery,) = webhooks.deliveries.list(state="pending")
        first = webhooks.deliveries.attempts(delivery.id)[0].at
        assert delivery.next_at is not None
        assert step - 1 <= delivery.next_at - first <= step + 0.1 * (step - before) + 60  # the machine may be slow
        sender.run_once()  # it is not due
        clock.advance(delivery.next_at - first - (time.time() + webhooks.guard.store.shift - first) + 0.01)
        sender.run_once()
    assert len(hooks.arrived) == 10
    assert set(hooks.ids) == {id}
    assert [each.headers["webhook-attempt"] for each in hooks.arrived] == [str(n) for n in range(1, 11)]
    assert len({each.headers["webhook-retry-until"] for each in hooks.arrived}) >= 1
    (dead,) = webhooks.deliveries.list(state="dead")
    assert (dead.attempts, dead.status, dead.error) == (10, 500, "status 500")
    attempts = webhooks.deliveries.attempts(dead.id)
    assert [(each.number, each.status, each.response) for each in attempts] == [
        (n, 500, "out of order") for n in range(1, 11)
    ]
    assert f"The webhook {id}" in caplog.text
    clock.advance(DAY)
    sender.run_once()
    assert len(hooks.arrived) == 10
    assert webhooks.endpoints.get(endpoint.id).state == "enabled"


def test_schedule_follows_retry_after_up_to_next_but_one_step() -> None:
    random.seed(1)
    schedule = DeliverySchedule()
    assert 5 <= (schedule.next_attempt(0.1) or 0) <= 5.5
    assert 5 <= (schedule.next_attempt(-100.0) or 0) <= 5.5  # the clock was set back
    assert schedule.next_attempt(0.0, 20.0) == 20.0
    assert schedule.next_attempt(0.0, 10**9) == 30.0
    assert 5 <= (schedule.next_attempt(0.0, 1.0) or 0) <= 5.5  # never sooner than the schedule
    assert 30 <= (schedule.next_attempt(20.0) or 0) <= 32.5  # later steps keep their times
    assert schedule.next_attempt(50000.0, 10**9) == 86400.0
    assert schedule.next_attempt(86400.0, 10.0) is None


@pytest.mark.parametrize("steps", [[], [5], [0, 0], [0, 10, 5], [0, "x"], [0, -1]])
def test_schedule_that_does_not_grow_from_zero_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigurationError):
        DeliverySchedule(steps)


def test_retry_after_delays_message_and_endpoint(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda _: response(429, retry_after="999999")
    webhooks.endpoints.create(hooks.url())
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, 1)
    sender.run_once()
    hooks.answer = lambda _: OK
    clock.advance(10)
    send(webhooks, 2)
    assert sender.run_once() == 0  # the whole endpoint pauses
    clock.advance(20)
    assert sender.run_once() == 2  # but not beyond the next-but-one step, 30 s after the first attempt


@pytest.mark.parametrize(("status", "pauses"), [(429, True), (502, True), (504, True), (500, False), (400, False)])
def test_overload_pauses_the_endpoint_for_a_moment(webhooks: Webhooks, hooks: Hooks, status: int, pauses: bool) -> None:
    hooks.answer = lambda _: response(status)
    webhooks.endpoints.create(hooks.url())
    sender = Sender(webhooks)
    send(webhooks, 1)
    sender.run_once()
    hooks.answer = lambda _: OK
    send(webhooks, 2)
    assert sender.run_once() == (0 if pauses else 1)
    Clock(webhooks.guard.store).advance(7)
    assert sender.run_once() == (2 if pauses else 1)


def test_clock_that_jumps_back_or_far_ahead_loses_nothing(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda _: response(500)
    webhooks.endpoints.create(hooks.url())
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, 1)
    sender.run_once()
    clock.advance(-1000)
    sender.run_once()
    assert len(hooks.arrived) == 1  # not due, and not in a loop
    clock.advance(1000 + 2 * DAY)  # no sender was running: that is no reason to give up
    sender.run_once()
    assert len(hooks.arrived) == 2
    assert states(webhooks) == {"pending": 1}
    hooks.answer = lambda _: OK
    clock.advance(60)
    assert sender.run_once() == 1


# Health


def test_410_disables_with_a_reason_and_parks_the_rest(make: Make, hooks: Hooks) -> None:
    told: list[Any] = []
    webhooks = make(operational="ops", on_event=lambda *event: told.append(event))
    hooks.answer = lambda arrived: response(410 if arrived.path == "/gone" else 200)
    gone = webhooks.endpoints.create(hooks.url("/gone"), tenant="acme", order="fifo")
    webhooks.endpoints.create(hooks.url("/ops"), tenant="ops", events=["endpoint.*"])
    send(webhooks, 1, 2, 3, tenant="acme")
    sender = Sender(webhooks)
    sender.run_once()
    assert [each.path for each in hooks.arrived].count("/gone") == 1
    found = webhooks.endpoints.get(gone.id)
    assert (found.state, found.reason) == ("disabled", "the endpoint answered 410 Gone")
    assert states(webhooks)["parked"] == 2
    data = {"endpoint": gone.id, "tenant": "acme", "url": gone.url, "reason": found.reason}
    assert told == [("endpoint.disabled", data)]
    sender.run_once()
    assert [each.data for each in hooks.arrived if each.path == "/ops"] == [data]
    send(webhooks, 4, tenant="acme")
    sender.run_once()
    assert states(webhooks)["parked"] == 3


def test_endpoint_that_only_fails_for_five_days_is_disabled(make: Make, hooks: Hooks) -> None:
    told: list[Any] = []
    webhooks = make(on_event=lambda *event: told.append(event))
    hooks.answer = lambda _: response(503)
    endpoint = webhooks.endpoints.create(hooks.url())
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    for day in range(5):
        send(webhooks, day)
        sender.run_once()
        assert webhooks.endpoints.get(endpoint.id).state == "enabled"
        clock.advance(DAY)
    clock.advance(60)
    sender.run_once()
    found = webhooks.endpoints.get(endpoint.id)
    assert (found.state, found.reason) == ("disabled", "every attempt has failed for 5.0 days")
    assert told[0][0] == "endpoint.disabled"
    assert set(states(webhooks)) <= {"parked", "dead"}


def test_success_resets_failing_since_and_prevents_disabling(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda arrived: response(500 if arrived.data == "bad" else 200)
    endpoint = webhooks.endpoints.create(hooks.url())
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, "bad")
    sender.run_once()
    assert webhooks.endpoints.get(endpoint.id).failing_since is not None
    send(webhooks, "good")
    sender.run_once()
    assert webhooks.endpoints.get(endpoint.id).failing_since is None
    clock.advance(6)
    sender.run_once()  # fails again
    hooks.answer = lambda _: OK
    clock.advance(9 * DAY)
    sender.run_once()
    assert webhooks.endpoints.get(endpoint.id).state == "enabled"


def test_failing_on_event_does_not_stop_the_sender(make: Make, hooks: Hooks, caplog: Any) -> None:
    def fail(name: str, data: Any) -> None:
        raise RuntimeError("observer")

    webhooks = make(on_event=fail)
    hooks.answer = lambda _: response(410)
    endpoint = webhooks.endpoints.create(hooks.url())
    send(webhooks, 1)
    Sender(webhooks).run_once()
    assert webhooks.endpoints.get(endpoint.id).state == "disabled"
    assert "on_event failed" in caplog.text


# By hand


def test_disabled_endpoint_loses_nothing_and_recovers_in_order(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoint = webhooks.endpoints.create(hooks.url(), order="fifo", disabled=True)
    sender = Sender(webhooks)
    send(webhooks, *range(5))
    sender.run_once()
    assert (hooks.arrived, states(webhooks)) == ([], {"parked": 5})
    with pytest.raises(ConfigurationError, match="enable it first"):
        webhooks.recover(endpoint.id, 0, only="missing")
    webhooks.endpoints.enable(endpoint.id)
    assert sender.run_once() == 0  # enabling sends nothing by itself
    send(webhooks, 5)
    assert sender.run_once() == 1
    assert webhooks.recover(endpoint.id, time.time() - 3600, only="missing") == 5
    assert webhooks.recover(endpoint.id, time.time() - 3600, only="missing") == 0
    assert sender.run_once() == 5
    assert hooks.data == [5, 0, 1, 2, 3, 4]
    assert [each.headers["webhook-sequence"] for each in hooks.arrived] == ["6", "1", "2", "3", "4", "5"]


def test_later_endpoint_recovers_missed_events(webhooks: Webhooks, hooks: Hooks) -> None:
    sender = Sender(webhooks)
    send(webhooks, *range(3), subject="s")
    send(webhooks, "not wanted", type="order.created")
    sender.run_once()
    for order in ("none", "subject", "fifo"):
        endpoint = webhooks.endpoints.create(hooks.url(f"/{order}"), events=["refund.*"], order=order)
        assert webhooks.recover(endpoint.id, 0, only="failed") == 0
        assert webhooks.recover(endpoint.id, 0, only="missing") == 3
        assert webhooks.recover(endpoint.id, 0, only="missing") == 0
        assert sender.run_once() == 3
        data = [each.data for each in hooks.arrived if each.path == f"/{order}"]
        assert (data if order != "none" else sorted(data)) == [0, 1, 2]
    assert hooks.most_at_a_time <= 2


def test_recover_all_sends_each_once_more_without_a_cap(make: Make, hooks: Hooks, monkeypatch: Any) -> None:
    monkeypatch.setattr("oncemore.webhooks.webhooks.SLICE", 7)
    webhooks = make(schedule=[0])
    hooks.answer = lambda arrived: response(500 if arrived.data % 10 == 0 else 200)
    endpoint = webhooks.endpoints.create(hooks.url(), order="subject")
    sender = Sender(webhooks)
    for n in range(50):
        send(webhooks, n, subject=f"s{n % 3}")
    sender.run_once()
    assert states(webhooks) == {"delivered": 45, "dead": 5}
    hooks.answer = lambda _: OK
    progress: list[int] = []
    before = len(hooks.arrived)
    assert webhooks.recover(endpoint.id, 0, only="all", progress=progress.append) == 50
    assert progress == [*range(7, 50, 7), 50]
    assert sender.run_once() == 50
    again = hooks.arrived[before:]
    assert len(again) == len({each.id for each in again}) == 50
    for rest in range(3):
        assert [each.data for each in again if each.data % 3 == rest] == list(range(rest, 50, 3))


def test_recover_interrupted_between_slices_goes_on(make: Make, hooks: Hooks, monkeypatch: Any) -> None:
    monkeypatch.setattr("oncemore.webhooks.webhooks.SLICE", 10)
    webhooks = make(schedule=[0])
    hooks.answer = lambda _: response(500)
    endpoint = webhooks.endpoints.create(hooks.url(), order="fifo")
    sender = Sender(webhooks)
    send(webhooks, *range(35))
    sender.run_once()
    hooks.answer = lambda _: OK
    hooks.arrived.clear()

    def interrupt(count: int) -> None:
        if count == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        webhooks.recover(endpoint.id, 0, progress=interrupt)
    assert states(webhooks) == {"dead": 15, "pending": 20}
    assert webhooks.recover(endpoint.id, 0) == 15
    assert sender.run_once() == 35
    assert hooks.data == list(range(35))


def test_recover_of_an_endpoint_that_is_deleted_meanwhile_ends(
    webhooks: Webhooks, hooks: Hooks, monkeypatch: Any
) -> None:
    monkeypatch.setattr("oncemore.webhooks.webhooks.SLICE", 2)
    send(webhooks, *range(5))
    Sender(webhooks).run_once()
    endpoint = webhooks.endpoints.create(hooks.url(), order="fifo")
    with pytest.raises(NotFound, match="deleted meanwhile"):
        webhooks.recover(endpoint.id, 0, only="missing", progress=lambda _: webhooks.endpoints.delete(endpoint.id))
    assert states(webhooks) == {}


def test_recover_refuses_times_without_zone_and_unknown_words(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoint = webhooks.endpoints.create(hooks.url())
    with pytest.raises(ConfigurationError, match="no time zone"):
        webhooks.recover(endpoint.id, datetime(2026, 1, 1))
    with pytest.raises(ConfigurationError, match="since = '2026-01-01'"):
        webhooks.recover(endpoint.id, "2026-01-01")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="only = 'some'"):
        webhooks.recover(endpoint.id, 0, only="some")  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        webhooks.recover("ep_none", 0)


def test_resend_keeps_id_and_health_and_uses_the_current_secret(make: Make, hooks: Hooks) -> None:
    webhooks = make(schedule=[0])
    hooks.answer = lambda _: response(500)
    endpoint = webhooks.endpoints.create(hooks.url())
    sender = Sender(webhooks)
    (id,) = send(webhooks, 1)
    sender.run_once()
    (dead,) = webhooks.deliveries.list(state="dead")
    since = webhooks.endpoints.get(endpoint.id).failing_since
    new = webhooks.endpoints.rotate(endpoint.id, grace=0)
    hooks.answer = lambda _: response(410)
    webhooks.resend(dead.id)
    sender.run_once()
    assert webhooks.deliveries.get(dead.id).state == "dead"
    found = webhooks.endpoints.get(endpoint.id)
    assert (found.state, found.failing_since) == ("enabled", since)
    hooks.answer = lambda _: OK
    webhooks.resend(dead.id)
    assert sender.run_once() == 1
    assert webhooks.deliveries.get(dead.id).state == "delivered"
    assert webhooks.endpoints.get(endpoint.id).failing_since == since
    assert set(hooks.ids) == {id}
    assert new.secret is not None
    Signing(new.secret).verify(hooks.arrived[-1].headers, hooks.arrived[-1].body)
    assert len(hooks.arrived[-1].headers["webhook-signature"].split(" ")) == 1
    webhooks.resend(dead.id)  # also what was delivered
    assert sender.run_once() == 1
    assert [each.number for each in webhooks.deliveries.attempts(dead.id)] == [1, 2, 3, 4]


def test_resend_of_a_pending_delivery_keeps_its_schedule(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda _: response(500)
    webhooks.endpoints.create(hooks.url())
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, 1)
    sender.run_once()
    clock.advance(6)
    sender.run_once()
    (delivery,) = webhooks.deliveries.list()
    webhooks.resend(delivery.id)
    sender.run_once()
    found = webhooks.deliveries.get(delivery.id)
    assert (found.state, found.attempts) == ("pending", 3)
    assert found.next_at is not None
    assert found.next_at - webhooks.deliveries.attempts(delivery.id)[0].at >= 29


def test_resend_and_ping_reach_a_disabled_endpoint(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoint = webhooks.endpoints.create(hooks.url(), disabled=True)
    sender = Sender(webhooks)
    send(webhooks, "first", "second")
    sender.run_once()
    first, second = webhooks.deliveries.list(state="parked")
    ping = webhooks.ping(endpoint.id)
    webhooks.resend(first.id)
    assert sender.run_once() == 2
    assert [each.state for each in map(webhooks.deliveries.get, (ping, first.id, second.id))] == [
        "delivered",
        "delivered",
        "parked",
    ]
    hooks.answer = lambda _: response(500)
    webhooks.resend(second.id)
    sender.run_once()
    assert webhooks.deliveries.get(second.id).state == "parked"
    assert webhooks.endpoints.get(endpoint.id).failing_since is None


def test_ping_sent_twice_is_one_delivery(webhooks: Webhooks, hooks: Hooks) -> None:
    """The store sends statements again if their answer was lost."""
    endpoint, tables = webhooks.endpoints.create(hooks.url()), webhooks.tables
    queries = [
        tables.query(sql.PING, "id", "", "webhook.ping", b"{}"),
        tables.query(sql.PING_DELIVERY, "id", "", endpoint.id),
    ]
    (first, again) = (run(tables.execute(*queries))[1] for _ in range(2))
    assert first == again
    assert len(webhooks.deliveries.list()) == 1


def test_resend_of_waiting_delivery_is_refused(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda _: response(500)
    webhooks.endpoints.create(hooks.url(), order="fifo")
    send(webhooks, 1, 2)
    Sender(webhooks).run_once()
    _, second = webhooks.deliveries.list()
    assert second.next_at is None
    with pytest.raises(InProgress, match="waits for an earlier delivery"):
        webhooks.resend(second.id)
    for id in ("999", "x", "", "١", "9" * 30):
        with pytest.raises(NotFound):
            webhooks.resend(id)


@pytest.mark.parametrize("statement", [sql.DUE_ENDPOINTS, sql.CLAIM_RESENT])
def test_backlog_of_a_paused_endpoint_is_not_read(webhooks: Webhooks, url: str, hooks: Hooks, statement: Sql) -> None:
    """Senders look many times a second for deliveries that were resent to it by hand."""
    webhooks.endpoints.create(hooks.url())
    webhooks.stats()
    values = ["", "[]", 500] if statement is sql.DUE_ENDPOINTS else ["token", 0.0, "[]", 500, 0.0]
    query, bound = webhooks.tables.query(statement, *values)
    if webhooks.tables.dialect == "sqlite":
        with closing(sqlite3.connect(webhooks.guard.store.path)) as connection:
            plan = str(connection.execute(f"EXPLAIN QUERY PLAN {query.text}", bound).fetchall())
    else:
        import psycopg

        with psycopg.connect(url.partition("?")[0]) as server:
            server.execute("SET enable_seqscan = off")
            plan = str(psycopg.RawCursor(server).execute(f"EXPLAIN {query.text}".encode(), bound).fetchall())
    assert "webhook_deliveries_resent" in plan


def test_disable_parks_pending_deliveries_until_recover(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda _: response(500)
    endpoint = webhooks.endpoints.create(hooks.url())
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, 1)
    sender.run_once()
    webhooks.endpoints.disable(endpoint.id, reason="asked by the customer")
    assert states(webhooks) == {"parked": 1}
    assert webhooks.endpoints.list(state="disabled")[0].reason == "asked by the customer"
    hooks.answer = lambda _: OK
    clock.advance(DAY)
    assert sender.run_once() == 0
    webhooks.endpoints.enable(endpoint.id)
    webhooks.recover(endpoint.id, 0, only="missing")
    assert sender.run_once() == 1


# Order and rate


def test_fifo_is_in_order_and_goes_on_after_dead_letter(make: Make, hooks: Hooks) -> None:
    webhooks = make(schedule=[0, 5])
    hooks.answer = lambda arrived: response(500 if arrived.data == 2 else 200)
    webhooks.endpoints.create(hooks.url(), order="fifo")
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, *range(6))
    assert sender.run_once() == 2
    assert hooks.data == [0, 1, 2]
    send(webhooks, 6)
    assert sender.run_once() == 0
    clock.advance(6)
    assert sender.run_once() == 4
    assert hooks.data == [0, 1, 2, 2, 3, 4, 5, 6]
    assert [each.headers["webhook-sequence"] for each in hooks.arrived] == list("12334567")
    assert hooks.most_at_a_time == 1


def test_failing_subject_holds_up_only_itself(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda arrived: response(500 if arrived.data == "a1" else 200)
    webhooks.endpoints.create(hooks.url(), order="subject")
    sender = Sender(webhooks)
    for data in ("a1", "a2", "b1", "b2"):
        send(webhooks, data, subject=data[0])
    send(webhooks, "free")
    assert sender.run_once() == 3
    assert sorted(hooks.data) == ["a1", "b1", "b2", "free"]
    hooks.answer = lambda _: OK
    Clock(webhooks.guard.store).advance(6)
    assert sender.run_once() == 2
    assert hooks.data[-2:] == ["a1", "a2"]


def test_rate_is_shared_by_all_senders(webhooks: Webhooks, hooks: Hooks) -> None:
    webhooks.endpoints.create(hooks.url(), rate="2/s")
    clock, senders = Clock(webhooks.guard.store), [Sender(webhooks), Sender(webhooks)]
    send(webhooks, *range(20))
    counts = []
    start = time.monotonic()
    for _ in range(3):
        counts.append(sum(sender.run_once() for sender in senders))
        clock.advance(5)
    elapsed = time.monotonic() - start
    assert counts[0] >= 2
    assert sum(counts) <= 2 * (elapsed + 1) + 6  # at most one second's worth is made up for after a pause


@pytest.mark.parametrize("rate", ["5", "0/s", "x/s", "5/d", 5, ""])
def test_malformed_rate_is_refused(webhooks: Webhooks, hooks: Hooks, rate: Any) -> None:
    with pytest.raises(ConfigurationError, match="rate"):
        webhooks.endpoints.create(hooks.url(), rate=rate)


# Secrets


def test_secret_is_shown_once_and_nowhere_else(make: Make, hooks: Hooks, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    hooks.answer = lambda _: response(500)
    webhooks = make(seal=Seal([b"k" * 32]))
    endpoint = webhooks.endpoints.create(hooks.url())
    rotated = webhooks.endpoints.rotate(endpoint.id)
    secrets = [str(endpoint.secret), str(rotated.secret)]
    send(webhooks, 1)
    Sender(webhooks).run_once()
    (delivery,) = webhooks.deliveries.list()
    seen = [webhooks.endpoints.list(), webhooks.endpoints.get(endpoint.id), delivery, endpoint, rotated, caplog.text]
    seen.append(webhooks.deliveries.attempts(delivery.id))
    seen.append(webhooks.endpoints.read(run(webhooks.endpoints._find(endpoint.id))))
    for secret in secrets:
        assert secret.startswith("whsec_")
        assert secret.removeprefix("whsec_") not in repr(seen)
    assert webhooks.endpoints.get(endpoint.id).secret is None
    signatures = hooks.arrived[0].headers["webhook-signature"].split(" ")
    assert len(signatures) == 2
    for secret in secrets:
        Signing(secret).verify(hooks.arrived[0].headers, hooks.arrived[0].body)


def test_sealed_secrets_need_their_seal(make: Make, guard: Guard, url: str, hooks: Hooks, tmp_path: Any) -> None:
    sealed = make(seal=Seal([b"k" * 32]))
    endpoint = sealed.endpoints.create(hooks.url())
    assert make().endpoints.get(endpoint.id).url == endpoint.url  # without secrets, no key is needed
    with pytest.raises(ConfigurationError, match="encrypted"):
        make().endpoints.rotate(endpoint.id)
    with pytest.raises(CorruptRecord, match="key"):
        make(seal=Seal([b"x" * 32])).endpoints.rotate(endpoint.id)
    if url.startswith("sqlite"):
        guard.close()
        raw = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert str(endpoint.secret).encode() not in raw


def test_old_secret_signs_during_its_grace_only(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoint = webhooks.endpoints.create(hooks.url())
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    webhooks.endpoints.rotate(endpoint.id, grace="24h")
    newest = webhooks.endpoints.rotate(endpoint.id, grace="1h")
    counts = []
    for seconds in (0, 3000, 700, DAY):
        clock.advance(seconds)
        send(webhooks, 1)
        sender.run_once()
        counts.append(len(hooks.arrived[-1].headers["webhook-signature"].split(" ")))
    assert counts == [3, 3, 1, 1]
    Signing(str(newest.secret)).verify(hooks.arrived[-1].headers, hooks.arrived[-1].body)


def test_ed25519_endpoint_shows_its_public_key(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoint = webhooks.endpoints.create(hooks.url(), signature="v1a")
    assert str(endpoint.secret).startswith("whsk_")
    send(webhooks, 1)
    Sender(webhooks).run_once()
    found = webhooks.endpoints.get(endpoint.id)
    assert (found.secret, found.public_key) == (None, endpoint.public_key)
    Signing(str(found.public_key)).verify(hooks.arrived[0].headers, hooks.arrived[0].body)


# Endpoints


def test_endpoint_settings_are_checked(webhooks: Webhooks) -> None:
    create = webhooks.endpoints.create
    for url in (
        "ftp://example.com",
        "https://",
        "https://127.0.0.1.:99999",
        "https://u:p@example.com",
        "https://10.0.0.1",
        None,
        5,
        b"https://example.com",
    ):
        with pytest.raises(UnsafeTarget):
            create(url)  # type: ignore[arg-type]
    bad: list[dict[str, Any]] = [
        {"events": "refund.*"}, {"events": []}, {"events": [1]}, {"headers": {"a b": "c"}}, {"headers": {"a": "b\r\nc: d"}},
        {"headers": {"Webhook-Id": "x"}}, {"headers": {"Content-Length": "0"}}, {"order": "lifo"}, {"signature": "v2"},
        {"secret": "whsec_short"}, {"secret": "whpk_x"}, {"tenant": "a\0"}, {"id": ""+"x" * 257}, {"description": "\0"},
        {"headers": {1: "x"}}, {"headers": {"x": 1}}, {"headers": [("x", "y")]},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(ConfigurationError):
            create("https://example.com/hook", **options)
    assert webhooks.endpoints.list() == []


def test_endpoint_is_updated_listed_and_deleted(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoints = webhooks.endpoints
    made = endpoints.create(hooks.url("/old"), tenant="t", id="ep_1", events=["a"], rate="100/m", description="d")
    with pytest.raises(ConfigurationError, match="already"):
        endpoints.create(hooks.url(), id="ep_1")
    changed = endpoints.update("ep_1", url=hooks.url("/new"), events=["*"], headers={"x": "y"}, order="fifo")
    assert (changed.url, changed.events, changed.headers) == (hooks.url("/new"), ("*",), {"x": "y"})
    assert (changed.order, changed.rate, changed.description) == ("fifo", made.rate, "d")
    with pytest.raises(ConfigurationError, match="tenant cannot be changed"):
        endpoints.update("ep_1", tenant="u")
    with pytest.raises(NotFound):
        endpoints.update("none", url=hooks.url())
    for n in range(5):
        endpoints.create(hooks.url(), tenant="u", id=f"u{n}")
    page = endpoints.list(tenant="u", limit=3)
    assert [each.id for each in page] == ["u0", "u1", "u2"]
    assert [each.id for each in endpoints.list(tenant="u", after="u2")] == ["u3", "u4"]
    assert (len(endpoints.list()), len(endpoints.list(tenant="")), len(endpoints.list(state="disabled"))) == (6, 0, 0)
    for wrong in ({"limit": 0}, {"limit": "5"}, {"state": "off"}):
        with pytest.raises(ConfigurationError):
            endpoints.list(**wrong)  # type: ignore[arg-type]
    send(webhooks, 1, tenant="t")
    Sender(webhooks).run_once()
    assert (hooks.arrived[0].path, hooks.arrived[0].headers["x"]) == ("/new", "y")
    assert endpoints.delete("ep_1")
    assert not endpoints.delete("ep_1")
    assert webhooks.deliveries.list(endpoint="ep_1") == []


def test_pattern_with_many_stars_is_matched_quickly() -> None:
    assert not matches("*a" * 100 + "b", "a" * 256)
    assert matches("*a" * 100 + "*", "a" * 256)


@given(st.text("ab*", max_size=6), st.text("ab.", max_size=8))
def test_star_of_a_pattern_is_any_text(pattern: str, type: str) -> None:
    assert matches(pattern, type) == bool(re.fullmatch(pattern.replace("*", ".*"), type))


def test_concurrent_rotations_of_one_endpoint_succeed(webhooks: Webhooks, hooks: Hooks) -> None:
    endpoint = webhooks.endpoints.create(hooks.url())
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: webhooks.endpoints.rotate(endpoint.id, grace=0), range(24)))


def test_deliveries_are_filtered_and_paged(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda arrived: response(410 if arrived.data == 3 else 200)
    endpoint = webhooks.endpoints.create(hooks.url(), tenant="t", order="fifo")
    send(webhooks, *range(3), tenant="t", type="a")
    send(webhooks, *range(3, 6), tenant="t", type="b")
    Sender(webhooks).run_once()
    page = webhooks.deliveries.list(limit=4)
    assert len(page) == 4
    assert len(webhooks.deliveries.list(after=page[-1].id)) == 2
    for filters, count in [
        ({"type": "a"}, 3), ({"tenant": "t", "state": "delivered"}, 3), ({"state": "parked"}, 2), ({"state": "dead"}, 1),
        ({"endpoint": endpoint.id, "type": "b", "tenant": "t", "state": "dead"}, 1), ({"tenant": "u"}, 0),
    ]:  # fmt: skip
        assert len(webhooks.deliveries.list(**filters)) == count  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="state"):
        webhooks.deliveries.list(state="lost")  # type: ignore[arg-type]


def test_purge_by_age_and_by_tenant(make: Make, hooks: Hooks) -> None:
    webhooks = make(keep="2d", schedule=[0, DAY])
    hooks.answer = lambda arrived: response(500 if arrived.data == "pending" else 200)
    webhooks.endpoints.create(hooks.url(), tenant="a")
    webhooks.endpoints.create(hooks.url(), tenant="b")
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, 1, 2, "pending", tenant="a")
    send(webhooks, 3, tenant="b")
    sender.run_once()
    assert webhooks.purge() == 0
    assert webhooks.purge(tenant="b") == 1
    assert len(webhooks.deliveries.list()) == 3
    clock.advance(3 * DAY)
    assert webhooks.purge() == 2  # what is pending is kept
    (left,) = webhooks.deliveries.list()
    assert len(webhooks.deliveries.attempts(left.id)) == 1
    send(webhooks, "new", tenant="a")
    assert webhooks.purge(tenant="a") == 2
    assert (webhooks.deliveries.list(), sender.run_once()) == ([], 0)
    with pytest.raises(ConfigurationError, match="shorter than the schedule"):
        make(keep="1h")


def test_sender_purges_old_messages(make: Make, hooks: Hooks) -> None:
    webhooks = make(keep="1d", schedule=[0])
    webhooks.endpoints.create(hooks.url())
    send(webhooks, 1)
    Sender(webhooks).run_once()
    Clock(webhooks.guard.store).advance(2 * DAY)
    Sender(webhooks).run_once()
    assert webhooks.deliveries.list() == []


def test_events_and_metrics_tell_of_each_attempt(webhooks: Webhooks, hooks: Hooks) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from oncemore.observe.prometheus import count_events

    registry = CollectorRegistry()
    seen: list[Any] = []
    webhooks.guard.observers = (seen.append, count_events(registry))
    answers = iter([response(500), response(301, location="https://example.com"), OK, response(410)])
    hooks.answer = lambda _: next(answers)
    webhooks.endpoints.create(hooks.url(), order="fifo")
    clock, sender = Clock(webhooks.guard.store), Sender(webhooks)
    send(webhooks, 1, 2)
    for seconds in (0, 6, 40):
        clock.advance(seconds)
        sender.run_once()
    events = [event for event in seen if event.kind == "delivery"]
    assert [(event.status, event.to_state, event.attempt) for event in events] == [
        (500, "pending", 1), (301, "pending", 2), (200, "delivered", 3), (410, "dead", 1),
    ]  # fmt: skip
    assert events[2].duration >= 46
    text = generate_latest(registry).decode()
    for line in (
        "webhook_delivery_success_total 1.0",
        'webhook_deliveries_total{outcome="delivered"} 1.0',
        'webhook_deliveries_total{outcome="dead"} 1.0',
        'webhook_attempts_total{code_class="3xx"} 1.0',
        'webhook_attempts_total{code_class="5xx"} 1.0',
        "webhook_delivery_age_seconds_count 1.0",
    ):
        assert line in text


def test_redirect_is_not_followed_and_names_the_new_address(webhooks: Webhooks, hooks: Hooks) -> None:
    hooks.answer = lambda _: response(302, location=hooks.url("/elsewhere"))
    webhooks.endpoints.create(hooks.url("/here"))
    send(webhooks, 1)
    Sender(webhooks).run_once()
    assert [each.path for each in hooks.arrived] == ["/here"]
    (delivery,) = webhooks.deliveries.list()
    assert f"update the endpoint's URL to {hooks.url('/elsewhere')}" in delivery.error


def test_refused_target_is_a_dead_letter_after_one_attempt(make: Make, hooks: Hooks, guard: Guard) -> None:
    make().endpoints.create(hooks.url())
    strict = Webhooks(guard, allow_http=True)
    strict.endpoints.create("http://localhost:1/")
    send(strict, 1)
    Sender(strict).run_once()
    for dead in strict.deliveries.list(state="dead"):
        assert dead.error.startswith("refused: ")
        assert "loopback" in dead.error
        assert dead.attempts == 1
    assert (len(strict.deliveries.list(state="dead")), hooks.arrived) == (2, [])
