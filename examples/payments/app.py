"""The HTTP endpoints of the payments service.  The contract, oncemore.toml, says how each may be repeated.

uvicorn --factory examples.payments.app:create
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from examples.sql import Row, create_tables, read_connection, rows
from oncemore import Completer, Contract, Guard, Inbox, Outbox
from oncemore.errors import OncemoreError
from oncemore.observe.logging import log_events
from oncemore.transitions import Transitions
from oncemore.web.fastapi import IdempotencyMiddleware, Op, current_operation
from oncemore.web.redrive import RedriveAsgi

from . import ledger
from .database import TABLES, TABLES_LOCK
from .observability import CorrelationMiddleware, Counters
from .problems import Invalid, Problem
from .provider_client import ProviderClient
from .relay import SOURCE
from .settings import Settings
from .unguarded import Unguarded
from .webhooks import make_receiver

CONTRACT = Path(__file__).with_name("oncemore.toml")
Running = Annotated[Op, Depends(current_operation)]
Amount = Annotated[int, Field(gt=0, le=10**12, strict=True, description="in the currency's minor unit: 1000 is 10.00")]

payments = Transitions("payments", {("authorized", "void"): "voided"})


class NewPayment(BaseModel):
    model_config = ConfigDict(extra="forbid")
    order_id: str = Field(min_length=1, max_length=64)
    customer_id: str = Field(min_length=1, max_length=64)
    amount: Amount
    currency: str = Field(default="EUR", pattern="^[A-Z]{3}$")


class NewRefund(BaseModel):
    model_config = ConfigDict(extra="forbid")
    charge_id: str
    amount: Amount


class Customer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    email: str


def create(settings: Settings | None = None) -> FastAPI:
    """Create the app with its own guard, on the database of the settings."""
    settings = settings or Settings.read()
    counters = Counters()
    guard = Guard(settings.database, observers=[log_events(), counters])
    provider = ProviderClient(settings.provider, settings.provider_timeout)
    outbox = Outbox(guard, source=SOURCE)
    receiver = make_receiver(Inbox(guard), settings.webhook_secret, guarded=settings.guarded)
    read = partial(read_connection, settings.database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await create_tables(settings.database, TABLES, TABLES_LOCK)
        completing = (
            asyncio.create_task(completer(guard, app).arun()) if settings.completes and settings.guarded else None
        )
        yield
        if completing is not None:
            completing.cancel()
            await asyncio.wait([completing])
        await provider.close()
        await guard.aclose()

    app = FastAPI(title="Payments", version="1", lifespan=lifespan)

    # Create and reverse

    @app.post("/payments", status_code=201)
    async def create_payment(body: NewPayment, op: Running) -> Row:
        return await ledger.open_payment(op.connection, **body.model_dump())

    @app.post("/payments/{id}/void")
    async def void_payment(id: str, op: Running) -> Row:
        await payments.aapply(op, id, "void")
        return await ledger.one(op.connection, "payments", id)

    @app.post("/payments/{id}/capture")
    async def capture_payment(id: str, op: Running) -> Any:
        payment = await op.step("begin", partial(ledger.begin_capture, id=id), undo=ledger.cancel_capture)
        charge = await op.step("charge", partial(provider.charge, **order(payment)), retry=1)
        return await op.step("book", partial(ledger.captured, id=id, charge_id=charge))

    @app.post("/refunds", status_code=201)
    async def create_refund(body: NewRefund, op: Running) -> Any:
        refund = await op.step("begin", partial(ledger.begin_refund, **body.model_dump()), undo=ledger.cancel_refund)
        payout = await op.step("pay out", partial(provider.pay_out, **order(refund)), retry=1)
        return await op.step("book", partial(finish_refund, id=refund["id"], payout_id=payout))

    async def finish_refund(connection: Any, id: str, payout_id: str) -> Row:
        """Book the refund, and tell other services of it: the message commits with the entry."""
        refund = await ledger.refunded(connection, id=id, payout_id=payout_id)
        await outbox.aadd(connection, "refund.succeeded", refund, subject=id, id=f"{id}.succeeded")
        return refund

    # Read

    @app.get("/payments/{id}")
    async def show_payment(id: str) -> Row:
        async with read() as connection:
            return await ledger.one(connection, "payments", id)

    @app.get("/refunds/{id}")
    async def show_refund(id: str) -> Row:
        async with read() as connection:
            return await ledger.one(connection, "refunds", id)

    @app.get("/ledger")
    async def show_ledger() -> Row:
        async with read() as connection:
            entries = await rows(connection, "SELECT * FROM entries ORDER BY number")
            return {"entries": entries, "balances": await ledger.balances(connection)}

    @app.get("/outbox")
    async def show_outbox() -> Row:
        return msgspec.structs.asdict(await outbox.astats())

    @app.get("/health")
    async def show_health() -> Row:
        async with read() as connection:
            await rows(connection, "SELECT 1 AS one")
        return {"pid": os.getpid()}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> str:
        return "".join(f"{name.replace('.', '_')}_total {count}\n" for name, count in sorted(counters.counts.items()))

    # Conditional change

    @app.get("/customers/{id}")
    async def show_customer(id: str, response: Response) -> Row:
        async with read() as connection:
            return with_etag(await ledger.one(connection, "customers", id), response)

    @app.put("/customers/{id}")
    async def change_customer(id: str, body: Customer, response: Response, op: Running) -> Row:
        return with_etag(await ledger.change_customer(op.connection, id, **body.model_dump()), response)

    app.include_router(receiver.fastapi("/webhooks/provider"))
    app.add_exception_handler(Problem, problem_response)
    app.add_exception_handler(OncemoreError, problem_response)
    app.add_exception_handler(RequestValidationError, invalid_response)
    app.add_middleware(IdempotencyMiddleware, guard=guard, contract=Contract.load(CONTRACT))
    if not settings.guarded:
        app.add_middleware(Unguarded)
    app.add_middleware(CorrelationMiddleware)
    return app


def completer(guard: Guard, app: FastAPI) -> Completer:
    """Return a completer, which finishes captures and refunds that were interrupted, even if their callers do not retry."""
    resume = RedriveAsgi(app)
    return Completer(guard, {"payments.capture": resume, "refunds.create": resume}, every=1.0)


def order(row: Row) -> dict[str, Any]:
    """Return the fields of a payment or refund that the provider gets."""
    return {"amount": row["amount"], "currency": row["currency"], "reference": row["id"]}


def with_etag(customer: Row, response: Response) -> Row:
    """Set the ETag, which a later change must name in If-Match, and return the customer."""
    response.headers["ETag"] = f'"{customer["version"]}"'
    return customer


async def problem_response(_: Request, error: Any) -> JSONResponse:
    """Return an error of this service or of oncemore as application/problem+json."""
    headers = {"Retry-After": "1"} if error.retryable else {}
    return JSONResponse(error.problem(), error.status, headers, media_type="application/problem+json")


async def invalid_response(request: Request, error: Any) -> JSONResponse:
    found = "; ".join(f"{'.'.join(map(str, each['loc'][1:])) or 'body'}: {each['msg']}" for each in error.errors())
    return await problem_response(request, Invalid(found))
