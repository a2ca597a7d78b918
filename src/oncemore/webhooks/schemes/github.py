"""GitHub: `X-Hub-Signature-256: sha256=<hex>`, of the body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import WebhookError
from ..signature import one_header
from .scheme import (
    Description,
    Pairs,
    check_signature,
    hex_digest,
    optional_header,
    read_secrets,
    required_id,
)

HEADER, PREFIX = "x-hub-signature-256", "sha256="
DELIVERY, EVENT = "x-github-delivery", "x-github-event"


class GithubScheme:
    """GitHub's signatures.  The type is that of `X-GitHub-Event`, such as `push`; the action is in the body.

    GitHub signs neither a time nor the delivery's id, so only TLS keeps a recorded webhook from being sent again under
    another id.
    """

    name = "github"

    def __init__(self, secrets: Sequence[str | bytes]) -> None:
        self._secrets = read_secrets(secrets)

    def verify(self, headers: Pairs, body: bytes) -> None:
        given = one_header(headers, HEADER)
        if not given.startswith(PREFIX):
            raise WebhookError(f"The {HEADER} header is malformed: it begins with {PREFIX}")
        check_signature(self._secrets, (body,), [hex_digest(given.removeprefix(PREFIX))])

    def describe(self, headers: Pairs, data: Any) -> Description:
        return Description(
            id=required_id(optional_header(headers, DELIVERY), f"the header {DELIVERY}"),
            type=optional_header(headers, EVENT),
            compared=data,
        )

    def challenge(self, data: Any) -> None:
        return None
