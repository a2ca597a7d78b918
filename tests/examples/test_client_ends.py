"""Where the client must stop: at the deadline, at the end of a key's life, and before it sends anything that it must not."""

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
    given_up,
    shop_with,
)
from .conftest import Shop
from .gateway import Road, Said
from .test_refunds import refunds_of, until

shop = shop_with(PAYMENTS_PROVIDER_TIMEOUT="3")


# When it must end


@pytest.mark.parametrize("library", ALL)
def test_hanging_attempt_is_cut_and_its_outcome_found_later(shop: Shop, road: Road, library: str) -> None:
    """The refund is made, and its answer is lost: unknown to the caller until asked once more."""
    charge = shop.captured(f"deadline-{library}")
    road.proxy.drop_answers()
    began = time.monotonic()
    story = given_up(Caller(library, road.url, Retry(deadline=0.8, budget=None)), charge)
    assert 0.7 < time.monotonic() - began < 4
    assert story.known == "unknown"
    until(lambda: len(refunds_of(shop, charge)) == 1)
    road.proxy.heal()
    again = Caller(library, road.url).refund(charge, key=story.key)
    assert claims(shop, story.key) == 1
    assert_refunded_once(shop, charge, again)


def test_cancelled_caller_returns_at_once_and_refund_completes(shop: Shop, road: Road) -> None:
    charge, asked = shop.captured("cancelled"), len(shop.calls())
    shop.provider.order({"latency": 0.7})

    async def go() -> float:
        async with httpx.AsyncClient(transport=AsyncRetryTransport(PLAYBOOK), base_url=road.url) as client:
            body, headers = {"charge_id": charge, "amount": 1000}, {"Authorization": "Bearer demo"}
            task = asyncio.create_task(client.post("/refunds", json=body, headers={**headers, "Idempotency-Key": "c"}))
            await asyncio.to_thread(until, lambda: len(shop.calls()) > asked)
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return time.monotonic() - began

    assert asyncio.run(go()) < 0.5
    assert_refunded_once(shop, charge, Caller("httpx", road.url).refund(charge, key="c"))
    assert claims(shop, "c") == 1


def test_an_interrupted_caller_is_gone_at_once_too(shop: Shop, road: Road) -> None:
    charge, asked = shop.captured("interrupted"), len(shop.calls())
    shop.provider.order({"latency": 0.7})

    def interrupt() -> None:
        until(lambda: len(shop.calls()) > asked)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Caller("httpx", road.url).refund(charge, key="i")
    assert refunds_of(shop, charge) != []
    assert_refunded_once(shop, charge, Caller("httpx", road.url).refund(charge, key="i"))
    assert claims(shop, "i") == 1


@pytest.mark.parametrize("library", BOTH)
def test_key_past_its_lifetime_is_not_sent(shop: Shop, road: Road, tmp_path: Path, library: str) -> None:
    keyring, charge = f"sqlite:///{tmp_path}/keys.db", shop.captured(f"old-{library}")
    retry = Retry(deadline=0.7, key_lifetime=1.0, budget=None)
    caller = Caller(library, road.url, retry, keyring)
    road.proxy.drop_answers()
    story = given_up(caller, charge)
    road.proxy.heal()
    until(lambda: len(refunds_of(shop, charge)) == 1)
    sent = len(road.gateway.seen)
    time.sleep(0.5)
    [resumed] = caller.client.resume(opened=True)
    assert isinstance(resumed.error, OutcomeUnknown)
    with pytest.raises(OutcomeUnknown):
        caller.refund(charge, key=story.key)
    assert len(road.gateway.seen) == sent
    assert claims(shop, story.key) == 1
    assert len(refunds_of(shop, charge)) == 1


# What must not be sent again


@pytest.mark.parametrize("library", ALL)
def test_request_without_key_is_not_resent(shop: Shop, road: Road, library: str) -> None:
    """To the provider itself, which does as it is told, every time; and the service is not asked in vain."""
    caller = Caller(library, road.url, make_key=None)
    road.gateway.target = shop.provider.url
    order = {"amount": 100, "currency": "EUR", "reference": f"bare-{library}"}

    def charged() -> int:
        moved = shop.provider.get("/admin/charges?kind=charge")["movements"]
        return len([movement for movement in moved if movement["reference"] == order["reference"]])

    road.proxy.cut_answers()
    with pytest.raises(Exception) as caught:
        caller.ask("POST", "/charges", order)
    assert not isinstance(caught.value, RetriesExhausted)  # the library's own error: there was nothing to exhaust
    until(lambda: charged() == 1)
    assert caller.events == []
    road.proxy.refuse()  # what certainly did not arrive may be sent again
    caller._mend = road.proxy.heal
    assert codes(caller.ask("POST", "/charges", order).story) == ["connection", "201"]
    assert charged() == 2


@pytest.mark.parametrize("library", BOTH)
def test_single_use_body_is_sent_once(shop: Shop, library: str) -> None:
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


# When everyone is in trouble


def test_budget_limits_retries_and_recovers_with_service(shop: Shop, road: Road, quiet: list[float]) -> None:
    """It was killed; the gateway counts what it is asked meanwhile."""
    charge = shop.captured("storm", amount=10**6)
    caller = Caller("httpx", road.url, Retry(budget=Budget(tokens=10, ratio=1.0)))
    shop.service.crash()
    made = []
    for number in range(20):
        before = len(road.gateway.seen)
        assert caller.refund(charge, key=f"storm-{number}").status == 502
        made.append(len(road.gateway.seen) - before)
    assert made[0] == 5
    spent = made[5:]
    assert sum(spent) <= 1.2 * len(spent)
    shop.service.start()
    road.gateway.script.append(Said(503))
    assert codes(caller.refund(charge, 1, key="storm-first").story) == ["503"]  # it is well, but nobody knows yet
    for number in range(8):
        assert caller.refund(charge, 1, key=f"storm-well-{number}").status == 201
    road.gateway.script.append(Said(503))
    assert codes(caller.refund(charge, 1, key="storm-last").story) == ["503", "201"]
    assert len(refunds_of(shop, charge)) == 9
