"""Slack's Events API: `X-Slack-Signature: v0=<hex>`, of `v0`, the time and the body, with colons between them."""

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

HEADER, TIMESTAMP = "x-slack-signature", "x-slack-request-timestamp"
VERSION = "v0"


class SlackScheme:
    """Slack's signatures, with the app's signing secret.  The type is that of the inner event, such as `app_mention`.

    Slash commands and buttons are forms without an id, and not events: they are refused with 400.
    """

    name = "slack"

    def __init__(
        self, secrets: Sequence[str | bytes], *, tolerance: float | str = "5m", clock: TimeSource = SYSTEM
    ) -> None:
        self._secrets = read_secrets(secrets)
        self._tolerance = duration(tolerance)
        self._clock = clock

    def verify(self, headers: Pairs, body: bytes) -> None:
        timestamp = one_header(headers, TIMESTAMP)
        version, _, digest = one_header(headers, HEADER).partition("=")
        if version != VERSION:
            raise WebhookError(f"The {HEADER} header is malformed: it begins with {VERSION}=")
        check_signature(self._secrets, (f"{VERSION}:{timestamp}:".encode(), body), [hex_digest(digest)])
        check_timestamp(timestamp, self._tolerance, self._clock)

    def describe(self, headers: Pairs, data: Any) -> Description:
        return Description(
            id=required_id(member(data, "event_id"), "the member 'event_id'"),
            type=text_member(member(data, "event"), "type") or text_member(data, "type"),
            time=time_of(member(data, "event_time")),
            compared=data,
        )

    def challenge(self, data: Any) -> bytes | None:
        """Return the text that Slack asks for when the URL is entered in the app's settings."""
        if text_member(data, "type") != "url_verification":
            return None
        return text_member(data, "challenge").encode("utf-8", "replace")
