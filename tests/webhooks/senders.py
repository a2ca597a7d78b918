"""Senders for the receiver's tests: each signs as its provider does, without the code of the library."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Headers = dict[str, str]
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + base64.b64encode(b"another secret of 24 byt").decode()
HMAC_OPTIONS: dict[str, Any] = {"header": "X-Signature", "id_header": "X-Event-Id"}


def digest(secret: str, content: bytes, algorithm: str = "sha256") -> bytes:
    return hmac.digest(secret.encode(), content, algorithm)


def sign_standard(secret: str, body: bytes, id: str, when: int) -> Headers:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, f"{id}.{when}.".encode() + body, hashlib.sha256)).decode()
    return {"webhook-id": id, "webhook-timestamp": str(when), "webhook-signature": f"v1,{signature}"}


def sign_svix(secret: str, body: bytes, id: str, when: int) -> Headers:
    return {name.replace("webhook-", "svix-"): text for name, text in sign_standard(secret, body, id, when).items()}


def sign_stripe(secret: str, body: bytes, id: str, when: int) -> Headers:
    return {"Stripe-Signature": f"t={when},v1={digest(secret, f'{when}.'.encode() + body).hex()}"}


def sign_github(secret: str, body: bytes, id: str, when: int) -> Headers:
    signature = "sha256=" + digest(secret, body).hex()
    return {"X-Hub-Signature-256": signature, "X-GitHub-Delivery": id, "X-GitHub-Event": "refund.succeeded"}


def sign_shopify(secret: str, body: bytes, id: str, when: int) -> Headers:
    signature = base64.b64encode(digest(secret, body)).decode()
    return {
        "X-Shopify-Hmac-Sha256": signature,
        "X-Shopify-Webhook-Id": id,
        "X-Shopify-Topic": "refund.succeeded",
        "X-Shopify-Triggered-At": "2026-02-19T12:00:00.123456789Z",
    }


def sign_slack(secret: str, body: bytes, id: str, when: int) -> Headers:
    signature = "v0=" + digest(secret, f"v0:{when}:".encode() + body).hex()
    return {"X-Slack-Signature": signature, "X-Slack-Request-Timestamp": str(when)}


def sign_hmac(secret: str, body: bytes, id: str, when: int) -> Headers:
    return {"X-Signature": digest(secret, body).hex(), "X-Event-Id": id}


class Sender(NamedTuple):
    """One provider: how it signs, and the receiver's options for it."""

    scheme: str
    sign: Callable[[str, bytes, str, int], Headers]
    options: dict[str, Any] = {}  # noqa: RUF012
    timed: bool = False  # whether it signs the time, too

    def body(self, id: str = "ev_1", **more: Any) -> bytes:
        """Return the body of an event, with its id and type wherever this provider writes them."""
        event: dict[str, Any] = {"id": id, "type": "refund.succeeded", "data": {"amount": 1000}, **more}
        if self.scheme == "slack":
            event = {"event_id": id, "type": "event_callback", "event": {"type": "refund.succeeded"}, **more}
        return json.dumps(event).encode()

    def headers(self, body: bytes, id: str = "ev_1", *, secret: str = SECRET, when: float | None = None) -> Headers:
        """Return the headers of a delivery, signed now unless *when* says otherwise."""
        return self.sign(secret, body, id, int(time.time() if when is None else when))


SENDERS = {
    "standard": Sender("standard", sign_standard, timed=True),
    "svix": Sender("svix", sign_svix, timed=True),
    "stripe": Sender("stripe", sign_stripe, timed=True),
    "github": Sender("github", sign_github),
    "shopify": Sender("shopify", sign_shopify),
    "slack": Sender("slack", sign_slack, timed=True),
    "hmac": Sender("hmac", sign_hmac, HMAC_OPTIONS),
}
