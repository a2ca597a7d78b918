"""The matchmaking service under kills, several processes and a receiver that is down: each effect happens once."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import httpx
import psycopg
import pytest

from examples.matchmaking.processes import Matchmaking, WebhookReceiver, new_key
from examples.matchmaking.settings import Settings
from examples.program import http
from oncemore import Guard, Operation
from oncemore._runtime.plan import run
from oncemore.webhooks.signature import Signing

from .matchmaking import LEDGERS, ForkedMatchmaking, settings_of, until

pytestmark = pytest.mark.chaos

STEPS = [5, 30, 120, 600, 1800, 3600, 21_600, 43_200, 86_400]  # seconds after the first attempt


@pytest.fixture(params=LEDGERS)
def pair(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[tuple[Matchmaking, Matchmaking]]:
    """Two processes on one database."""
    settings = {"MATCHMAKING_DATABASE": f"sqlite:///{tmp_path}/dating.db", **settings_of(request, request.param)}
    with ForkedMatchmaking(**settings) as one, ForkedMatchmaking(**settings) as other:
        other.tokens = one.tokens
        yield one, other


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as made:
        yield made


def test_two_processes_perform_once(pair: tuple[Matchmaking, Matchmaking]) -> None:
    ann, bob = pair[0].sign_in("ann"), pair[0].sign_in("bob")
    match, key = pair[0].match(ann, bob), new_key()
    message = {"content": "Hello!", "clientMessageId": new_key()}
    requests: list[tuple[str, Any, str, str]] = [
        ("/auth/otp/send", {"phone": "+1"}, key, "otp.sent"),
        ("/safety/report", {"subjectId": bob, "category": "spam", "text": "t"}, new_key(), "report.filed"),
        (f"/matches/{match}/messages", message, key, "message.created"),
        (f"/matches/{match}/unmatch", {}, new_key(), "match.closed"),
    ]
    for path, body, sent, kind in requests:
        answers = pair[0].at_once(10, lambda number: pair[number % 2].post(path, body, ann, sent))  # noqa: B023
        assert len({(answer.status_code, answer.content) for answer in answers}) == 1, answers
        assert answers[0].is_success
        assert len(pair[1].effects(kind)) == 1


def test_two_processes_make_one_match(pair: tuple[Matchmaking, Matchmaking]) -> None:
    for _ in range(5):
        users = [pair[0].sign_in(f"u-{secrets.token_hex(4)}") for _ in range(2)]
        offers = pair[0].offers(*users)

        def accept(number: int, users: list[str] = users, offers: dict[str, str] = offers) -> httpx.Response:
            path = f"/matches/offers/{offers[users[number]]}/action"
            return pair[number].post(path, {"action": "accept"}, users[number])

        answers = pair[0].at_once(2, accept)
        assert sorted(answer.json()["state"] for answer in answers) == ["accepted", "matched"]
        assert len(pair[1].effects("match.created", *users)) == 1


def test_two_processes_generate_the_same_offers(pair: tuple[Matchmaking, Matchmaking]) -> None:
    users = [pair[0].sign_in(f"u{number}") for number in range(10)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda process: process.daily_offers("2026-02-19"), pair))
    again = pair[0].daily_offers("2026-02-19")
    by_slot = {slot["slot"]: slot["offers"] for slot in again}
    assert len(by_slot) == len(users)
    assert not any(slot["ran"] for slot in again)
    for slots in found:
        assert all(by_slot[slot["slot"]] == slot["offers"] for slot in slots)
    assert sorted(pair[1].effects("offers.generated")) == sorted(by_slot)


@pytest.mark.parametrize("ledger", LEDGERS)
def test_scheduler_run_five_times_with_a_kill(request: pytest.FixtureRequest, ledger: str) -> None:
    with ForkedMatchmaking(**settings_of(request, ledger)) as service:
        zones = ["UTC", "America/New_York", "Asia/Kolkata"]
        users = [service.sign_in(f"u{number}", zones[number % 3]) for number in range(9)]
        service.post("/safety/block", {"subjectId": "u1"}, "u0").raise_for_status()
        match = service.match("u0", "u2")

        def run_killed() -> None:
            with pytest.raises(httpx.TransportError):
                service.daily_offers("2026-02-19", delay=0.2)

        running = threading.Thread(target=run_killed)
        running.start()
        until(lambda: 0 < len(service.effects("offers.generated")) < 9)
        service.crash()
        running.join()
        service.start()
        slots = [service.daily_offers("2026-02-19") for _ in range(5)]
        until(lambda: len(service.daily_offers("2026-02-19")) == 9)
        named = {slot["slot"]: slot["offers"] for slot in service.daily_offers("2026-02-19")}
        assert set(named) == {f"2026-02-19:{zones[number % 3]}:u{number}" for number in range(9)}
        for run_slots in slots:
            assert all(named[slot["slot"]] == slot["offers"] for slot in run_slots)
        assert sorted(service.effects("offers.generated")) == sorted(named)
        for user in users:
            offers = service.ask("GET", "/matches/offers", user=user).json()["offers"]
            daily = [offer for offer in offers if offer["date"] == "2026-02-19"]
            slot = next(name for name in named if name.endswith(f":{user}"))
            assert [offer["offerId"] for offer in daily] == named[slot]
            assert len(daily) == 3
            if user == "u0":
                assert not {"u1", "u2"} & {offer["candidateId"] for offer in daily}
            if user in ("u1", "u2"):
                assert "u0" not in {offer["candidateId"] for offer in daily}
        assert match


def test_schedule_runs_at_six_local_time() -> None:
    with ForkedMatchmaking(MATCHMAKING_SCHEDULER="on") as service:
        service.hook("clock", {"at": "2030-02-18T23:00:00Z"})
        for user, zone in (("ann", "America/New_York"), ("bob", "Europe/Berlin"), ("eve", "Asia/Tokyo")):
            service.sign_in(user, zone)
        marks = "SELECT 1 FROM oncemore_records WHERE scope LIKE '%schedule%'"
        until(lambda: len(select(service, marks)) > 0)  # it has looked at the users for the first time
        service.hook("clock", {"at": "2030-02-19T05:00:10Z"})  # six in Berlin, and still midnight in New York
        until(lambda: "2030-02-19:Europe/Berlin:bob" in service.effects("offers.generated"))
        assert service.effects("offers.generated", "ann") == []
        service.hook("clock", {"at": "2030-02-19T11:00:10Z"})
        until(lambda: service.effects("offers.generated", "ann") == ["2030-02-19:America/New_York:ann"])
        assert service.effects("offers.generated", "bob") == ["2030-02-19:Europe/Berlin:bob"]


# Webhooks


@pytest.mark.parametrize("ledger", LEDGERS)
def test_webhook_receiver_down_then_up(request: pytest.FixtureRequest, receiver: WebhookReceiver, ledger: str) -> None:
    settings = {"MATCHMAKING_WEBHOOK_URL": receiver.url, **settings_of(request, ledger)}
    with ForkedMatchmaking(**settings) as service:
        ann, bob = service.sign_in("ann"), service.sign_in("bob")
        match = service.match(ann, bob)
        until(lambda: attempts(service) == [1])
        service.restart()  # kill -9: the delivery survives
        receiver.up()
        assert receiver.received == []
        service.advance(10)
        until(lambda: len(receiver.received) > 0)
        until(lambda: "webhook_delivery_success_total 1.0" in http.get(f"{service.url}/metrics").text)
        service.advance(86_400)
        second = service.match(ann, service.sign_in("eve"))
        until(lambda: len(receiver.received) >= 2)
        assert [event["data"] for event in receiver.events] == [
            {"matchId": match, "users": ["ann", "bob"]},
            {"matchId": second, "users": ["ann", "eve"]},
        ]
        headers, body = receiver.received[0]
        event = json.loads(body)
        Signing(Settings().webhook_secret).verify(headers, body)
        assert list(event) == ["eventId", "eventType", "timestamp", "data"]
        assert (event["eventId"], event["eventType"]) == (headers["webhook-id"], "match.created")
        assert event["timestamp"].endswith("Z")
        datetime.fromisoformat(event["timestamp"])


def test_webhook_is_tried_at_ten_steps_under_one_id(receiver: WebhookReceiver) -> None:
    """The receiver stays down for all attempts but the last."""
    with ForkedMatchmaking(MATCHMAKING_WEBHOOK_URL=receiver.url) as service:
        service.match(service.sign_in("ann"), service.sign_in("bob"))
        before = 0.0
        for number, step in enumerate(STEPS, start=1):
            until(lambda: attempts(service) == [number])  # noqa: B023
            ((first, due),) = select(service, "SELECT first_at, next_at FROM oncemore_webhook_deliveries")
            assert step <= due - first <= step + (step - before) * 0.1  # up to a tenth later, to spread the load
            if number == len(STEPS):
                receiver.up()
            now = datetime.fromisoformat(service.hook("clock", {"advance": 0})["now"]).timestamp()
            service.advance(due - now + 0.1)
            before = step
        until(lambda: len(receiver.received) == 1)
        until(lambda: "webhook_delivery_success_total 1.0" in http.get(f"{service.url}/metrics").text)


def test_clock_that_is_moved_does_not_repeat_a_webhook() -> None:
    with WebhookReceiver(delay=0.3) as slow, ForkedMatchmaking(MATCHMAKING_WEBHOOK_URL=slow.url) as service:
        slow.up()
        service.match(service.sign_in("ann"), service.sign_in("bob"))
        until(lambda: len(slow.received) == 1)
        service.advance(3600)
        until(lambda: "webhook_delivery_success_total 1.0" in http.get(f"{service.url}/metrics").text)
        time.sleep(1)
        assert len(slow.received) == 1


def test_webhook_of_a_killed_accept_is_not_sent(receiver: WebhookReceiver) -> None:
    with ForkedMatchmaking(MATCHMAKING_WEBHOOK_URL=receiver.url) as service:
        receiver.up()
        ann, bob, key = service.sign_in("ann"), service.sign_in("bob"), new_key()
        offers = service.offers(ann, bob)
        service.post(f"/matches/offers/{offers[ann]}/action", {"action": "accept"}, ann).raise_for_status()
        path = f"/matches/offers/{offers[bob]}/action"
        assert service.dies(lambda: service.post(path, {"action": "accept"}, bob, key, fault="kill"))
        assert service.effects("match.created") == []
        answer = service.post(path, {"action": "accept"}, bob, key).json()
        until(lambda: len(receiver.received) > 0)
        assert [event["data"]["matchId"] for event in receiver.events] == [answer["matchId"]]


def attempts(service: Matchmaking) -> list[int]:
    """Return the number of finished attempts of each delivery."""
    text = (
        "SELECT count(*) FROM oncemore_webhook_deliveries d JOIN oncemore_webhook_attempts a ON a.delivery = d.seq"
        " GROUP BY d.seq ORDER BY d.seq"
    )
    return [count for (count,) in select(service, text)]


def select(service: Matchmaking, text: str) -> list[Any]:
    """Return the rows of a query on the service's database."""
    url = service.settings.get("MATCHMAKING_DATABASE", "")
    if url:
        with psycopg.connect(url, autocommit=True) as server:
            return server.execute(text.encode()).fetchall()
    connection = sqlite3.connect(service.folder / "matchmaking.db")
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()


