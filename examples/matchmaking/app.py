"""The HTTP endpoints of the matchmaking service.  The contract, oncemore.toml, says how each may be repeated.

uvicorn --factory examples.matchmaking.app:create
"""

from __future__ import annotations

import asyncio
import os
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from examples.sql import Row, create_tables
from oncemore import Contract, Guard, Rule
from oncemore.errors import InvalidPrincipal, NotFound, OncemoreError, Refusal
from oncemore.observe.logging import log_events
from oncemore.web.fastapi import IdempotencyMiddleware
from oncemore.web.request import Request as NamedRequest
from oncemore.webhooks import Sender, Webhooks

from . import matching, people, safety
from .daily import make_job, make_schedule
from .fields import AnyText, Json, Text, TimeZone
from .hooks import hooks_router
from .metrics import Metrics
from .problems import Invalid, Missing, NotAllowed, problem_response
from .settings import Settings
from .tables import TABLES, TABLES_LOCK
from .work import UNIQUE, USER, Service

CONTRACT = Path(__file__).with_name("oncemore.toml")
ENDPOINT = "match-events"  # the id of the webhook endpoint of the settings
LOOPBACK = ("127.0.0.0/8", "::1/128")
REDIS_LEASE = "3s"  # renewed while a request runs; after a crash, a retry waits at most this long
OPEN = ("/auth/otp/send", "/auth/otp/verify")  # the paths of requests without a user


async def current_user(request: Request) -> str:
    """Return the user.  For a guarded request, the middleware has already found it."""
    return str(request.scope.get(USER) or await request.app.state.find_user(request.scope))


User = Annotated[str, Depends(current_user)]


class NewCode(BaseModel):
    phone: Text


class Code(BaseModel):
    requestId: Text
    code: Text


class Refresh(BaseModel):
    refreshToken: Text


class Profile(BaseModel):
    displayName: AnyText = ""
    bio: AnyText = ""
    timezone: TimeZone = "UTC"


class NewPhoto(BaseModel):
    url: Text
    sha256: Text


class Responses(BaseModel):
    responses: dict[Text, Json]


class NewVerification(BaseModel):
    kind: Text


class Answer(BaseModel):
    action: Literal["accept", "pass", "not_now"]


class NewMessage(BaseModel):
    content: Text
    clientMessageId: Text


class Read(BaseModel):
    messageId: Text


class Report(BaseModel):
    subjectId: Text
    category: Text
    text: AnyText


class Block(BaseModel):
    subjectId: Text


class Appeal(BaseModel):
    decisionId: Text
    text: AnyText


# A rule with `unique_by` may answer from another key's record, so the body is checked before the middleware looks for it.
CHECKED: dict[str, type[BaseModel]] = {
    "auth.otp.send": NewCode,
    "verification.start": NewVerification,
    "safety.report": Report,
    "safety.appeal": Appeal,
}


class Middleware(IdempotencyMiddleware):
    """The middleware of oncemore, but a body that the endpoint would refuse gets 422, as FastAPI sends it.

    With the ledger in Redis, unique records are left to the database: see `Service.perform`.
    """

    def operation(self, match: Any, request: NamedRequest) -> Any:
        if match.rule.name in CHECKED:
            try:
                CHECKED[match.rule.name].model_validate_json(request.body)
            except ValidationError as error:
                raise Invalid(describe(error.errors())) from None
        operation, caller = yield from super().operation(match, request)
        if operation is not None and operation.unique is not None and match.rule.policy.effect == "lease":
            request.native[UNIQUE] = operation.unique
            operation = msgspec.structs.replace(operation, unique=None)
        return operation, caller


