"""A process that refunds once and dies at the point it is told: `python -m tests.chaos.crashing LEVEL DRIVER URL POINT`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Generator
from typing import Any, cast

from oncemore import Operation, Policy, Resolution
from oncemore._ledger.context import Op
from oncemore._ledger.store import Store
from oncemore._ledger.transactions import Do
from oncemore.testing.crashes import Crashing
from tests.transactions.shops import ON_POSTGRES, ON_SQLITE, POLICY, Shop

REFUND = Operation("customer-1", "k1", "same", "refunds.create")
LEASE = 0.5
LEVELS = ("transaction", "lease, resolve", "lease, hold")


def opened(driver: str, url: str) -> Shop:
    return {**ON_SQLITE, **ON_POSTGRES}[driver](url)


def policy(level: str, shop: Shop) -> Policy:
    if level == "transaction":
        return dataclasses.replace(POLICY, lease=LEASE)

    def resolver(op: Op) -> Resolution:
        """Look whether the effect is there."""
        return Resolution.settled({"refund": op.key}) if op.key in shop.refunds() else Resolution.released()

    if level == "lease, hold":
        return Policy(lease=LEASE)
    return Policy(lease=LEASE, on_unknown="resolve", resolver=resolver)


def perform(shop: Shop, level: str, points: Crashing | None = None) -> Any:
    def performing(op: Op) -> Generator[Any, Any, Any]:
        if level == "transaction":
            yield shop.insert(op, op.key)
        else:  # the effect is elsewhere, as a provider's would be
            yield Do(lambda: shop.execute(f"INSERT INTO refunds VALUES ('{op.key}', 'x')"), None)
        if points is not None:
            points.reached("after effect")
        return {"refund": op.key}

    return performing


async def main(level: str, driver: str, url: str, point: str) -> None:
    shop = opened(driver, url)
    await shop.open()
    points = Crashing(shop.guard.store, at=point)
    shop.guard.store = cast("Store", points)
    await shop.run(REFUND, perform(shop, level, points), policy=policy(level, shop))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
