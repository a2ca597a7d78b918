"""The contract's app in aiohttp.web, behind its middleware, served by a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from oncemore._runtime.plan import arun
from oncemore.web.aiohttp import IdempotencyMiddleware
from tests.doors.app import ContractApp, Reply


def contract_app(contract_app: ContractApp) -> web.Application:
    async def view(request: web.Request) -> web.StreamResponse:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers]
        asked = (request.method, request.path, request.rel_url.raw_query_string, headers, await request.read())
        return made(await arun(contract_app.perform(*asked)))

    app = web.Application(client_max_size=16 * 1024 * 1024)
    IdempotencyMiddleware(app, guard=contract_app.guard, contract=contract_app.contract)
    app.router.add_route("*", "/{path:.*}", view)
    return app


def made(reply: Reply) -> web.Response:
    body: Any = reply.achunks() if reply.streamed else reply.body or None
    response = web.Response(status=reply.status, body=body)
    for name in {name for name, _ in reply.headers}:
        response.headers.popall(name, None)
    for name, value in reply.headers:
        response.headers.add(name, value)
    return response


@contextmanager
def serving(app: web.Application, **options: Any) -> Iterator[str]:
    """The URL of the app, for as long as it is served."""
    loop, ports = asyncio.new_event_loop(), []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(app, **options)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
