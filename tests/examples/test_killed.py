"""SIGKILL at chosen and at random moments: the money moves once, and a retry gets its answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from .conftest import Shop
from .test_refunds import entries, payouts_of, refund, refunds_of, until

pytestmark = pytest.mark.chaos


@contextmanager
def asking(ask: Callable[[], httpx.Response]) -> Iterator[list[httpx.Response]]:
    """A caller in a thread of its own, which may never get an answer."""
    answers: list[httpx.Response] = []

    def call() -> None:
        with suppress(httpx.TransportError):
            answers.append(ask())

    caller = threading.Thread(target=call)
    caller.start()
    try:
        yield answers
    finally:
        caller.join()


@pytest.fixture(autouse=True)
def alive(shop: Shop) -> Iterator[None]:
    """Start the service again if a test failed while it was down."""
    yield
    if not shop.service.is_ready():
        shop.service.start()


@pytest.mark.parametrize("moment", ["before the money moves", "after it moved"])
def test_retry_after_kill_during_refund_completes_it(shop: Shop, name: str, moment: str) -> None:
    charge, asked, moved = shop.captured(name), len(shop.calls()), shop.payouts()
    shop.provider.order({"latency": 2} if moment.startswith("before") else {"latency_after": 2})
    with asking(lambda: refund(shop, charge, name)) as answers:
        until(lambda: len(shop.calls()) > asked and (moment.startswith("before") or shop.payouts() > moved))
        done = time.monotonic() + 2
        shop.service.crash()
    assert answers == []
    shop.service.start()
    again = refund(shop, charge, name)
    assert again.status_code == 201
    made = again.json()["id"]
    # The provider has finished the first call, from the killed service.
    time.sleep(max(0.5, done + 0.5 - time.monotonic()))
    assert len(payouts_of(shop, made)) == 1
    assert refunds_of(shop, charge) == [made]
    assert entries(shop, made, "refund") == 1
    assert shop.rows("SELECT refunded FROM payments WHERE charge_id = ?", charge) == [(1000,)]
    until(lambda: entries(shop, made, "settlement") == 1)


def test_retry_after_kill_behind_the_answer_replays_it(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    first = refund(shop, charge, name)
    shop.service.restart()
    again = refund(shop, charge, name)
    assert again.content == first.content
    assert again.headers["idempotency-status"] == "replayed"
    assert len(payouts_of(shop, first.json()["id"])) == 1


def test_key_of_killed_refund_refuses_another_amount(shop: Shop, name: str) -> None:
    charge, moved = shop.captured(name), shop.payouts()
    shop.provider.order({"latency_after": 2})
    with asking(lambda: refund(shop, charge, name)):
        until(lambda: shop.payouts() > moved)
        shop.service.crash()
    shop.service.start()
    assert refund(shop, charge, name, amount=2000).json()["error_code"] == "CONFLICT.idempotency.payload_mismatch"
    assert refund(shop, charge, name).status_code == 201
    assert shop.payouts() == moved + 1


def test_webhook_to_a_killed_service_is_booked_once(shop: Shop, name: str) -> None:
    charge, moved, asked = shop.captured(name), shop.payouts(), len(shop.calls())
    shop.provider.order({"latency": 1})
    with asking(lambda: refund(shop, charge, name)):
        until(lambda: len(shop.calls()) > asked)
        shop.service.crash()  # the payout and its webhook happen while the service is down
    until(lambda: shop.payouts() > moved)
    shop.service.start()
    made = refund(shop, charge, name).json()["id"]
    until(lambda: entries(shop, made, "settlement") == 1)
    assert len(payouts_of(shop, made)) == 1


def test_kills_at_random_moments_leave_one_payment_and_refund(shop: Shop, name: str) -> None:
    chance = random.Random(name)
    charge, moved = shop.captured(name), shop.payouts()
    for number in range(5):
        order, asked = f"{name}-{number}", threading.Event()

        def ask(order: str = order, asked: threading.Event = asked) -> httpx.Response:
            asked.set()
            shop.post("/payments", order, {"order_id": order, "customer_id": "c", "amount": 100})
            return refund(shop, charge, order, amount=100)

        with asking(ask):
            asked.wait()
            time.sleep(chance.uniform(0, 0.1))
            shop.service.crash()
        shop.service.start()
        paid = shop.post("/payments", order, {"order_id": order, "customer_id": "c", "amount": 100})
        again = refund(shop, charge, order, amount=100)
        assert (paid.status_code, again.status_code) == (201, 201)
        assert shop.rows("SELECT id FROM payments WHERE order_id = ?", order) == [(paid.json()["id"],)]
        assert len(payouts_of(shop, again.json()["id"])) == 1
        assert entries(shop, again.json()["id"], "refund") == 1
    assert shop.payouts() == moved + 5
    assert len(refunds_of(shop, charge)) == 5
