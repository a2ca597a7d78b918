"""The signature schemes of webhook senders, by name.  A new one is a class and a line in SCHEMES.

Each verifies the raw bytes, and then describes the event in them.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, get_args

import msgspec

from .._contract.policy import duration
from .._contract.problems import did_you_mean, unknown
from .._fingerprint.pointer import parse_pointer, value_at
from .._runtime.clock import SYSTEM, TimeSource
from ..errors import ConfigurationError, InvalidPayload, WebhookError
from .signature import (
    GOOD_TIMESTAMP,
    MOST_SIGNATURES,
    Signing,
    check_bytes,
    check_time,
    header_names,
    one_header,
)

Pairs = Sequence[tuple[str | bytes, str | bytes]]  # the headers of a request, as they came
Algorithm = Literal["sha1", "sha256", "sha384", "sha512"]
Encoding = Literal["hex", "base64"]
PARTS = re.compile(r"\{(id|timestamp|body)\}")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The event in a verified webhook.

    Attributes:
        id: Equal on every delivery of the event; the inbox remembers it.
        type: The name by which handlers are chosen; empty if the sender has none.
        time: When the event happened, if the sender says so.
        subject: The thing that the event is about, if the sender says so.
        compared: The part of the body that is equal on every delivery.  If it differs, the webhook is flagged.
    """

    id: str
    type: str
    compared: Any
    time: datetime | None = None
    subject: str = ""


class Scheme(Protocol):
    """The rules by which one kind of sender signs its webhooks and names its events."""

    name: str  # also the source of its events, unless the receiver is given another

    def verify(self, headers: Pairs, body: bytes) -> None:
        """Raise WebhookError, and nothing else, unless *body* is fresh and signed with one of the secrets."""

    def describe(self, headers: Pairs, data: Any) -> Description:
        """Return the event in *data*, the body of a verified webhook, or raise InvalidPayload if it has no id."""

    def challenge(self, data: Any) -> bytes | None:
        """Return the text with which a sender wants its URL confirmed, or None for an ordinary event."""
        return None


class StandardScheme(Scheme):
    """Standard Webhooks, versions v1 (`whsec_...`) and v1a (`whpk_...`); the headers begin with `webhook-`, or `svix-`.

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


class StripeScheme(Scheme):
    """Stripe: `Stripe-Signature: t=<seconds>,v1=<hex>`, of the time, a full stop and the body.

    Snapshot and thin events are accepted.  *secrets* are the endpoint's, as the dashboard shows them.
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
        # The number of endpoints that have yet to acknowledge the event changes between deliveries.
        changing = "pending_webhooks"
        return Description(
            id=required_id(member(data, "id"), "the member 'id'"),
            type=text_member(data, "type"),
            time=time_of(member(data, "created")),
            compared={name: data[name] for name in data if name != changing} if isinstance(data, dict) else data,
        )


