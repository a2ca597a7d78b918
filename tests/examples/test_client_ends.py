"""When the retry client must stop: at the deadline, when the key expires, and if a second request would be unsafe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from oncemore import Retry
from oncemore.client.errors import OutcomeUnknown, RetriesExhausted
from oncemore.client.hosts import Budget
from oncemore.client.httpx import AsyncRetryTransport
from tests.support.proxy import FaultProxy

from .callers import (
    ALL,
    BOTH,
    PLAYBOOK,
    Caller,
    assert_refunded_once,
    claims,
    codes,
    refund_until_exhausted,
    shop_fixture,
)
from .conftest import Shop
from .gateway import NetworkRoute, ScriptedAnswer
from .test_refunds import refunds_of, until

shop = shop_fixture(PAYMENTS_PROVIDER_TIMEOUT="3")


# Deadlines and cancellation


@pytest.mark.parametrize("library", ALL)
def test_deadline_ends_a_hanging_attempt_and_resume_finds_its_refund(
    shop: Shop, route: NetworkRoute, library: str
) -> None:
    """The refund is made and its answer is lost, so the caller does not know it until it resumes."""
    charge = shop.captured(f"deadline-{library}")
    route.proxy.drop_answers()
    began = time.monotonic()
    story = refund_until_exhausted(Caller(library, route.url, Retry(deadline=0.8, budget=None)), charge)
    assert 0.7 < time.monotonic() - began < 4
    assert story.known == "unknown"
    until(lambda: len(refunds_of(shop, charge)) == 1)
    route.proxy.heal()
    again = Caller(library, route.url).refund(charge, key=story.key)
    assert claims(shop, story.key) == 1
    assert_refunded_once(shop, charge, again)


def test_cancelled_caller_returns_at_once_and_refund_is_made(shop: Shop, route: NetworkRoute) -> None:
    charge, asked = shop.captured("cancelled"), len(shop.calls())
    shop.provider.order({"latency": 0.7})

    async def go() -> float:
        async with httpx.AsyncClient(transport=AsyncRetryTransport(PLAYBOOK), base_url=route.url) as client:
            body, headers = {"charge_id": charge, "amount": 1000}, {"Authorization": "Bearer demo"}
            task = asyncio.create_task(client.post("/refunds", json=body, headers={**headers, "Idempotency-Key": "c"}))
            await asyncio.to_thread(until, lambda: len(shop.calls()) > asked)
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return time.monotonic() - began

    assert asyncio.run(go()) < 0.5
    assert_refunded_once(shop, charge, Caller("httpx", route.url).refund(charge, key="c"))
    assert claims(shop, "c") == 1


def test_interrupted_caller_returns_at_once(shop: Shop, route: NetworkRoute) -> None:
    charge, asked = shop.captured("interrupted"), len(shop.calls())
    shop.provider.order({"latency": 0.7})

    def interrupt() -> None:
        until(lambda: len(shop.calls()) > asked)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Caller("httpx", route.url).refund(charge, key="i")
    assert refunds_of(shop, charge) != []
    assert_refunded_once(shop, charge, Caller("httpx", route.url).refund(charge, key="i"))
    assert claims(shop, "i") == 1


@pytest.mark.parametrize("library", BOTH)
def test_expired_key_is_neither_sent_nor_replaced(
    shop: Shop, route: NetworkRoute, tmp_path: Path, library: str
) -> None:
    keyring, charge = f"sqlite:///{tmp_path}/keys.db", shop.captured(f"old-{library}")
    retry = Retry(deadline=0.7, key_lifetime=1.0, budget=None)
    caller = Caller(library, route.url, retry, keyring)
    route.proxy.drop_answers()
    story = refund_until_exhausted(caller, charge)
    route.proxy.heal()
    until(lambda: len(refunds_of(shop, charge)) == 1)
    sent = len(route.gateway.seen)
    time.sleep(0.5)
    [resumed] = caller.client.resume(opened=True)
    assert isinstance(resumed.error, OutcomeUnknown)
    with pytest.raises(OutcomeUnknown):
        caller.refund(charge, key=story.key)
    assert len(route.gateway.seen) == sent
    assert claims(shop, story.key) == 1
    assert len(refunds_of(shop, charge)) == 1


# Requests that must not be sent again


@pytest.mark.parametrize("library", ALL)
def test_request_without_key_is_retried_only_if_unsent(shop: Shop, route: NetworkRoute, library: str) -> None:
    """Sent to the provider itself, which moves money for each request without a key."""
    caller = Caller(library, route.url, make_key=None)
    route.gateway.target = shop.provider.url
    order = {"amount": 100, "currency": "EUR", "reference": f"bare-{library}"}

    def charged() -> int:
        moved = shop.provider.get("/admin/charges?kind=charge")["movements"]
        return len([movement for movement in moved if movement["reference"] == order["reference"]])

    route.proxy.cut_answers()
    with pytest.raises(Exception) as caught:
        caller.ask("POST", "/charges", order)
    assert not isinstance(caught.value, RetriesExhausted)  # the HTTP library's own error, because no retry was allowed
    until(lambda: charged() == 1)
    assert caller.events == []
    route.proxy.refuse()  # a request that certainly did not arrive may be sent again
    caller._mend = route.proxy.heal
    assert codes(caller.ask("POST", "/charges", order).story) == ["connection", "201"]
    assert charged() == 2


@pytest.mark.parametrize("library", BOTH)
def test_body_that_cannot_be_replayed_is_sent_once(shop: Shop, library: str) -> None:
    charge, key = shop.captured(f"body-{library}"), f"body-{library}"
    data = json.dumps({"charge_id": charge, "amount": 1000}).encode()
    with FaultProxy.before(shop.service.url) as proxy:
        proxy.cut_answers()
        caller = Caller(library, proxy.url(shop.service.url))
        with pytest.raises(RetriesExhausted) as caught:
            caller.ask("POST", "/refunds", iter([data[:10], data[10:]]), key)
    assert caught.value.story is not None
    assert caught.value.story.reason == "body"
    assert len(caught.value.story.attempts) == 1
    assert_refunded_once(shop, charge, Caller(library, shop.service.url).refund(charge, key=key))


# The retry budget


def test_retry_budget_limits_retries_until_the_service_recovers(
    shop: Shop, route: NetworkRoute, skipped_sleeps: list[float]
) -> None:
    """The service is killed, and the gateway counts the requests meanwhile."""
    charge = shop.captured("storm", amount=10**6)
    caller = Caller("httpx", route.url, Retry(budget=Budget(tokens=10, ratio=1.0)))
    shop.service.crash()
    made = []
    for number in range(20):
        before = len(route.gateway.seen)
        assert caller.refund(charge, key=f"storm-{number}").status == 502
        made.append(len(route.gateway.seen) - before)
    assert made[0] == 5
    spent = made[5:]
    assert sum(spent) <= 1.2 * len(spent)
    shop.service.start()
    route.gateway.script.append(ScriptedAnswer(503))
    assert codes(caller.refund(charge, 1, key="storm-first").story) == [
        "503"
    ]  # the service is up, but the budget is still empty
    for number in range(8):
        assert caller.refund(charge, 1, key=f"storm-well-{number}").status == 201
    route.gateway.script.append(ScriptedAnswer(503))
    assert codes(caller.refund(charge, 1, key="storm-last").story) == ["503", "201"]
    assert len(refunds_of(shop, charge)) == 9
