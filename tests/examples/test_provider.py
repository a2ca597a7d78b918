"""The example's provider and its faults, on which the other tests rely."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from examples.payments.processes import Provider, http


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider(webhooks="") as provider:
        yield provider


def charge(provider: Provider, key: str = "", amount: int = 100, **headers: str) -> httpx.Response:
    body = {"amount": amount, "currency": "EUR", "reference": "r"}
    named = {"Idempotency-Key": key} if key else {}
    return http.post(f"{provider.url}/charges", json=body, headers={**named, **headers}, timeout=2)


def per_key(provider: Provider, key: str) -> int:
    told: dict[str, Any] = provider.get("/admin/charges?kind=charge")
    return int(told["per_key"].get(key, 0))


def test_known_key_returns_the_first_movement(provider: Provider, name: str) -> None:
    first, again = charge(provider, name), charge(provider, name)
    assert (first.status_code, again.status_code) == (201, 409)
    assert again.json() == {"error": "duplicate", "existing": first.json()}
    assert charge(provider, name, amount=200).json()["error"] == "key_reused"
    assert per_key(provider, name) == 1
    assert http.get(f"{provider.url}/movements?key={name}").json() == first.json()
    assert http.get(f"{provider.url}/movements?key=other").status_code == 404


def test_requests_without_key_charge_each_time(provider: Provider) -> None:
    before = per_key(provider, "")
    assert [charge(provider).status_code for _ in range(3)] == [201, 201, 201]
    assert per_key(provider, "") == before + 3


@pytest.mark.parametrize(
    ("quirk", "status", "charged"),
    [
        ("error_before", 503, 0),
        ("decline", 402, 0),
        ("error_after", 502, 1),
        ("latency=0.1", 201, 1),
        ("unheard", 201, 1),
    ],
)
def test_quirks_fail_before_or_after_the_movement(
    provider: Provider, name: str, quirk: str, status: int, charged: int
) -> None:
    assert charge(provider, name, **{"X-Quirk": quirk}).status_code == status
    assert per_key(provider, name) == charged


@pytest.mark.parametrize("quirk", ["drop_after", "timeout_after=5"])
def test_dropped_answer_still_moves_the_money(provider: Provider, name: str, quirk: str) -> None:
    with pytest.raises(httpx.TransportError):
        charge(provider, name, **{"X-Quirk": quirk})
    assert per_key(provider, name) == 1


def test_quirks_apply_in_order_and_once(provider: Provider, name: str) -> None:
    provider.order({"error_before": 0}, {"error_after": 0})
    assert [charge(provider, name).status_code for _ in range(3)] == [503, 502, 409]


def test_movements_survive_a_crash(provider: Provider, name: str) -> None:
    first = charge(provider, name)
    provider.restart()
    assert charge(provider, name).json()["existing"] == first.json()
