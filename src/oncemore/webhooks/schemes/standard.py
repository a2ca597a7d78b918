"""Standard Webhooks, and Svix: `webhook-id`, `webhook-timestamp` and `webhook-signature`, or the same with `svix-`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._runtime.clock import SYSTEM, TimeSource
from ..signature import Signing, header_names, one_header
from .scheme import Description, Pairs, Scheme, text_member, time_of


class StandardScheme(Scheme):
    """Standard Webhooks, versions v1 (`whsec_...`) and v1a (`whpk_...`).

    The type of an event is the member `type` of its body, or `eventType`.
    """

    name = "standard"

    def __init__(
        self, secrets: Sequence[str | bytes], *, tolerance: float | str = "5m", clock: TimeSource = SYSTEM
    ) -> None:
        self._signing = Signing(*secrets, tolerance=tolerance, clock=clock)

    def verify(self, headers: Pairs, body: bytes) -> None:
        self._signing.verify(headers, body)

    def describe(self, headers: Pairs, data: Any) -> Description:
        return Description(
            id=one_header(headers, header_names(headers)[0]),  # part of the signed content
            type=text_member(data, "type") or text_member(data, "eventType"),
            time=time_of(text_member(data, "timestamp") or text_member(data, "time")),
            subject=text_member(data, "subject"),
            compared=data,
        )
