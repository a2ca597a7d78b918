"""The retry client against the payments service: crashes, presets, Retry-After and duplicates."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from oncemore import Retry
from oncemore.client.keyring.entry import Resumed
from oncemore.client.story import Story
from tests.client.clients import Answer

from ..support.processes import Program
from .callers import (
    BOTH,
    Caller,
    assert_nothing_refunded,
    assert_refunded_once,
    claims,
    codes,
    delays,
    refund_until_exhausted,
    shop_fixture,
)
from .conftest import Shop
from .gateway import NetworkRoute, ScriptedAnswer
from .test_refunds import until

shop = shop_fixture(PAYMENTS_PROVIDER_TIMEOUT="3")


def answered(resumed: Resumed) -> Answer:
    """Return a resumed answer in the form of the other answers; aiohttp has read its body already."""
    response = resumed.response
    body = getattr(response, "_body", None) or response.content
    return Answer(getattr(response, "status_code", 0) or response.status, body, Story(""))


# One key, stored before the first byte is sent


@pytest.mark.parametrize("library", ["httpx", "aiohttp"])
def test_killed_callers_refund_is_resumed_under_the_same_key(
    shop: Shop, route: NetworkRoute, tmp_path: Path, library: str
) -> None:
    """SIGKILL while the provider works: the caller that resumes gets the same refund."""
    keyring, charge = f"sqlite:///{tmp_path}/keys.db", shop.captured(f"killed-{library}")
    asked = len(shop.calls())
    shop.provider.order({"latency_after": 0.7})
    command = [sys.executable, "-m", "tests.examples.killed_caller", library, route.url, keyring, charge]
    with Program(command) as process:
        until(lambda: len(shop.calls()) > asked)
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    caller = Caller(library, route.url, keyring=keyring)
    [entry] = caller.client.pending()
    [resumed] = caller.client.resume()
    assert resumed.error is None
    assert caller.client.pending() == []
    sent = [(seen.headers["idempotency-key"], seen.body) for seen in route.gateway.seen]
    assert sent == [(entry.key, entry.body)] * 2
    assert claims(shop, entry.key) == 1
    assert_refunded_once(shop, charge, answered(resumed))


@pytest.mark.parametrize("library", BOTH)
def test_reused_key_with_another_body_is_not_sent(
    shop: Shop, route: NetworkRoute, tmp_path: Path, library: str
) -> None:
    charge, key = shop.captured(f"own-{library}"), f"own-{library}"
    caller = Caller(library, route.url, keyring=f"sqlite:///{tmp_path}/keys.db")
    first = caller.refund(charge, key=key)
    with pytest.raises(Exception, match="was used here for another request"):
        caller.refund(charge, amount=2000, key=key)
    assert [seen.headers["idempotency-key"] for seen in route.gateway.seen] == [key]
    assert claims(shop, key) == 1
    assert_refunded_once(shop, charge, first)


# Delays


@pytest.mark.parametrize("library", BOTH)
@pytest.mark.parametrize(
    ("retry", "bands"),
    [
        (Retry.playbook(budget=None), [(0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 1.6)]),
        (Retry.matchmaking(budget=None), [(1.0, 2.0), (2.0, 3.0), (4.0, 5.0)]),
    ],
    ids=["playbook", "matchmaking"],
)
def test_delays_of_presets_are_within_documented_bands(
    shop: Shop,
    route: NetworkRoute,
    skipped_sleeps: list[float],
    library: str,
    retry: Retry,
    bands: list[tuple[float, float]],
) -> None:
    """0, 100–200, 200–400, 400–800 and 800–1600 ms before attempts 1 to 5; and 1000·2ⁿ + U(0, 1000) ms."""
    charge = shop.captured(f"schedule-{library}-{len(bands)}")
    route.proxy.refuse()
    story = refund_until_exhausted(Caller(library, route.url, retry), charge)
    assert [low <= delay <= high for delay, (low, high) in zip(skipped_sleeps, bands, strict=True)] == [True] * len(
        bands
    )
    assert story.known == "not_performed"
    assert_nothing_refunded(shop, charge)
    route.proxy.heal()
    again = Caller(library, route.url, retry).refund(charge, key=story.key)
    assert_refunded_once(shop, charge, again)


PRESETS = {
    "user_facing": (4, 10),
    "background_job": (6, 300),
    "webhook_delivery": (10, 86400),
    "scheduled_task": (4, 3600),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_stops_at_its_limits(
    shop: Shop, route: NetworkRoute, skipped_sleeps: list[float], preset: str
) -> None:
    """The service is down during the test, and up again for the next one."""
    attempts, seconds = PRESETS[preset]
    charge = shop.captured(f"preset-{preset}")
    route.proxy.refuse()
    retry = getattr(Retry, preset)(budget=None)
    story = refund_until_exhausted(Caller("httpx", route.url, retry), charge)
    assert len(story.attempts) == attempts
    assert story.reason == "attempts"
    assert sum(skipped_sleeps) <= seconds
    route.proxy.heal()
    assert_refunded_once(shop, charge, Caller("httpx", route.url, retry).refund(charge, key=story.key))


DATES = {
    "IMF-fixdate": "%a, %d %b %Y %H:%M:%S GMT",
    "RFC 850": "%A, %d-%b-%y %H:%M:%S GMT",
    "asctime": "%a %b %e %H:%M:%S %Y",
}


@pytest.mark.parametrize("form", ["4", *DATES, "-4", "4.5", "+4", "soon"])
def test_retry_after_forms_are_parsed(shop: Shop, route: NetworkRoute, skipped_sleeps: list[float], form: str) -> None:
    """The service sends seconds; the gateway sends the other forms."""
    charge = shop.captured(f"after-{form}")
    after = time.strftime(DATES.get(form, form), time.gmtime(time.time() + 40))
    limits = {"RateLimit-Remaining": "0", "RateLimit-Reset": "7"} if form == "4" else {}  # Retry-After comes first
    route.gateway.script.append(ScriptedAnswer(503, {"Retry-After": after, **limits}))
    answer = Caller("httpx", route.url, Retry.background_job(budget=None, base=0.1)).refund(charge)
    [delay] = delays(answer.story)
    if form == "4":
        assert 4 <= delay <= 4.4
    elif form in DATES:
        assert 38 <= delay <= 44.1  # relative to the gateway's Date, in whole seconds
    else:
        assert 0.1 <= delay <= 0.2
    assert skipped_sleeps == [delay]
    assert_refunded_once(shop, charge, answer)


@pytest.mark.parametrize("library", BOTH)
def test_retry_after_beyond_the_deadline_is_not_waited_for(
    shop: Shop, route: NetworkRoute, skipped_sleeps: list[float], library: str
) -> None:
    """The service asks for one second, and half a second is left."""
    charge = shop.captured(f"wish-{library}")
    shop.provider.order({"error_before": 0}, {"error_before": 0})
    answer = Caller(library, route.url, Retry(deadline=0.9, budget=None)).refund(charge)
    assert (codes(answer.story), answer.story.reason, answer.story.known) == (["503"], "deadline", "unknown")
    assert skipped_sleeps == []
    again = Caller(library, route.url).refund(charge, key=answer.story.key)
    assert_refunded_once(shop, charge, again)


@pytest.mark.parametrize("library", BOTH)
def test_request_in_progress_is_waited_for_and_replayed(shop: Shop, route: NetworkRoute, library: str) -> None:
    """409 `in_progress` is retried.  The service waits as long as X-Request-Timeout allows."""
    charge, key, asked = shop.captured(f"twin-{library}"), f"twin-{library}", len(shop.calls())
    shop.provider.order({"latency": 1.0})
    first: list[Answer] = []
    twin = threading.Thread(target=lambda: first.append(Caller(library, route.url).refund(charge, key=key)))
    twin.start()
    until(lambda: len(shop.calls()) > asked)
    second = Caller(library, route.url, Retry(attempt_timeout=0.4, budget=None)).refund(charge, key=key)
    twin.join()
    assert codes(second.story)[0] in ("409", "timeout")
    assert codes(second.story)[-1] == "201"
    assert second.body == first[0].body
    assert claims(shop, key) == 1
    assert_refunded_once(shop, charge, second)
