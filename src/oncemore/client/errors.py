"""Errors of the retry client.  A RetryError has the story of the attempts, with the knowledge of the outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import OncemoreError, PayloadMismatch

if TYPE_CHECKING:
    from .story import Story


class RetryError(OncemoreError):
    """The request did not succeed.  *story* has all attempts.  With *key*, the operation can be continued later."""

    code = "CLIENT.retry"
    title = "The request did not succeed"

    def __init__(self, detail: str = "", *, story: Story | None = None, retry_after: float | None = None) -> None:
        super().__init__(detail, retry_after=retry_after)
        self.story = story

    @property
    def key(self) -> str | None:
        """The key under which the request can be sent again."""
        return self.story.key if self.story else None


class RetriesExhausted(RetryError):
    """All attempts that the policy allows have failed."""

    code = "CLIENT.retries_exhausted"
    title = "All attempts failed"
    retryable = True


class CircuitOpen(RetryError):
    """The host has failed too often in a row, so its circuit is open, and this attempt was not sent."""

    code = "CLIENT.circuit_open"
    title = "The circuit to this host is open"
    retryable = True


class OutcomeUnknown(RetryError):
    """The operation may have been performed, and it cannot be sent again safely.  Look it up at the server."""

    code = "CLIENT.outcome_unknown"
    title = "Whether the operation was performed is not known"


class AttemptTimeout(OncemoreError, TimeoutError):
    """One attempt took too long and was cut."""

    code = "CLIENT.attempt_timeout"
    title = "The attempt took too long and was cut"
    retryable = True


class KeyReused(PayloadMismatch):
    """The keyring knows the key from another request, so nothing was sent."""

    code = "CLIENT.key_reused"
    title = "The idempotency key already names a different request"


class CredentialsMissing(OncemoreError):
    """The client that resumes an operation lacks its credentials, or is for another host.  It stays pending."""

    code = "CLIENT.credentials_missing"
    title = "The resumed operation lacks its credentials"


class KeyringError(OncemoreError):
    """The keyring failed.  If it could not store a key, nothing was sent."""

    code = "CLIENT.keyring"
    title = "The keyring failed"
    retryable = True
