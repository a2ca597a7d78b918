"""Which answers are retried, row by row: the client, the real payments service and its provider, judged by the ledger.

What the service or its provider can cause, they cause; a network that fails is a TCP proxy that fails; a service that is
gone was killed.  Only what none of them ever says (408, 429, 403, 425) is said by the gateway before them.
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
    shop_with,
)
from .callers import told as problem
from .conftest import Shop
from .gateway import Road, Said

shop = shop_with(PAYMENTS_PROVIDER_TIMEOUT="0.6")


# What is retried

Break = Callable[
    [Shop, Road], Callable[[], object] | None
]  # break something; what mends it before the retry, if it must be


def said(status: int, code: str = "", **headers: str) -> Break:
    """The gateway's own answer, once."""
    document = {"error_code": code, "retryable": True} if code else None

    def act(shop: Shop, road: Road) -> None:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        road.gateway.script.append(Said(status, fields, document))

    return act


def table_gone(shop: Shop, road: Road) -> Callable[[], object]:
    """The service's own bug: it cannot book."""
    shop.rows("ALTER TABLE refunds RENAME TO refunds_gone")
    return lambda: shop.rows("ALTER TABLE refunds_gone RENAME TO refunds")


def killed(shop: Shop, road: Road) -> Callable[[], object]:
    """kill -9: the gateway finds nobody there."""
    shop.service.crash()
    return shop.service.start


def ordered(*quirks: dict[str, float]) -> Break:
    """The provider's trouble; it is asked twice by the service itself, where there is time."""
    return lambda shop, road: shop.provider.order(*quirks)


def network(fault: str, **options: Any) -> Break:
    def act(shop: Shop, road: Road) -> Callable[[], object]:
        getattr(road.proxy, fault)(**options)
        return road.proxy.heal

    return act


@dataclass
class Row:
    """A row of a table: what goes wrong, how the attempt ends, how long the client then waits, and why."""

    seed: str
    breaks: Break
    ends: str
    waits: tuple[float, float]
    code: str = ""


BACKOFF = (0.1, 0.2)  # the playbook's first
A_SECOND = (1.0, 1.1)  # the service's Retry-After, and a little more, so that not all come back at once
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
def test_what_may_pass_is_asked_once_more_and_refunded_once(
    shop: Shop, road: Road, quiet: list[float], library: str, name: str
) -> None:
    """The rows of "Retryable Errors", of "When to retry" and of the error taxonomy that say yes.

    408, 429 and the transient one are the gateway's words; all others are the service's, its provider's or the network's.
    """
    row = RETRIED[name]
    charge = shop.captured(f"{library}-{name}")
    before = len(shop.logged(event="claimed", operation="refunds.create"))
    mend = row.breaks(shop, road)
    retry = PLAYBOOK if name != "network timeout" else PLAYBOOK.playbook(budget=None, attempt_timeout=0.7)
    answer = Caller(library, road.url, retry, mend=mend).refund(charge)
    assert codes(answer.story) == [row.ends, "201"]
    assert row.code in answer.story.attempts[0].verdict.note
    assert row.waits[0] <= delays(answer.story)[0] <= row.waits[1]
    assert quiet == [delay for delay in delays(answer.story) if delay]
    assert_refunded_once(shop, charge, answer)
    mine = shop.logged(event="claimed", operation="refunds.create")[before:]
    assert {line["idempotency_key"] for line in mine} == {answer.story.key}
    assert len({(seen.headers["idempotency-key"], seen.body) for seen in road.gateway.seen}) == 1


@pytest.mark.parametrize("library", ["requests", "aiohttp"])
@pytest.mark.parametrize("name", ["408", "503", "reset within"])
def test_the_other_libraries_do_so_too(shop: Shop, road: Road, quiet: list[float], library: str, name: str) -> None:
    test_what_may_pass_is_asked_once_more_and_refunded_once(shop, road, quiet, library, name)


@pytest.mark.parametrize("library", ALL)
def test_provider_duplicate_is_final(shop: Shop, road: Road, library: str) -> None:
    """The taxonomy's `PROVIDER.duplicate | Provider replay | no (already applied) | Surface existing result`.

    It moved the money and answered 502; asked again by the service, it says "duplicate", and what it did is the result.
    """
    charge, asked = shop.captured(f"duplicate-{library}"), len(shop.calls())
    shop.provider.order({"error_after": 0})
    answer = Caller(library, road.url).refund(charge)
    assert codes(answer.story) == ["201"]
    assert len({call["key"] for call in shop.calls()[asked:]}) == 1
    assert len(shop.calls()) == asked + 2
    assert_refunded_once(shop, charge, answer)


# What is not


