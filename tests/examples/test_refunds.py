"""Refunds over HTTP against real processes, with their entries, logs, counters and request ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .conftest import Shop

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.02)


def refund(shop: Shop, charge: str, key: str, amount: int = 1000, **headers: str) -> httpx.Response:
    return shop.post("/refunds", key, {"charge_id": charge, "amount": amount}, **headers)


def entries(shop: Shop, refund_id: str, kind: str) -> int:
    return len(shop.rows("SELECT 1 FROM entries WHERE reference = ? AND kind = ?", refund_id, kind))


def refunds_of(shop: Shop, charge: str) -> list[str]:
    query = "SELECT r.id FROM refunds r JOIN payments p ON p.id = r.payment_id WHERE p.charge_id = ?"
    return [row[0] for row in shop.rows(query, charge)]


def payouts_of(shop: Shop, refund_id: str) -> list[str]:
    """Return the keys under which the provider has paid this refund out."""
    moved = shop.provider.get("/admin/charges?kind=payout")["movements"]
    return [movement["key"] for movement in moved if movement["reference"] == refund_id]


# Repeats


def test_same_key_twice_is_one_refund_and_one_entry(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    first, again = refund(shop, charge, name), refund(shop, charge, name)
    assert (first.status_code, first.headers["idempotency-status"]) == (201, "stored")
    assert (again.status_code, again.headers["idempotency-status"]) == (201, "replayed")
    assert first.content == again.content
    assert refunds_of(shop, charge) == [first.json()["id"]]
    assert entries(shop, first.json()["id"], "refund") == 1
    assert len(payouts_of(shop, first.json()["id"])) == 1


def test_different_key_is_a_new_refund_within_the_payment(shop: Shop, name: str) -> None:
    charge = shop.captured(name, amount=2500)
    answers = [refund(shop, charge, f"{name}-{number}") for number in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert answers[2].json()["error_code"] == "VALIDATION.amount"
    assert sorted(refunds_of(shop, charge)) == sorted(answer.json()["id"] for answer in answers[:2])
    assert shop.rows("SELECT refunded FROM payments WHERE charge_id = ?", charge) == [(2000,)]


@pytest.mark.parametrize("quirk", ["timeout_after", "drop_after", "error_after", "error_before"])
def test_gateway_failure_then_retry_is_one_payout(shop: Shop, name: str, quirk: str) -> None:
    """The service calls the provider again with the same key, whether or not the money has moved."""
    charge, asked = shop.captured(name), len(shop.calls())
    shop.provider.order({quirk: 20.0}, {quirk: 20.0})  # the service itself retries once if there is time
    first = refund(shop, charge, name)
    shop.provider.order()
    again = refund(shop, charge, name)
    assert first.status_code == (504 if quirk == "timeout_after" else 503)
    assert first.json()["error_code"] in ("DEPENDENCY.timeout", "DEPENDENCY.unavailable")
    assert first.json()["retryable"] is True
    assert again.status_code == 201
    assert len(payouts_of(shop, again.json()["id"])) == 1
    keys = [call["key"] for call in shop.calls()[asked:]]
    assert len(keys) >= 2
    assert set(keys) == set(payouts_of(shop, again.json()["id"]))
    assert entries(shop, again.json()["id"], "refund") == 1
    assert refunds_of(shop, charge) == [again.json()["id"]]


def test_duplicate_webhook_is_one_ledger_entry(shop: Shop, name: str) -> None:
    made = refund(shop, shop.captured(name), name).json()["id"]
    until(lambda: entries(shop, made, "settlement") == 1)
    events = shop.provider.get("/admin/events")["events"]
    event = next(event["id"] for event in events if event["data"]["reference"] == made)
    assert shop.provider.replay(event, 10) == [200] * 10
    assert entries(shop, made, "settlement") == 1
    assert shop.rows("SELECT settled FROM refunds WHERE id = ?", made) == [(1,)]


# Concurrency and refusals


def test_different_amount_under_the_same_key_is_refused(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    first, other = refund(shop, charge, name), refund(shop, charge, name, amount=2000)
    assert other.status_code == 409
    assert other.headers["content-type"] == "application/problem+json"
    assert other.json()["error_code"] == "CONFLICT.idempotency.payload_mismatch"
    assert refunds_of(shop, charge) == [first.json()["id"]]


def test_ten_concurrent_requests_share_one_payout(shop: Shop, name: str) -> None:
    charge, together = shop.captured(name), threading.Barrier(10)

    def ask(_: int) -> httpx.Response:
        together.wait()
        return refund(shop, charge, name)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, range(10)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert refunds_of(shop, charge) == [answers[0].json()["id"]]
    assert len(payouts_of(shop, answers[0].json()["id"])) == 1


def test_refund_without_key_is_refused(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    answer = shop.post("/refunds", None, {"charge_id": charge, "amount": 1000})
    assert answer.status_code == 400
    assert answer.json()["error_code"] == "VALIDATION.idempotency.key_missing"
    assert refunds_of(shop, charge) == []


def test_declined_refund_is_undone_and_its_refusal_replayed(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    shop.provider.order({"decline": 0})
    first, again = refund(shop, charge, name), refund(shop, charge, name)
    assert (first.status_code, again.status_code) == (402, 402)
    assert again.headers["idempotency-status"] == "replayed"
    assert shop.rows("SELECT refunded FROM payments WHERE charge_id = ?", charge) == [(0,)]
    made = refunds_of(shop, charge)
    assert shop.rows("SELECT status FROM refunds WHERE id = ?", made[0]) == [("failed",)]
    assert entries(shop, made[0], "refund") == 0
    assert refund(shop, charge, f"{name}-2", amount=10_000).status_code == 201


# Logs, metrics, traces


def test_log_says_created_or_replayed(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    for _ in range(2):
        refund(shop, charge, name)
    refund(shop, charge, name, amount=2000)
    lines = shop.logged(operation="refunds.create", idempotency_key=name)
    assert [line["outcome"] for line in lines if "outcome" in line] == ["created", "replayed"]
    assert len({line["payload_hash"] for line in lines}) == 2
    assert [line["error_code"] for line in lines if "error_code" in line] == ["CONFLICT.idempotency.payload_mismatch"]
    settled = next(line for line in lines if line["event"] == "settled")
    assert (settled["from_state"], settled["to_state"], settled["attempt"]) == ("running", "settled", 1)


def test_counters_count_created_replayed_and_conflicts(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    names = ("idempotent_created", "idempotent_replayed", "idempotent_conflict")
    # Webhooks are counted, too: let those of other tests arrive first.
    until(lambda: all(event["deliveries"] for event in shop.provider.get("/admin/events")["events"]))
    before = [shop.counted(name) for name in names]
    for amount in (1000, 1000, 1000, 2000):
        made = refund(shop, charge, name, amount=amount)
    assert made.status_code == 409
    until(lambda: all(event["deliveries"] for event in shop.provider.get("/admin/events")["events"]))
    after = [shop.counted(name) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 2, 1]  # the refund and its webhook


def test_request_id_and_traceparent_reach_the_provider(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    shop.provider.order({"error_before": 0}, {"error_before": 0})
    first = refund(shop, charge, name, **{"X-Request-Id": f"{name}-a", "traceparent": TRACE})
    again = refund(shop, charge, name, **{"X-Request-Id": f"{name}-b", "traceparent": TRACE})
    assert [first.headers["x-request-id"], again.headers["x-request-id"]] == [f"{name}-a", f"{name}-b"]
    calls = [call for call in shop.calls() if call["request_id"].startswith(name)]
    assert [call["request_id"][-1] for call in calls] == ["a", "a", "b"]
    assert {call["traceparent"] for call in calls} == {TRACE}
    claimed = shop.logged(event="claimed", operation="refunds.create", idempotency_key=name, traceparent=TRACE)
    assert [(line["attempt"], line["x-request-id"]) for line in claimed] == [(1, f"{name}-a"), (2, f"{name}-b")]
