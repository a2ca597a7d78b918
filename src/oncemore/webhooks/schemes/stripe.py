"""Stripe: `Stripe-Signature: t=<seconds>,v1=<hex>`, of the time, a full stop and the body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._contract.policy import duration
from ..._runtime.clock import SYSTEM, TimeSource
from ...errors import WebhookError
from ..signature import one_header
from .scheme import (
    Description,
    Pairs,
    check_signature,
    check_timestamp,
    hex_digest,
    member,
    read_secrets,
    required_id,
    text_member,
    time_of,
)

HEADER = "stripe-signature"
# The number of endpoints that have not acknowledged the event yet: it changes from one delivery to the next.
CHANGING = "pending_webhooks"


class StripeScheme:
    """Stripe's signatures, of snapshot and thin events.  *secrets* are the endpoint's, as the dashboard shows them."""

    name = "stripe"

    def __init__(
        self, secrets: Sequence[str | bytes], *, tolerance: float | str = "5m", clock: TimeSource = SYSTEM
    ) -> None:
        self._secrets = read_secrets(secrets)
        self._tolerance = duration(tolerance)
        self._clock = clock

    def verify(self, headers: Pairs, body: bytes) -> None:
        items = [item.partition("=") for item in one_header(headers, HEADER).split(",")]
        times = [value for name, _, value in items if name == "t"]
        if len(times) != 1:
            raise WebhookError(f"The {HEADER} header needs one time: t=1492774577,v1=...")
        offered = [hex_digest(value) for name, _, value in items if name == "v1"]
        check_signature(self._secrets, (f"{times[0]}.".encode(), body), offered)
        check_timestamp(times[0], self._tolerance, self._clock)

    def describe(self, headers: Pairs, data: Any) -> Description:
        compared = {name: value for name, value in data.items() if name != CHANGING} if isinstance(data, dict) else data
        return Description(
            id=required_id(member(data, "id"), "the member 'id'"),
            type=text_member(data, "type"),
            time=time_of(member(data, "created")),
            compared=compared,
        )

    def challenge(self, data: Any) -> None:
        return None