@pytest.mark.parametrize("library", BOTH)
class TestWhatWillNotChangeIsAskedOnce:
    """The rows that say no.  One attempt, one answer, and no effect."""

    def check(self, answer: Any, status: int, code: str = "") -> None:
        assert codes(answer.story) == [str(status)]
        assert answer.status == status
        if code:
            assert problem(answer).code == code
            assert problem(answer).retryable is False
        assert answer.story.known == "refused"

    def test_400_fix_the_request(self, shop: Shop, road: Road, library: str) -> None:
        """`400 | Bad Request | No`; `VALIDATION.*`: a refund that was sent without a key."""
        charge = shop.captured(f"400-{library}")
        answer = Caller(library, road.url, make_key=None).refund(charge)
        self.check(answer, 400, "VALIDATION.idempotency.key_missing")
        assert_nothing_refunded(shop, charge)

    def test_401_authenticate_anew(self, shop: Shop, road: Road, library: str) -> None:
        """`401 | Unauthorized | No`; `AUTH.*`: a webhook that the provider did not sign."""
        body = {"type": "refund.succeeded", "data": {"reference": "rf_0"}}
        signed = Signing(new_secret()).sign(json.dumps(body).encode())
        answer = Caller(library, road.url).ask("POST", "/webhooks/provider", body, **signed)
        self.check(answer, 401, "AUTH.webhook_signature")
        assert shop.rows("SELECT 1 FROM entries WHERE reference = 'rf_0'") == []

    @pytest.mark.parametrize("status", [403, 425])
    def test_403_and_what_no_row_names(self, shop: Shop, road: Road, library: str, status: int) -> None:
        """`403 | Forbidden | No`, and `4xx other than 429`.  Both are the gateway's: the service never says them."""
        charge = shop.captured(f"{status}-{library}")
        road.gateway.script.append(Said(status))
        self.check(Caller(library, road.url).refund(charge), status)
        assert_nothing_refunded(shop, charge)

    def test_404_what_is_not_there(self, shop: Shop, road: Road, library: str) -> None:
        """`404 | Not Found | No`."""
        before = shop.rows("SELECT count(*) FROM refunds")
        self.check(Caller(library, road.url).refund("ch_0"), 404, "NOT_FOUND.resource")
        assert shop.rows("SELECT count(*) FROM refunds") == before

    def test_409_a_key_that_names_something_else(self, shop: Shop, road: Road, library: str) -> None:
        """`409 | Conflict | No`; `CONFLICT.idempotency.payload_mismatch`."""
        charge, caller, key = shop.captured(f"409-{library}"), Caller(library, road.url), f"mine-{library}"
        first, other = caller.refund(charge, key=key), caller.refund(charge, amount=2000, key=key)
        self.check(other, 409, "CONFLICT.idempotency.payload_mismatch")
        assert first.story.key == key
        assert_refunded_once(shop, charge, first)

    def test_409_a_state_that_does_not_allow_it(self, shop: Shop, road: Road, library: str) -> None:
        """`409 | Conflict | No | Resolve conflict`: an order that is paid, and a payment that is captured."""
        order, caller = f"409s-{library}", Caller(library, road.url)
        shop.captured(order)
        again = caller.ask("POST", "/payments", {"order_id": order, "customer_id": "c", "amount": 1})
        self.check(again, 409, "CONFLICT.order_paid")
        [(payment,)] = shop.rows("SELECT id FROM payments WHERE order_id = ?", order)
        self.check(caller.ask("POST", f"/payments/{payment}/capture", None), 409, "CONFLICT.state")
        assert shop.rows("SELECT kind FROM entries WHERE reference = ?", payment) == [("capture",)]

    def test_402_and_422_the_answer_is_no(self, shop: Shop, road: Road, library: str) -> None:
        """`VALIDATION.*`, and a provider that declines: a retry would ask for the same and hear the same."""
        charge, caller = shop.captured(f"422-{library}"), Caller(library, road.url)
        self.check(caller.refund(charge, amount=10**9), 422, "VALIDATION.amount")
        shop.provider.order({"decline": 0})
        self.check(caller.refund(charge), 402, "PROVIDER.declined")
        assert_nothing_refunded(shop, charge)

    def test_412_and_428_somebody_else_was_first(self, shop: Shop, road: Road, library: str) -> None:
        """The playbook's `PUT + If-Match (ETag)`: what was seen is no longer so, or was never looked at."""
        shop.captured(f"412-{library}")
        caller, body = Caller(library, road.url), {"name": library, "email": ""}
        self.check(caller.ask("PUT", "/customers/cus_1", body), 428, "PRECONDITION.if_match_required")
        stale = caller.ask("PUT", "/customers/cus_1", body, **{"If-Match": '"77"'})
        self.check(stale, 412, "PRECONDITION.if_match_failed")
        assert shop.rows("SELECT 1 FROM customers WHERE name = ?", library) == []


@pytest.mark.parametrize("library", BOTH)
def test_what_the_server_says_of_retries_beats_the_table(
    shop: Shop, road: Road, quiet: list[float], library: str
) -> None:
    """The gateway's words: a 400 that shall be repeated, a 503 that shall not, and a 503 from its store."""
    charge = shop.captured(f"hints-{library}")
    caller = Caller(library, road.url)
    road.gateway.script.append(Said(503, {}, {"error_code": "X.broken", "retryable": False}))
    assert codes(caller.refund(charge).story) == ["503"]
    road.gateway.script.append(Said(503, {"Stripe-Should-Retry": "false"}))
    assert codes(caller.refund(charge).story) == ["503"]
    road.gateway.script.append(Said(503, {"Idempotency-Status": "replayed"}))
    final = caller.refund(charge)
    assert (codes(final.story), final.story.known) == (["503"], "refused")
    assert quiet == []
    assert claims(shop, final.story.key) == 0
    assert_nothing_refunded(shop, charge)
    road.gateway.script.append(Said(400, {"Stripe-Should-Retry": "true"}))
    answer = caller.refund(charge)
    assert codes(answer.story) == ["400", "201"]
    assert_refunded_once(shop, charge, answer)
