"""A Starlette app whose route wants a slash, behind the ASGI door: its router redirects, and the client sends all again."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from oncemore._ledger.guard import Guard
from oncemore.web.asgi import IdempotencyMiddleware

runs: list[str] = []


async def create(request: Request) -> Response:
    runs.append("order")
    return PlainTextResponse(f"run {len(runs)}")


app = Starlette(
    routes=[Route("/orders/", create, methods=["POST"])],
    middleware=[Middleware(IdempotencyMiddleware, guard=Guard("memory://"))],
)
