"""The provider's webhooks: verified, then handled once each, however often they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from oncemore import Inbox, Op
from oncemore.errors import WebhookError
from oncemore.webhooks.signature import Signing

from . import ledger
from .problems import BadSignature

SOURCE = "provider"
RESULTS = {"duplicate": "replayed", "flagged": "flagged", "dead": "dead letter"}


async def receive(
    request: Request, inbox: Inbox, signing: Signing, *, name: Callable[[], str] | None = None
) -> dict[str, Any]:
    """A row of the seeds' inbox table: when the delivery came, and what became of it.  A *name* replaces the event's id."""
    body = await request.body()  # the raw bytes, for it is they that are signed
    try:
        message = signing.verify(request.headers, body)
    except WebhookError as error:
        raise BadSignature(error.detail) from error
    came = datetime.now(UTC)
    received = await inbox.ahandle(name() if name else message.id, SOURCE, json.loads(body), handle)
    return {
        "event_id": message.id,
        "source": SOURCE,
        "first_seen": came.isoformat(),
        "processed": datetime.now(UTC).isoformat(),
        "result": received.value if received.how == "processed" else RESULTS[received.how],
    }


async def handle(op: Op, event: dict[str, Any]) -> str:
    """Book what the event tells; what this service has no use for is acknowledged, and forgotten."""
    if event["type"] != "refund.succeeded":
        return "ignored"
    await ledger.settle_refund(op.connection, event["data"]["reference"])
    return "ok"