class HmacScheme(Scheme):
    """Webhooks that are signed with an HMAC in the form that the options describe.

    Args:
        secrets: Texts or bytes, used as they are.  Any of them may have signed.
        header: The header with the signature.
        prefix: The text before the digest in that header, such as `sha256=`.
        algorithm: `sha1`, `sha256`, `sha384` or `sha512`.
        encoding: `hex` or `base64`.
        signed: The text that is signed, made of `{id}`, `{timestamp}`, `{body}` and any characters between them.
        id_header: The header with the event's id.  Give this or *id_pointer*.
        id_pointer: The place of the id in the body, as a JSON pointer such as `/event/id`.
        type_header: The header with the event's type.  It goes before *type_pointer*.
        type_pointer: The place of the type in the body; by default `/type`.
        timestamp_header: The header with the time of signing, in seconds since 1970.  It must be part of *signed*.
        tolerance: How far that time may be from now.
        clock: The clock that tells the present time.
    """

    name = "hmac"

    def __init__(
        self,
        secrets: Sequence[str | bytes],
        *,
        header: str = "X-Signature",
        prefix: str = "",
        algorithm: Algorithm = "sha256",
        encoding: Encoding = "hex",
        signed: str = "{body}",
        id_header: str = "",
        id_pointer: str = "",
        type_header: str = "",
        type_pointer: str = "",
        timestamp_header: str = "",
        tolerance: float | str = "5m",
        clock: TimeSource = SYSTEM,
    ) -> None:
        self._secrets = read_secrets(secrets)
        self._header = header.lower()
        self._prefix = prefix
        for value, choices in ((algorithm, get_args(Algorithm)), (encoding, get_args(Encoding))):
            if value not in choices:
                raise unknown(value, choices)
        self._algorithm = algorithm
        self._decode = hex_digest if encoding == "hex" else base64_digest
        self._id_header, self._type_header = id_header, type_header
        self._id_pointer = parse_pointer(id_pointer) if id_pointer else ()
        self._type_pointer = parse_pointer(type_pointer) if type_pointer else ("type",)
        self._timestamp_header = timestamp_header
        self._tolerance = duration(tolerance)
        self._clock = clock
        # Literal texts at even places, and between them the names of parts.
        self._signed = PARTS.split(signed)
        names, between = self._signed[1::2], self._signed[2:-1:2]
        if bool(id_header) == bool(id_pointer):
            raise ConfigurationError(
                "Say where the event's id is, once: id_header='X-Event-Id', or id_pointer='/id' for its place in the body"
            )
        if names.count("body") != 1:
            raise ConfigurationError(f"signed = {signed!r}: it needs {{body}} once, as in '{{timestamp}}.{{body}}'")
        if ("timestamp" in names) != bool(timestamp_header):
            raise ConfigurationError(
                "timestamp_header and {timestamp} in `signed` belong together: a time that is not signed proves nothing"
            )
        if any(not text or text[0].isalnum() for text in between):  # "12", "3" and "1", "23" would have one signature
            raise ConfigurationError(
                f"signed = {signed!r}: put a mark between each two parts, as in '{{timestamp}}.{{body}}'"
            )
        if "id" in names and not id_header:
            raise ConfigurationError("{id} in `signed` needs id_header: the body is not read before it is verified")

    def verify(self, headers: Pairs, body: bytes) -> None:
        given = one_header(headers, self._header)
        if not given.startswith(self._prefix):
            raise WebhookError(f"The {self._header} header is malformed: it must begin with {self._prefix}")
        timestamp = self._header_part(headers, "timestamp", self._timestamp_header)
        parts = {"id": self._header_part(headers, "id", self._id_header), "timestamp": timestamp, "body": body}
        content = [parts[text] if place % 2 else text.encode() for place, text in enumerate(self._signed)]
        offered = [self._decode(given.removeprefix(self._prefix))]
        check_signature(self._secrets, content, offered, self._algorithm)
        if self._timestamp_header:
            check_timestamp(timestamp.decode(), self._tolerance, self._clock)

    def _header_part(self, headers: Pairs, part: str, header: str) -> bytes:
        """Return the value of a signed header.  It must not contain the mark that ends it in the signed text."""
        names = self._signed[1::2]
        if part not in names:
            return b""
        value = one_header(headers, header.lower())
        mark = self._signed[2 * names.index(part) + 2]
        if mark and mark in value:
            raise WebhookError(f"The {header.lower()} header is malformed: it contains {mark!r}")
        return value.encode()

    def describe(self, headers: Pairs, data: Any) -> Description:
        if self._id_header:
            id = required_id(optional_header(headers, self._id_header), f"the header {self._id_header}")
        else:
            id = required_id(value_at(data, self._id_pointer), f"/{'/'.join(self._id_pointer)} in the body")
        type = optional_header(headers, self._type_header) if self._type_header else value_at(data, self._type_pointer)
        return Description(id=id, type=type if isinstance(type, str) else "", compared=data)


