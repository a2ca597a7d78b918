"""The signature schemes of webhook senders, by name.  A new one is a class, here or in its own file, and a line in SCHEMES."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..._contract.policy import duration
from ..._contract.problems import did_you_mean
from ..._runtime.clock import SYSTEM, TimeSource
from ...errors import ConfigurationError, WebhookError
from ..signature import one_header
from .hmac import HmacScheme
from .scheme import (
    Description,
    Pairs,
    Scheme,
    check_signature,
    check_timestamp,
    hex_digest,
    member,
    optional_header,
    read_secrets,
    required_id,
    text_member,
    time_of,
)
from .standard import StandardScheme

__all__ = ["SCHEMES", "Scheme", "make_scheme"]


class StripeScheme(Scheme):
    """Stripe: `Stripe-Signature: t=<seconds>,v1=<hex>`, of the time, a full stop and the body.

    Snapshot and thin events.  *secrets* are the endpoint's, as the dashboard shows them.
    """

    name = "stripe"

    def __init__(
        self, secrets: Sequence[str | bytes], *, tolerance: float | str = "5m", clock: TimeSource = SYSTEM
    ) -> None:
        self._secrets = read_secrets(secrets)
        self._tolerance = duration(tolerance)
        self._clock = clock

    def verify(self, headers: Pairs, body: bytes) -> None:
        items = [item.partition("=") for item in one_header(headers, "stripe-signature").split(",")]
        times = [value for name, _, value in items if name == "t"]
        if len(times) != 1:
            raise WebhookError("The stripe-signature header needs one time: t=1492774577,v1=...")
        offered = [hex_digest(value) for name, _, value in items if name == "v1"]
        check_signature(self._secrets, (f"{times[0]}.".encode(), body), offered)
        check_timestamp(times[0], self._tolerance, self._clock)

    def describe(self, headers: Pairs, data: Any) -> Description:
        # The number of endpoints that have not acknowledged the event yet changes from one delivery to the next.
        changing = "pending_webhooks"
        return Description(
            id=required_id(member(data, "id"), "the member 'id'"),
            type=text_member(data, "type"),
            time=time_of(member(data, "created")),
            compared={name: data[name] for name in data if name != changing} if isinstance(data, dict) else data,
        )


class GithubScheme(HmacScheme):
    """GitHub: `X-Hub-Signature-256: sha256=<hex>`, of the body.

    The type is that of `X-GitHub-Event`, such as `push`; the action is in the body.  GitHub signs neither a time nor the
    delivery's id, so only TLS keeps a recorded webhook from being sent again under another id.
    """

    name = "github"

    def __init__(self, secrets: Sequence[str | bytes]) -> None:
        super().__init__(
            secrets,
            header="x-hub-signature-256",
            prefix="sha256=",
            id_header="x-github-delivery",
            type_header="x-github-event",
        )


class ShopifyScheme(HmacScheme):
    """Shopify: `X-Shopify-Hmac-Sha256: <base64>`, of the body, with the app's client secret.

    The type is the topic, such as `orders/create`.  `X-Shopify-Webhook-Id` is equal on each delivery of one webhook.
    `X-Shopify-Event-Id` is shared by all webhooks of one action of a merchant, also by those of other topics; deduplicating
    by it could lose one.
    """

    name = "shopify"

    def __init__(self, secrets: Sequence[str | bytes], *, id_header: str = "x-shopify-webhook-id") -> None:
        header, topic = "x-shopify-hmac-sha256", "x-shopify-topic"
        super().__init__(secrets, header=header, encoding="base64", id_header=id_header, type_header=topic)

    def describe(self, headers: Pairs, data: Any) -> Description:
        time = time_of(optional_header(headers, "x-shopify-triggered-at"))
        return msgspec.structs.replace(super().describe(headers, data), time=time)


class SlackScheme(HmacScheme):
    """Slack's Events API: `X-Slack-Signature: v0=<hex>`, of `v0`, the time and the body, with colons between them.

    The secret is the app's signing secret.  The type is that of the inner event, such as `app_mention`.  Slash commands and
    buttons are forms without an id, and not events: they are refused with 400.
    """

    name = "slack"

    def __init__(
        self, secrets: Sequence[str | bytes], *, tolerance: float | str = "5m", clock: TimeSource = SYSTEM
    ) -> None:
        super().__init__(
            secrets,
            header="x-slack-signature",
            prefix="v0=",
            signed="v0:{timestamp}:{body}",
            id_pointer="/event_id",
            timestamp_header="x-slack-request-timestamp",
            tolerance=tolerance,
            clock=clock,
        )

    def describe(self, headers: Pairs, data: Any) -> Description:
        found = super().describe(headers, data)
        inner = text_member(member(data, "event"), "type")
        return msgspec.structs.replace(found, type=inner or found.type, time=time_of(member(data, "event_time")))

    def challenge(self, data: Any) -> bytes | None:
        """Return the text that Slack asks for when the URL is entered in the app's settings."""
        if text_member(data, "type") != "url_verification":
            return None
        return text_member(data, "challenge").encode("utf-8", "replace")


SCHEMES: dict[str, Callable[..., Scheme]] = {
    "standard": StandardScheme,
    "svix": StandardScheme,
    "stripe": StripeScheme,
    "github": GithubScheme,
    "shopify": ShopifyScheme,
    "slack": SlackScheme,
    "hmac": HmacScheme,
}


def make_scheme(scheme: str | Scheme, secrets: Sequence[str | bytes] | str | bytes, options: dict[str, Any]) -> Scheme:
    """Return the scheme of that name with its *secrets*, or *scheme* itself if it is one of the user's own."""
    if not isinstance(scheme, str):
        if not hasattr(scheme, "verify") or secrets or options:
            raise ConfigurationError(
                f"scheme = {scheme!r}: name one of {', '.join(SCHEMES)}, or give an object with verify() and describe(), "
                "which has its secrets and options itself"
            )
        return scheme
    if scheme not in SCHEMES:
        raise ConfigurationError(
            f"{scheme!r} is not a signature scheme{did_you_mean(scheme, SCHEMES)}; known are {', '.join(SCHEMES)}"
        )
    make = SCHEMES[scheme]
    known = [name for name in inspect.signature(make).parameters if name != "secrets"]
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"The scheme {scheme!r} has no option {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}"
            )
    return make([secrets] if isinstance(secrets, str | bytes) else secrets, **options)
