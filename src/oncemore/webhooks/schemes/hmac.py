"""Any sender that signs with an HMAC: the header, the digest and the signed text are options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from ..._contract.policy import duration
from ..._contract.problems import unknown
from ..._fingerprint.pointer import parse_pointer, value_at
from ..._runtime.clock import SYSTEM, TimeSource
from ...errors import ConfigurationError, WebhookError
from ..signature import one_header
from .scheme import (
    Description,
    Pairs,
    Scheme,
    base64_digest,
    check_signature,
    check_timestamp,
    hex_digest,
    optional_header,
    read_secrets,
    required_id,
)

Algorithm = Literal["sha1", "sha256", "sha384", "sha512"]
Encoding = Literal["hex", "base64"]
PARTS = re.compile(r"\{(id|timestamp|body)\}")


class HmacScheme(Scheme):
    """Webhooks that are signed with an HMAC, as the options say.

    Args:
        secrets: Texts or bytes, used as they are.  Any of them may have signed.
        header: The header with the signature.
        prefix: The text before the digest in that header, such as `sha256=`.
        algorithm: `sha1`, `sha256`, `sha384` or `sha512`.
        encoding: `hex` or `base64`.
        signed: The text that is signed, made of `{id}`, `{timestamp}`, `{body}` and any characters between them.
        id_header: The header with the event's id; or
        id_pointer: the place of the id in the body, as a JSON pointer: `/event/id`.
        type_header: The header with the event's type; or
        type_pointer: its place in the body.
        timestamp_header: The header with the time of signing, in seconds since 1970.  It must be part of *signed*.
        tolerance: How far that time may be from now.
        clock: The clock by which it is judged.
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
        # Texts, and between each two of them the name of a part.
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
        if any(not text or text[0].isalnum() for text in between):  # "12" and "3" would be signed as "1" and "23" are
            raise ConfigurationError(
                f"signed = {signed!r}: put a mark between each two parts, as in '{{timestamp}}.{{body}}'"
            )
        if "id" in names and not id_header:
            raise ConfigurationError("{id} in `signed` needs id_header: the body is not read before it is verified")

    def verify(self, headers: Pairs, body: bytes) -> None:
        given = one_header(headers, self._header)
        if not given.startswith(self._prefix):
            raise WebhookError(f"The {self._header} header is malformed: it begins with {self._prefix}")
        timestamp = self._header_part(headers, "timestamp", self._timestamp_header)
        parts = {"id": self._header_part(headers, "id", self._id_header), "timestamp": timestamp, "body": body}
        content = [parts[text] if place % 2 else text.encode() for place, text in enumerate(self._signed)]
        offered = [self._decode(given.removeprefix(self._prefix))]
        check_signature(self._secrets, content, offered, self._algorithm)
        if self._timestamp_header:
            check_timestamp(timestamp.decode(), self._tolerance, self._clock)

    def _header_part(self, headers: Pairs, part: str, header: str) -> bytes:
        """Return the value of a header that is signed.  The mark behind it must not be in it, or it could end earlier."""
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