class GithubScheme(HmacScheme):
    """GitHub: `X-Hub-Signature-256: sha256=<hex>`, of the body.

    The type is the header `X-GitHub-Event`, such as `push`; the action is in the body.  GitHub signs no time and no
    delivery id, so only TLS keeps a recorded webhook from being sent again under another id.
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
    `X-Shopify-Event-Id` is shared by all webhooks of one action of a merchant, whatever their topic; deduplicating by it
    could lose one.
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

    The secret is the app's signing secret.  The type is the inner event's, such as `app_mention`.  Slash commands and
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
        if not all(hasattr(scheme, each) for each in ("verify", "describe", "challenge")) or secrets or options:
            raise ConfigurationError(
                f"scheme = {scheme!r}: name one of {', '.join(SCHEMES)}, or give an object of a subclass of Scheme with "
                "verify() and describe(), which has its secrets and options itself"
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


# Parts of the schemes


def read_secrets(secrets: Iterable[str | bytes]) -> tuple[bytes, ...]:
    """Return the secrets as bytes.  These senders use the text as it is, also if it looks like base64."""
    found = tuple(each.encode() if isinstance(each, str) else bytes(each) for each in secrets)
    if not found or not all(found):
        raise ConfigurationError("A receiver needs the secret that its sender signs with: secrets=['...']")
    return found


def check_signature(
    secrets: Sequence[bytes], content: Sequence[bytes], offered: Sequence[bytes], algorithm: str = "sha256"
) -> None:
    """Raise WebhookError unless one of the *offered* digests is the HMAC of *content* with one of the secrets.

    All are compared in constant time, so the time does not reveal which secret or digest was nearly right.
    """
    if len(offered) > MOST_SIGNATURES:
        raise WebhookError(f"The webhook has more than {MOST_SIGNATURES} signatures")
    matches = []
    for secret in secrets:
        digest = hmac.new(secret, digestmod=algorithm)
        for part in content:
            check_bytes(part)
            digest.update(part)
        matches += [hmac.compare_digest(digest.digest(), each) for each in offered]
    if not any(matches):
        raise WebhookError("No signature matches this body: it was changed on the way, or signed with another secret")


def hex_digest(text: str) -> bytes:
    """Return the bytes of a digest in hexadecimal digits, or none, which match no digest, for any other text."""
    try:
        return bytes.fromhex(text) if text.isalnum() else b""
    except ValueError:
        return b""


def base64_digest(text: str) -> bytes:
    """Return the bytes of a digest in base64, or none, which match no digest, for any other text."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def check_timestamp(text: str, tolerance: float, clock: TimeSource) -> None:
    """Raise WebhookError unless *text* is a time in seconds that is not further from now than *tolerance*."""
    if not GOOD_TIMESTAMP.fullmatch(text):
        raise WebhookError("The webhook's timestamp is not a time in seconds")
    check_time(int(text), tolerance, clock)


def optional_header(headers: Pairs, name: str) -> str:
    """Return the value of the header *name*, or an empty text if it did not come, came twice or is no plain text."""
    try:
        return one_header(headers, name.lower())
    except WebhookError:
        return ""


def required_id(value: object, place: str) -> str:
    """Return the event's id.  Raise InvalidPayload without one, because a repeated event would look like a new one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidPayload(f"The event has no id: {place} is missing, or is not a text")
    return value


def member(data: Any, name: str) -> Any:
    """Return a member of a JSON object, or None if *data* is no object or has no such member."""
    return data.get(name) if isinstance(data, dict) else None


def text_member(data: Any, name: str) -> str:
    value = member(data, name)
    return value if isinstance(value, str) else ""


def time_of(value: object) -> datetime | None:
    """Return the time in *value* (seconds since 1970, or a text of RFC 3339), or None if it has none."""
    try:
        if isinstance(value, str):
            found = datetime.fromisoformat(value)
            return found if found.tzinfo else found.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None