def create(settings: Settings | None = None) -> FastAPI:
    """Create the app with its guards, on the database of the settings."""
    settings = settings or Settings.read()
    metrics = Metrics()
    cache = 0 if settings.test_hooks else 32 * 1024 * 1024  # no cache in tests, because their clock does not move it
    url = settings.database
    if url.startswith("sqlite") and "?" not in url:
        url += "?timeout=30s"  # all writers take turns, even in other processes
    database = guard = Guard(url, observers=[log_events(), metrics], cache=cache)
    if settings.ledger:  # then the database's guard counts only slots, so that no request is counted twice
        database = Guard(url, observers=[log_events(), metrics.count_slots], cache=cache)
        guard = Guard(settings.ledger, observers=[log_events(), metrics], cache=cache)
    service = Service(settings, guard, database)
    service.contract = load_contract(service)
    webhooks = Webhooks(database, body="eventId", allow=LOOPBACK, allow_http=True)
    daily_offers = make_job(service)
    schedule = make_schedule(service, daily_offers)
    sender = Sender(webhooks, concurrency=20, grace="2s")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await create_tables(settings.database, TABLES, TABLES_LOCK)
        tasks = [asyncio.create_task(schedule.arun())] if settings.schedules else []
        await webhooks.astats()  # creates its tables
        if settings.webhook_url:
            await register_endpoint(webhooks, settings)
            tasks.append(asyncio.create_task(sender.arun()))
        yield
        sender.stop()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await guard.aclose()
        await database.aclose()

    async def find_user(scope: Any) -> str:
        """Return the user of the access token: keys belong to the user, so a renewed token makes no difference."""
        if scope["path"] in OPEN:
            return "nobody"
        async with service.read() as connection:
            session = await people.find_session(connection, bearer(Request(scope)), "access")
        if session is None:
            raise InvalidPrincipal("Send an access token that is valid: Authorization: Bearer ...")
        scope[USER] = session["user_id"]
        return str(session["user_id"])

    perform = service.perform
    app = FastAPI(title="Matchmaking", version="1", lifespan=lifespan)
    app.state.find_user = find_user

    # Signing in

    @app.post("/auth/otp/send")
    async def send_code(body: NewCode, request: Request) -> Response:
        """Send a code.  For 10 minutes, every request for the same phone gets the same requestId, under any key."""
        return await perform(request, partial(people.send_code, phone=body.phone))

    @app.post("/auth/otp/verify")
    async def verify_code(body: Code, request: Request) -> Response:
        """Sign in.  For 5 minutes, a repeat gets the same tokens; a code works once."""
        return await perform(request, partial(people.verify_code, request=body.requestId, code=body.code))

    @app.post("/auth/refresh")
    async def refresh(body: Refresh, request: Request) -> Response:
        """Issue new tokens.  Not idempotent: a repeat issues new tokens again."""
        return await perform(request, partial(people.refresh, token=body.refreshToken))

    @app.post("/auth/logout", status_code=204)
    async def log_out(request: Request, user: User) -> Response:
        """Revoke the session.  Not idempotent: a repeat is refused, because the session has ended."""
        return await perform(request, partial(people.log_out, token=bearer(request)), 204)

    # Profiles

    @app.get("/users/me")
    async def show_profile(user: User) -> Row:
        async with service.read() as connection:
            return await people.show_profile(connection, user)

    @app.patch("/users/me")
    async def change_profile(body: Profile, request: Request, user: User) -> Response:
        """Change the profile.  Idempotent without a key, because the last write wins."""
        fields = body.model_dump(exclude_unset=True)
        return await perform(request, partial(people.change_profile, fields=fields))

    @app.get("/users/me/photos")
    async def list_photos(user: User) -> Row:
        async with service.read() as connection:
            return {"photos": await people.list_photos(connection, user)}

    @app.post("/users/me/photos", status_code=201)
    async def add_photo(body: NewPhoto, request: Request) -> Response:
        """Add a photo.  A repeat gets the same photo; the same picture under another key is rejected as a duplicate."""
        return await perform(request, partial(people.add_photo, url=body.url, sha256=body.sha256), 201)

    @app.delete("/users/me/photos/{id}", status_code=204)
    async def delete_photo(id: Text, request: Request, user: User) -> Response:
        """Delete a photo.  Not idempotent: the second time, there is nothing to delete."""
        return await perform(request, partial(people.delete_photo, id=id), 204)

    @app.get("/compatibility/responses")
    async def list_responses(user: User) -> Row:
        async with service.read() as connection:
            return {"responses": await people.list_responses(connection, user)}

    @app.post("/compatibility/responses")
    async def save_responses(body: Responses, request: Request) -> Response:
        """Save responses.  A later request overwrites the earlier answers, question by question."""
        return await perform(request, partial(people.save_responses, responses=body.responses))

    @app.post("/verification/session", status_code=201)
    async def start_verification(body: NewVerification, request: Request) -> Response:
        """Start a verification.  For 5 minutes, every request of the user gets the same session, under any key."""
        return await perform(request, partial(people.start_verification, kind=body.kind), 201)

    # Offers and matches

    @app.get("/matches/offers")
    async def list_offers(user: User) -> Row:
        async with service.read() as connection:
            return {"offers": await matching.list_offers(connection, user)}

    @app.get("/matches/offers/{id}")
    async def show_offer(id: Text, user: User) -> Row:
        async with service.read() as connection:
            return matching.offer_view(await matching.find_offer(connection, user, id))

    @app.post("/matches/offers/{id}/action")
    async def answer_offer(id: Text, body: Answer, request: Request) -> Response:
        """Answer an offer.  The same action again, under any key, gets the present state; another action is refused."""
        return await perform(request, partial(matching.answer_offer, webhooks=webhooks, id=id, action=body.action))

    @app.get("/matches")
    async def list_matches(user: User) -> Row:
        async with service.read() as connection:
            return {"matches": await matching.list_matches(connection, user)}

    @app.get("/matches/{id}")
    async def show_match(id: Text, user: User) -> Row:
        async with service.read() as connection:
            return matching.match_view(await matching.find_match(connection, user, id))

    @app.post("/matches/{id}/unmatch")
    async def unmatch(id: Text, request: Request) -> Response:
        """Close a match.  If it is already closed, nothing changes, and the answer is the same."""
        return await perform(request, partial(matching.unmatch, id=id))

    @app.get("/matches/{id}/messages")
    async def list_messages(id: Text, user: User) -> Row:
        async with service.read() as connection:
            return {"messages": await matching.list_messages(connection, user, id)}

    @app.post("/matches/{id}/messages", status_code=201)
    async def send_message(id: Text, body: NewMessage, request: Request) -> Response:
        """Send a message.  The same clientMessageId within 24 hours gets the existing message."""
        change = partial(matching.send_message, id=id, content=body.content, client_message_id=body.clientMessageId)
        return await perform(request, change, 201)

    @app.post("/matches/{id}/read")
    async def mark_read(id: Text, body: Read, request: Request) -> Response:
        """Mark messages as read.  Read messages stay read, so a repeat changes nothing."""
        return await perform(request, partial(matching.mark_read, id=id, message=body.messageId))

    # Safety

    @app.post("/safety/report", status_code=201)
    async def file_report(body: Report, request: Request) -> Response:
        """Report a user.  The same subject and category in the same hour under another key is rejected as a duplicate."""
        change = partial(safety.file_report, subject=body.subjectId, category=body.category, text=body.text)
        return await perform(request, change, 201)

    @app.get("/safety/blocks")
    async def list_blocks(user: User) -> Row:
        async with service.read() as connection:
            return {"subjects": await safety.list_blocks(connection, user)}

    @app.post("/safety/block")
    async def block(body: Block, request: Request) -> Response:
        """Block a user.  If the user is already blocked, nothing changes, and the answer is the same."""
        return await perform(request, partial(safety.block, subject=body.subjectId))

    @app.post("/safety/appeal", status_code=201)
    async def file_appeal(body: Appeal, request: Request) -> Response:
        """Appeal a decision.  The same decision within 24 hours under another key is rejected as a duplicate."""
        return await perform(request, partial(safety.file_appeal, decision=body.decisionId, text=body.text), 201)

    # Operations

    @app.get("/health", include_in_schema=False)
    async def show_health() -> Row:
        return {"pid": os.getpid()}

    @app.get("/metrics", include_in_schema=False)
    async def show_metrics() -> Response:
        return Response(await metrics.page(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    if settings.test_hooks:
        app.include_router(hooks_router(service, daily_offers))
        service.contract.add(Rule("POST /_test/{rest:path}", name="test hooks", idempotent=False))
    app.add_exception_handler(OncemoreError, problem_response)
    app.add_exception_handler(RequestValidationError, invalid_response)
    app.add_exception_handler(HTTPException, http_response)
    app.add_middleware(Middleware, guard=guard, contract=service.contract, principal=find_user)
    return app


def load_contract(service: Service) -> Contract:
    """Load the contract.  With the ledger in Redis, changes run under a lease there, and `look_up` resolves crashes."""
    if service.guard is service.database:
        return Contract.load(CONTRACT)
    document = tomllib.loads(CONTRACT.read_text(encoding="utf-8"))
    leased = {"effect": "lease", "lease": REDIS_LEASE, "on_unknown": "resolve", "resolver": service.look_up}
    rules = [Rule(**written) for written in document["rule"]]
    return Contract(*rules, **{**document["defaults"], **leased})


async def register_endpoint(webhooks: Webhooks, settings: Settings) -> None:
    """Have `match.created` sent to the URL of the settings; other processes may do the same at this moment."""
    with suppress(NotFound):
        await webhooks.endpoints.aupdate(ENDPOINT, url=settings.webhook_url)
        await webhooks.endpoints.arotate(ENDPOINT, secret=settings.webhook_secret, grace=0)
        return
    await webhooks.endpoints.acreate(
        settings.webhook_url, id=ENDPOINT, events=["match.created"], secret=settings.webhook_secret
    )


def bearer(request: Request) -> str:
    """Return the token of the Authorization header, or an empty text."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def invalid_response(request: Request, error: Any) -> JSONResponse:
    return await problem_response(request, Invalid(describe(error.errors(), skip=1)))  # without the word "body"


async def http_response(request: Request, error: Any) -> JSONResponse:
    """Answer a request that no route serves, or whose body cannot be read."""
    refusals: dict[int, type[Refusal]] = {404: Missing, 405: NotAllowed}
    refusal = refusals.get(error.status_code, Invalid)
    return await problem_response(request, refusal(f"{request.method} {request.url.path}: {error.detail}"))


def describe(errors: Sequence[Any], skip: int = 0) -> str:
    found = "; ".join(f"{'.'.join(map(str, each['loc'][skip:])) or 'body'}: {each['msg']}" for each in errors)
    return found.encode(errors="replace").decode()
