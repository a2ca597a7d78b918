"""A refund service over HTTP that dies at a given point: `python -m tests.chaos.service LEVEL DRIVER URL PORT POINT`."""

from __future__ import annotations

import json
import sys
from typing import Any, cast

import uvicorn

from oncemore import Contract, Rule
from oncemore._ledger.store import Store
from oncemore.testing.crashes import POINTS, Crashing, die
from oncemore.web.asgi import IdempotencyMiddleware, current_operation
from tests.transactions.shops import Shop

from .crashing import LEASE, opened


class Refunds:
    """POST /refunds: one row, and 201."""

    def __init__(self, shop: Shop, level: str, points: Crashing | None) -> None:
        self.shop = shop
        self.level = level
        self.points = points

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        op = current_operation()
        assert op is not None
        if self.level == "transaction":
            await self.shop.insert(op, op.key).arun()
        else:
            self.shop.execute(f"INSERT INTO refunds VALUES ('{op.key}', 'x')")
        if self.points is not None:
            self.points.reached("after effect")
        body = json.dumps({"refund": op.key}).encode()
        headers = [(b"content-type", b"application/json"), (b"location", b"/refunds/" + op.key.encode())]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def dying_in_the_response(app: Any) -> Any:
    """Wrap *app*: its process dies when the client has had the headers."""

    async def dying(scope: Any, receive: Any, send: Any) -> None:
        async def send_some(message: Any) -> None:
            if message["type"] == "http.response.body":
                die()
            await send(message)

        await app(scope, receive, send_some)

    return dying


def made(level: str, driver: str, url: str, point: str) -> Any:
    shop = opened(driver, url)
    points = Crashing(shop.guard.store, at=point) if point in POINTS else None
    if points is not None:
        shop.guard.store = cast("Store", points)
    effect = level.partition(",")[0]
    contract = Contract(Rule("POST /refunds", name="refunds.create", key="required", effect=effect, lease=LEASE))
    app = IdempotencyMiddleware(
        Refunds(shop, level, points), guard=shop.guard, contract=contract, principal=lambda scope: "customer-1"
    )
    return dying_in_the_response(app) if point == "during response" else app


def main(level: str, driver: str, url: str, port: str, point: str) -> None:
    uvicorn.run(made(level, driver, url, point), port=int(port), lifespan="off", log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