# The ledger in Redis


@pytest.fixture
def in_redis(request: pytest.FixtureRequest, valkey_url: str) -> Iterator[Matchmaking]:
    with ForkedMatchmaking(**settings_of(request, "redis")) as service:
        yield service


def test_redis_kill_after_the_commit_is_resolved(in_redis: Matchmaking) -> None:
    """The process has died after its commit and before the record in Redis: the retry looks into the database."""
    ann, key, body = in_redis.sign_in("ann"), new_key(), {"decisionId": "d", "text": "t"}
    first = in_redis.post("/safety/appeal", body, ann, key)
    assert first.status_code == 201
    with Guard(in_redis.settings["MATCHMAKING_LEDGER"]) as guard:
        (record,) = [each for each in guard.list().records if each.key == key]
        for each in guard.list().records:
            guard.delete(*each.id)
        run(guard.store.claim(Operation(record.scope, key, record.fingerprint, record.name), lease=0.1))
    again = in_redis.post("/safety/appeal", body, ann, key)
    assert (again.status_code, again.content) == (201, first.content)
    assert "resolved" in in_redis.log
    assert len(in_redis.effects("appeal.filed")) == 1
    assert in_redis.post("/safety/appeal", body, ann).status_code == 409


def test_redis_that_has_lost_its_records_performs_once(in_redis: Matchmaking) -> None:
    ann, key, body = in_redis.sign_in("ann"), new_key(), {"subjectId": "x", "category": "spam", "text": "t"}
    first = in_redis.post("/safety/report", body, ann, key)
    with Guard(in_redis.settings["MATCHMAKING_LEDGER"]) as guard:
        for each in guard.list().records:
            guard.delete(*each.id)
    assert in_redis.post("/safety/report", body, ann, key).content == first.content
    assert in_redis.post("/safety/report", body, ann).status_code == 409  # another key: the database has it
    assert len(in_redis.effects("report.filed")) == 1


