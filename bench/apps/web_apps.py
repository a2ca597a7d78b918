"""A small app, bare, with oncemore, or with a similar library: the variables `CONTENDER` and `STORE` choose.

`bare` and `oncemore` run in the project's environment, the others in an environment of their own.
"""

import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def create(request: Request) -> JSONResponse:
    body = await request.json()
    return JSONResponse(refund(body["amount"]), 201)


def refund(amount: int) -> dict[str, object]:
    return {"id": "rf_9ab12cd34ef", "amount": amount, "currency": "EUR", "status": "succeeded", "note": "x" * 96}


async def look(request: Request) -> JSONResponse:
    return JSONResponse({"ok": True})


app = Starlette(routes=[Route("/refunds", create, methods=["POST"]), Route("/look", look)])
store = os.environ.get("STORE", "")

match os.environ["CONTENDER"]:
    case "oncemore":
        from oncemore import Guard
        from oncemore.web.asgi import IdempotencyMiddleware

        app.add_middleware(IdempotencyMiddleware, guard=Guard(store))
    case "idemkit":
        from idemkit import HttpConfig, IdempotencyMiddleware, RedisBackend

        app.add_middleware(IdempotencyMiddleware, backend=RedisBackend.from_url(store), config=HttpConfig())
    case "asgi-idempotency-header":
        import redis.asyncio
        from idempotency_header_middleware import IdempotencyHeaderMiddleware
        from idempotency_header_middleware.backends.redis import RedisBackend

        app.add_middleware(IdempotencyHeaderMiddleware, backend=RedisBackend(redis.asyncio.from_url(store)))
    case "fastapi-idempotency":  # it has no Redis store, so its memory store is used
        from fastapi_idempotency.middleware import IdempotencyMiddleware

        app.add_middleware(IdempotencyMiddleware)
    case "idempotency-kit":  # it has no middleware, so its decorator is on the function of the endpoint
        import redis.asyncio
        from idempotency_kit import (
            AsyncIdempotencyCoordinator,
            IdempotencyDomainService,
            JsonResultAdapter,
            async_idempotent,
        )
        from idempotency_kit.infra.storage.redis.aio.repository import RedisAsyncIdempotencyRepository

        coordinator = AsyncIdempotencyCoordinator(
            RedisAsyncIdempotencyRepository(redis.asyncio.from_url(store)), IdempotencyDomainService()
        )

        @async_idempotent("refund", JsonResultAdapter(), fingerprint_params=("amount",), infra_param="infra")
        async def kept(amount: int, idempotency_key: str, infra: object) -> dict[str, object]:
            return refund(amount)

        async def create_kept(request: Request) -> JSONResponse:
            body = await request.json()
            key = request.headers["idempotency-key"]
            return JSONResponse(await kept(amount=body["amount"], idempotency_key=key, infra=coordinator), 201)

        app = Starlette(routes=[Route("/refunds", create_kept, methods=["POST"]), Route("/look", look)])
