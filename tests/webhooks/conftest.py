"""Webhooks on SQLite and on PostgreSQL, and a customer's server that receives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard, Op, Operation, Policy, Webhooks
from tests.webhooks.hooks import Hooks

LOOPBACK = ["127.0.0.0/8"]
numbers = iter(range(10**9))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("postgres_schema")
    return f"{url}{'&' if '?' in url else '?'}schema={schema}"


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    guard = Guard(url, policy=Policy(effect="transaction"))
    yield guard
    guard.close()


@pytest.fixture
def make(guard: Guard) -> Callable[..., Webhooks]:
    """Make webhooks that may go to the loopback."""

    def make(**options: Any) -> Webhooks:
        return Webhooks(guard, allow=LOOPBACK, allow_http=True, **options)

    return make


@pytest.fixture
def webhooks(make: Callable[..., Webhooks]) -> Webhooks:
    return make()


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    with Hooks() as hooks:
        yield hooks


def send(webhooks: Webhooks, *data: Any, type: str = "refund.succeeded", **options: Any) -> list[str]:
    """Send one event for each of *data*, in one operation; return their ids."""

    def perform(op: Op) -> list[str]:
        return [webhooks.send(op, type, each, **options) for each in data]

    ids: list[str] = webhooks.guard.run(Operation("test", f"k{next(numbers)}"), perform).value
    return ids
