"""The completer finishes interrupted refunds without a retry of the caller, and the money moves once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .conftest import STORES, Shop
from .test_killed import asking
from .test_refunds import entries, payouts_of, refund, refunds_of, until

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module", params=STORES)
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """The payments system with the completer and a short lease."""
    database = request.getfixturevalue("shop_database") if request.param == "postgres" else ""
    with Shop(database=database, PAYMENTS_PROVIDER_TIMEOUT="1.5") as shop:
        yield shop


@pytest.mark.parametrize("moment", ["before the money moves", "after it moved"])
def test_completer_finishes_a_killed_refund_without_its_caller(shop: Shop, name: str, moment: str) -> None:
    """The request is stored, and the completer sends it through the middleware again."""
    charge, asked, moved = shop.captured(name), len(shop.calls()), shop.payouts()
    shop.provider.order({"latency": 2} if moment.startswith("before") else {"latency_after": 2})
    with asking(lambda: refund(shop, charge, name)):
        until(lambda: len(shop.calls()) > asked and (moment.startswith("before") or shop.payouts() > moved))
        shop.service.crash()
    shop.service.start()
    until(lambda: [entries(shop, made, "refund") for made in refunds_of(shop, charge)] == [1])
    [made] = refunds_of(shop, charge)
    time.sleep(2)  # until the provider has finished the first call, from the killed service
    assert len(payouts_of(shop, made)) == 1
    late = refund(shop, charge, name)
    assert (late.status_code, late.json()["id"]) == (201, made)
    assert late.headers["idempotency-status"] == "replayed"
    assert shop.payouts() == moved + 1


def test_completer_finishes_a_refund_after_provider_downtime(shop: Shop, name: str) -> None:
    """The caller got a 5xx and does not retry."""
    charge, moved = shop.captured(name), shop.payouts()
    shop.provider.order(*[{"error_before": 503}] * 4)
    assert refund(shop, charge, name).status_code >= 500
    until(lambda: [entries(shop, made, "refund") for made in refunds_of(shop, charge)] == [1])
    assert shop.payouts() == moved + 1
