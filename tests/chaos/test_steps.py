"""Steps under real kills: one payout per derived key, one row per database step, the same answer for every caller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncemore._ledger.values import replayed
from tests.support.processes import Program
from tests.transactions.conftest import emptied
from tests.transactions.shops import Postgres, Shop, Sqlite

HERE = Path(__file__).parent
POINTS = [
    "claimed",  # nothing has been done
    "in reserve",  # the row is inserted, and neither it nor the checkpoint is committed
    "reserved",  # between two steps
    "before payout",  # the step is claimed, and nothing sent
    "after payout",  # the provider has paid, and nobody here knows
    "paid",
    "in book",
    "booked",  # all steps are taken, and the outcome is not settled
]


@pytest.fixture(scope="module")
def running_provider() -> Iterator[str]:
    """The address of a provider that is there for all tests."""
    command = [sys.executable, str(HERE / "provider.py")]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(10)


@pytest.fixture
def provider(running_provider: str) -> str:
    """The address of a provider that has paid nothing yet."""
    forget = urllib.request.Request(f"{running_provider}/payouts", method="DELETE")
    with urllib.request.urlopen(forget, timeout=5) as response:
        assert response.status == 200
    return running_provider


class Orders:
    """A shop whose orders are paid in child processes."""

    def __init__(self, kind: str, shop: Shop, provider: str) -> None:
        self.kind = kind
        self.shop = shop
        self.provider = provider

    def child(self, what: str, *point: str, mode: str = "") -> Program:
        command = [sys.executable, str(HERE / "steps_child.py"), self.kind, self.shop.url, self.provider, what, *point]
        env = {**os.environ, "PROVIDER_MODE": mode}
        return Program(command, stdout=subprocess.PIPE, env=env)

    def told(self, what: str = "attempt", *, mode: str = "") -> Any:
        """The answer of a child that is neither killed nor frozen."""
        with self.child(what, mode=mode) as process:
            out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return json.loads(out)

    def killed(self, point: str, *, mode: str = "") -> None:
        with self.child("attempt", "SIGKILL", point, mode=mode) as process:
            out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (-signal.SIGKILL, "here\n")

    def payouts(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.provider}/payouts", timeout=5) as response:
            return list(json.load(response).values())

    def check(self, *, asked: int = 1) -> None:
        """One row of each database step, one payout under one key, one outcome."""
        record = self.shop.guard.find("customer-1", "order-7")
        assert record is not None
        assert record.outcome is not None
        assert replayed(record.outcome) == ANSWER
        assert self.shop.refunds() == ["book", "reserve"]
        assert self.payouts() == [{"receipt": "r-1", "paid": 1, "asked": asked}]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    if request.param == "sqlite":
        shop: Shop = Sqlite(f"sqlite:///{tmp_path / 'shop.db'}")
    else:
        shop = Postgres(emptied(request.getfixturevalue("shops_url")))
    yield shop
    shop.guard.close()


@pytest.fixture(params=["sync", "async"])
def orders(request: pytest.FixtureRequest, shop: Shop, provider: str) -> Orders:
    return Orders(request.param, shop, provider)


ANSWER = [7, "reserve", "r-1", "book"]


@pytest.mark.chaos
@pytest.mark.parametrize("point", POINTS)
def test_steps_killed_anywhere_resume_after_the_last_checkpoint(orders: Orders, point: str) -> None:
    orders.killed(point)
    assert orders.told() == ANSWER
    orders.check(asked=2 if point == "after payout" else 1)


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["reserved", "after payout"])
def test_the_completer_finishes_what_was_killed(orders: Orders, point: str) -> None:
    orders.killed(point)
    time.sleep(0.45)  # its lease
    assert orders.told("complete") == 1
    orders.check(asked=2 if point == "after payout" else 1)


@pytest.mark.chaos
def test_killed_again_and_again_it_still_happens_once(orders: Orders) -> None:
    for point in ("after payout", "before payout", "in book"):
        orders.killed(point)
    assert orders.told() == ANSWER
    orders.check(asked=2)


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["reserved", "after payout"])
def test_an_owner_frozen_past_its_lease_is_fenced(orders: Orders, point: str) -> None:
    """It comes back when another has finished, takes no further step, and tells the same answer."""
    with orders.child("attempt", "SIGSTOP", point) as frozen:
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == "here\n"
        answer = orders.told()
        frozen.send_signal(signal.SIGCONT)
        out, _ = frozen.communicate(timeout=60)
    assert answer == json.loads(out) == ANSWER
    orders.check(asked=2 if point == "after payout" else 1)


@pytest.mark.parametrize(("mode", "asked"), [("failing", 3), ("late", 2)])
def test_provider_without_an_answer_is_asked_with_the_same_key(orders: Orders, mode: str, asked: int) -> None:
    assert orders.told(mode=mode) == ANSWER
    orders.check(asked=asked)


@pytest.mark.chaos
def test_a_provider_that_says_duplicate_has_its_existing_result_surfaced(orders: Orders) -> None:
    orders.killed("after payout", mode="duplicate")
    assert orders.told(mode="duplicate") == ANSWER
    orders.check(asked=2)
