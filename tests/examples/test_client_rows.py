"""Which answers the client retries, with the payments service and its provider; the ledger shows the effects.

The service or its provider causes each failure that it can cause, a TCP proxy causes those of the network, and a service
that is down was killed.  Only statuses that none of them sends (408, 429, 403, 425) come from the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from oncemore.webhooks.signature import Signing, new_secret

from .callers import (
    ALL,
    BOTH,
    PLAYBOOK,
    Caller,
    assert_nothing_refunded,
    assert_refunded_once,
    claims,
    codes,
    delays,
    shop_fixture,
)
from .callers import told as problem
from .conftest import Shop
from .gateway import NetworkRoute, ScriptedAnswer

shop = shop_fixture(PAYMENTS_PROVIDER_TIMEOUT="0.6")


# Retried

Break = Callable[
    [Shop, NetworkRoute], Callable[[], object] | None
]  # break something, and return the repair to be made before the retry, if any


def said(status: int, code: str = "", **headers: str) -> Break:
    """The gateway answers by itself, once."""
    document = {"error_code": code, "retryable": True} if code else None

    def act(shop: Shop, route: NetworkRoute) -> None:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        route.gateway.script.append(ScriptedAnswer(status, fields, document))

    return act


def table_gone(shop: Shop, route: NetworkRoute) -> Callable[[], object]:
    """The service has a bug: it cannot book."""
    shop.rows("ALTER TABLE refunds RENAME TO refunds_gone")
    return lambda: shop.rows("ALTER TABLE refunds_gone RENAME TO refunds")


def killed(shop: Shop, route: NetworkRoute) -> Callable[[], object]:
    """The service is killed, so the gateway cannot connect."""
    shop.service.crash()
    return shop.service.start


def ordered(*quirks: dict[str, float]) -> Break:
    """The provider fails; the service itself retries once if there is time."""
    return lambda shop, route: shop.provider.order(*quirks)


def network(fault: str, **options: Any) -> Break:
    def act(shop: Shop, route: NetworkRoute) -> Callable[[], object]:
        getattr(route.proxy, fault)(**options)
        return route.proxy.heal

    return act


@dataclass
class Row:
    """A failure, the end of the attempt, the delay before the retry, and its reason."""

    seed: str
    breaks: Break
    ends: str
    waits: tuple[float, float]
    code: str = ""


BACKOFF = (0.1, 0.2)  # the client's first delay
A_SECOND = (1.0, 1.1)  # the service's Retry-After plus jitter
RETRIED = {
    "408": Row("408 | Request Timeout | Yes | Immediate retry", said(408), "408", (0, 0)),
    "429": Row(
        "429 | Rate Limited | Yes | Honor Retry-After; RATE_LIMIT.exceeded",
        said(429, "RATE_LIMIT.exceeded", Retry_After="3"),
        "429",
        (3.0, 3.3),
        "RATE_LIMIT.exceeded",
    ),
    "500": Row("500 | Internal Error | Yes | Backoff retry", table_gone, "500", BACKOFF),
    "502": Row("502 | Bad Gateway | Yes | Backoff retry", killed, "502", BACKOFF),
    "503": Row(
        "503 | Service Unavailable | Yes | Honor Retry-After; DEPENDENCY.unavailable",
        ordered({"error_before": 0}, {"error_before": 0}),
        "503",
        A_SECOND,
        "DEPENDENCY.unavailable",
    ),
    "504": Row(
        "504 | Gateway Timeout | Yes | DEPENDENCY.timeout",
        ordered({"timeout_after": 1.0}),
        "504",
        A_SECOND,
        "DEPENDENCY.timeout",
    ),
    "transient": Row(
        "TRANSIENT.* | Unknown transient | yes", said(400, "TRANSIENT.glitch"), "400", BACKOFF, "TRANSIENT.glitch"
    ),
    "network timeout": Row("network timeouts → retryable", network("drop_answers"), "timeout", BACKOFF),
    "reset": Row("connection resets → retryable", network("cut_answers"), "connection", BACKOFF),
    "reset within": Row("connection resets → retryable", network("cut_answers", after=150), "connection", BACKOFF),
    "refused": Row("connection resets → retryable", network("refuse"), "connection", BACKOFF),
}


@pytest.mark.parametrize("library", BOTH)
@pytest.mark.parametrize("name", RETRIED)
def test_transient_failure_is_retried_and_refunded_once(
    shop: Shop, route: NetworkRoute, skipped_sleeps: list[float], library: str, name: str
) -> None:
    """The gateway sends 408, 429 and the transient problem; the service, its provider or the network cause the others."""
    row = RETRIED[name]
    charge = shop.captured(f"{library}-{name}")
    before = len(shop.logged(event="claimed", operation="refunds.create"))
    mend = row.breaks(shop, route)
    retry = PLAYBOOK if name != "network timeout" else PLAYBOOK.playbook(budget=None, attempt_timeout=0.7)
    answer = Caller(library, route.url, retry, mend=mend).refund(charge)
    assert codes(answer.story) == [row.ends, "201"]
    assert row.code in answer.story.attempts[0].verdict.note
    assert row.waits[0] <= delays(answer.story)[0] <= row.waits[1]
    assert skipped_sleeps == [delay for delay in delays(answer.story) if delay]
    assert_refunded_once(shop, charge, answer)
    mine = shop.logged(event="claimed", operation="refunds.create")[before:]
    assert {line["idempotency_key"] for line in mine} == {answer.story.key}
    assert len({(seen.headers["idempotency-key"], seen.body) for seen in route.gateway.seen}) == 1


@pytest.mark.parametrize("library", ["requests", "aiohttp"])
@pytest.mark.parametrize("name", ["408", "503", "reset within"])
def test_transient_failure_is_retried_by_every_library(
    shop: Shop, route: NetworkRoute, skipped_sleeps: list[float], library: str, name: str
) -> None:
    test_transient_failure_is_retried_and_refunded_once(shop, route, skipped_sleeps, library, name)


@pytest.mark.parametrize("library", ALL)
def test_duplicate_at_the_provider_returns_the_existing_payout(shop: Shop, route: NetworkRoute, library: str) -> None:
    """The provider moved the money and answered 502.  When the service calls again, it says "duplicate" with that movement."""
    charge, asked = shop.captured(f"duplicate-{library}"), len(shop.calls())
    shop.provider.order({"error_after": 0})
    answer = Caller(library, route.url).refund(charge)
    assert codes(answer.story) == ["201"]
    assert len({call["key"] for call in shop.calls()[asked:]}) == 1
    assert len(shop.calls()) == asked + 2
    assert_refunded_once(shop, charge, answer)


# Not retried


@pytest.mark.parametrize("library", BOTH)
class TestWhatWillNotChangeIsAskedOnce:
    """Permanent errors: one attempt, one answer, and no effect."""

    def check(self, answer: Any, status: int, code: str = "") -> None:
        assert codes(answer.story) == [str(status)]
        assert answer.status == status
        if code:
            assert problem(answer).code == code
            assert problem(answer).retryable is False
        assert answer.story.known == "refused"

    def test_400_is_not_retried(self, shop: Shop, route: NetworkRoute, library: str) -> None:
        """A refund without a key."""
        charge = shop.captured(f"400-{library}")
        answer = Caller(library, route.url, make_key=None).refund(charge)
        self.check(answer, 400, "VALIDATION.idempotency.key_missing")
        assert_nothing_refunded(shop, charge)

    def test_401_is_not_retried(self, shop: Shop, route: NetworkRoute, library: str) -> None:
        """A webhook that the provider did not sign."""
        body = {"type": "refund.succeeded", "data": {"reference": "rf_0"}}
        signed = Signing(new_secret()).sign(json.dumps(body).encode())
        answer = Caller(library, route.url).ask("POST", "/webhooks/provider", body, **signed)
        self.check(answer, 401, "AUTH.webhook_signature")
        assert shop.rows("SELECT 1 FROM entries WHERE reference = 'rf_0'") == []

    @pytest.mark.parametrize("status", [403, 425])
    def test_403_and_other_4xx_are_not_retried(
        self, shop: Shop, route: NetworkRoute, library: str, status: int
    ) -> None:
        """The gateway sends them, because the service never does."""
        charge = shop.captured(f"{status}-{library}")
        route.gateway.script.append(ScriptedAnswer(status))
        self.check(Caller(library, route.url).refund(charge), status)
        assert_nothing_refunded(shop, charge)

    def test_404_is_not_retried(self, shop: Shop, route: NetworkRoute, library: str) -> None:
        before = shop.rows("SELECT count(*) FROM refunds")
        self.check(Caller(library, route.url).refund("ch_0"), 404, "NOT_FOUND.resource")
        assert shop.rows("SELECT count(*) FROM refunds") == before

    def test_409_payload_mismatch_is_not_retried(self, shop: Shop, route: NetworkRoute, library: str) -> None:
        charge, caller, key = shop.captured(f"409-{library}"), Caller(library, route.url), f"mine-{library}"
        first, other = caller.refund(charge, key=key), caller.refund(charge, amount=2000, key=key)
        self.check(other, 409, "CONFLICT.idempotency.payload_mismatch")
        assert first.story.key == key
        assert_refunded_once(shop, charge, first)

    def test_409_wrong_state_is_not_retried(self, shop: Shop, route: NetworkRoute, library: str) -> None:
        """An order that is paid already, and a payment that is captured."""
        order, caller = f"409s-{library}", Caller(library, route.url)
        shop.captured(order)
        again = caller.ask("POST", "/payments", {"order_id": order, "customer_id": "c", "amount": 1})
        self.check(again, 409, "CONFLICT.order_paid")
        [(payment,)] = shop.rows("SELECT id FROM payments WHERE order_id = ?", order)
        self.check(caller.ask("POST", f"/payments/{payment}/capture", None), 409, "CONFLICT.state")
        assert shop.rows("SELECT kind FROM entries WHERE reference = ?", payment) == [("capture",)]

    def test_402_and_422_are_not_retried(self, shop: Shop, route: NetworkRoute, library: str) -> None:
        """An invalid amount, and a provider that declines."""
        charge, caller = shop.captured(f"422-{library}"), Caller(library, route.url)
        self.check(caller.refund(charge, amount=10**9), 422, "VALIDATION.amount")
        shop.provider.order({"decline": 0})
        self.check(caller.refund(charge), 402, "PROVIDER.declined")
        assert_nothing_refunded(shop, charge)

    def test_412_and_428_are_not_retried(self, shop: Shop, route: NetworkRoute, library: str) -> None:
        """A change with an outdated ETag, and one without If-Match."""
        shop.captured(f"412-{library}")
        caller, body = Caller(library, route.url), {"name": library, "email": ""}
        self.check(caller.ask("PUT", "/customers/cus_1", body), 428, "PRECONDITION.if_match_required")
        stale = caller.ask("PUT", "/customers/cus_1", body, **{"If-Match": '"77"'})
        self.check(stale, 412, "PRECONDITION.if_match_failed")
        assert shop.rows("SELECT 1 FROM customers WHERE name = ?", library) == []


@pytest.mark.parametrize("library", BOTH)
def test_retryable_in_a_problem_overrides_the_status(
    shop: Shop, route: NetworkRoute, skipped_sleeps: list[float], library: str
) -> None:
    """The gateway sends a retryable 400, a 503 that is not retryable, and a 503 of a store."""
    charge = shop.captured(f"hints-{library}")
    caller = Caller(library, route.url)
    route.gateway.script.append(ScriptedAnswer(503, {}, {"error_code": "X.broken", "retryable": False}))
    assert codes(caller.refund(charge).story) == ["503"]
    route.gateway.script.append(ScriptedAnswer(503, {"Stripe-Should-Retry": "false"}))
    assert codes(caller.refund(charge).story) == ["503"]
    route.gateway.script.append(ScriptedAnswer(503, {"Idempotency-Status": "replayed"}))
    final = caller.refund(charge)
    assert (codes(final.story), final.story.known) == (["503"], "refused")
    assert skipped_sleeps == []
    assert claims(shop, final.story.key) == 0
    assert_nothing_refunded(shop, charge)
    route.gateway.script.append(ScriptedAnswer(400, {"Stripe-Should-Retry": "true"}))
    answer = caller.refund(charge)
    assert codes(answer.story) == ["400", "201"]
    assert_refunded_once(shop, charge, answer)