# What is unique whatever the key


@pytest.mark.parametrize("ledger", LEDGERS)
def test_killed_request_may_be_made_again_under_another_key(request: pytest.FixtureRequest, ledger: str) -> None:
    with ForkedMatchmaking(**settings_of(request, ledger)) as service:
        ann, bob = service.sign_in("ann"), service.sign_in("bob")
        for path, body, kind in (
            ("/auth/otp/send", {"phone": "+1"}, "otp.sent"),
            ("/verification/session", {"kind": "selfie"}, "verification.started"),
            ("/safety/report", {"subjectId": bob, "category": "spam", "text": "t"}, "report.filed"),
        ):
            key = new_key()
            assert service.dies(lambda: service.post(path, body, ann, key, fault="kill"))  # noqa: B023
            assert service.post(path, body, ann).is_success
            first = service.post(path, body, ann, key)
            assert first.status_code == (409 if kind == "report.filed" else 200 if kind == "otp.sent" else 201)
            assert len(service.effects(kind)) == 1


def test_frozen_process_does_not_repeat_the_effect_of_another_key(
    request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    """Its lease in Redis ends while it is frozen, and another key does the work: it finds that in the database."""
    settings = {"MATCHMAKING_DATABASE": f"sqlite:///{tmp_path}/dating.db", **settings_of(request, "redis")}
    body = {"decisionId": "d", "text": "t"}
    with ForkedMatchmaking(**settings) as frozen, ForkedMatchmaking(**settings) as other, ThreadPoolExecutor(1) as pool:
        ann = frozen.sign_in("ann")
        other.tokens = frozen.tokens
        late = pool.submit(frozen.post, "/safety/appeal", body, ann, fault="slow:1500")
        time.sleep(0.7)
        os.kill(frozen.pid, signal.SIGSTOP)
        time.sleep(4)  # longer than the lease
        assert other.post("/safety/appeal", body, ann).status_code == 201
        os.kill(frozen.pid, signal.SIGCONT)
        assert late.result().status_code == 409
        assert len(other.effects("appeal.filed")) == 1
