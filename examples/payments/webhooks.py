"""The provider's webhooks: verified, then each handled once, however often it is delivered."""

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
    """Handle a delivery, and return what was done with it.  *name*, if given, makes an id in place of the event's."""
    body = await request.body()  # the raw bytes, because the signature is of them
    try:
        message = signing.verify(request.headers, body)
    except WebhookError as error:
        raise BadSignature(error.detail) from error
    first_seen = datetime.now(UTC)
    received = await inbox.ahandle(name() if name else message.id, SOURCE, json.loads(body), handle)
    return {
        "event_id": message.id,
        "source": SOURCE,
        "first_seen": first_seen.isoformat(),
        "processed": datetime.now(UTC).isoformat(),
        "result": received.value if received.how == "processed" else RESULTS[received.how],
    }


async def handle(op: Op, event: dict[str, Any]) -> str:
    """Book a refund that succeeded; events of other types are acknowledged and ignored."""
    if event["type"] != "refund.succeeded":
        return "ignored"
    await ledger.settle_refund(op.connection, event["data"]["reference"])
    return "ok"
