"""Shopify: `X-Shopify-Hmac-Sha256: <base64>`, of the body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..signature import one_header
from .scheme import (
    Description,
    Pairs,
    base64_digest,
    check_signature,
    optional_header,
    read_secrets,
    required_id,
    time_of,
)

HEADER = "x-shopify-hmac-sha256"
TOPIC, TRIGGERED = "x-shopify-topic", "x-shopify-triggered-at"
# Equal on each delivery of one webhook.  X-Shopify-Event-Id is shared by all webhooks of one action of a merchant, also
# by those of other topics; deduplicating by it could lose one.
DELIVERY = "x-shopify-webhook-id"


class ShopifyScheme:
    """Shopify's signatures, with the app's client secret.  The type is the topic, such as `orders/create`."""

    name = "shopify"

    def __init__(self, secrets: Sequence[str | bytes], *, id_header: str = DELIVERY) -> None:
        self._secrets = read_secrets(secrets)
        self._id_header = id_header

    def verify(self, headers: Pairs, body: bytes) -> None:
        check_signature(self._secrets, (body,), [base64_digest(one_header(headers, HEADER))])

    def describe(self, headers: Pairs, data: Any) -> Description:
        return Description(
            id=required_id(optional_header(headers, self._id_header), f"the header {self._id_header}"),
            type=optional_header(headers, TOPIC),
            time=time_of(optional_header(headers, TRIGGERED)),
            compared=data,
        )

    def challenge(self, data: Any) -> None:
        return None
