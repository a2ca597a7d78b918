"""The payments service: what it offers over HTTP.  How each operation may be repeated stands in oncemore.toml.

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

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from oncemore import Completer, Contract, Guard, Inbox
from oncemore.errors import OncemoreError
from oncemore.observe.logging import log_events
from oncemore.transitions import Transitions
from oncemore.web.fastapi import IdempotencyMiddleware, Op, current_operation
from oncemore.web.redrive import RedriveAsgi
from oncemore.webhooks.signature import Signing

from . import ledger
from .database import Row, create_tables, reading, rows
from .observed import Correlated, Counters
from .problems import Invalid, Problem
from .provider_client import ProviderClient
from .settings import Settings
from .unguarded import Unguarded, new_key
from .webhooks import receive

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
    """The app, with its own guard, on the database that the settings name."""
    settings = settings or Settings.read()
    counters = Counters()
    guard = Guard(settings.database, observers=[log_events(), counters])
    provider = ProviderClient(settings.provider, settings.provider_timeout)
    inbox, signing = Inbox(guard), Signing(settings.webhook_secret)
    look = partial(reading, settings.database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await create_tables(settings.database)
        finishing = (
            asyncio.create_task(completer(guard, app).arun()) if settings.completes and settings.guarded else None
        )
        yield
        if finishing is not None:
            finishing.cancel()
            await asyncio.wait([finishing])
        await provider.close()
        await guard.aclose()

    app = FastAPI(title="Payments", version="1", lifespan=lifespan)

    # Create, and reverse

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
        return await op.step("book", partial(ledger.refunded, id=refund["id"], payout_id=payout))

    # Look

    @app.get("/payments/{id}")
    async def show_payment(id: str) -> Row:
        async with look() as connection:
            return await ledger.one(connection, "payments", id)

    @app.get("/refunds/{id}")
    async def show_refund(id: str) -> Row:
        async with look() as connection:
            return await ledger.one(connection, "refunds", id)

    @app.get("/ledger")
    async def show_ledger() -> Row:
        async with look() as connection:
            entries = await rows(connection, "SELECT * FROM entries ORDER BY number")
            return {"entries": entries, "balances": await ledger.balances(connection)}

    @app.get("/health")
    async def show_health() -> Row:
        async with look() as connection:
            await rows(connection, "SELECT 1 AS one")
        return {"pid": os.getpid()}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> str:
        return "".join(f"{name.replace('.', '_')}_total {count}\n" for name, count in sorted(counters.counts.items()))

    # Change, if nobody else has

    @app.get("/customers/{id}")
    async def show_customer(id: str, response: Response) -> Row:
        async with look() as connection:
            return tagged(await ledger.one(connection, "customers", id), response)

    @app.put("/customers/{id}")
    async def change_customer(id: str, body: Customer, response: Response, op: Running) -> Row:
        return tagged(await ledger.change_customer(op.connection, id, **body.model_dump()), response)

    # Hear from the provider

    @app.post("/webhooks/provider")
    async def hear(request: Request) -> Row:
        return await receive(request, inbox, signing, name=new_key if not settings.guarded else None)

    app.add_exception_handler(Problem, problem)
    app.add_exception_handler(OncemoreError, problem)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_middleware(IdempotencyMiddleware, guard=guard, contract=Contract.load(CONTRACT))
    if not settings.guarded:
        app.add_middleware(Unguarded)
    app.add_middleware(Correlated)
    return app


def completer(guard: Guard, app: FastAPI) -> Completer:
    """Finishes what a killed service, or a provider that was down, has left in the middle; nobody needs to ask again."""
    through_the_door = RedriveAsgi(app)
    return Completer(guard, {"payments.capture": through_the_door, "refunds.create": through_the_door}, every=1.0)


def order(row: Row) -> dict[str, Any]:
    """What the provider is told of a payment or refund."""
    return {"amount": row["amount"], "currency": row["currency"], "reference": row["id"]}


def tagged(customer: Row, response: Response) -> Row:
    """The customer, with the ETag that a change must name."""
    response.headers["ETag"] = f'"{customer["version"]}"'
    return customer


async def problem(_: Request, error: Any) -> JSONResponse:
    """What went wrong, as application/problem+json; of our own errors and of the library's alike."""
    headers = {"Retry-After": "1"} if error.retryable else {}
    return JSONResponse(error.problem(), error.status, headers, media_type="application/problem+json")


async def invalid(request: Request, error: Any) -> JSONResponse:
    found = "; ".join(f"{'.'.join(map(str, each['loc'][1:])) or 'body'}: {each['msg']}" for each in error.errors())
    return await problem(request, Invalid(found))
