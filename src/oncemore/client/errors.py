"""What the retry client raises: each error carries the story, and says what is known about the outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import OncemoreError, PayloadMismatch

if TYPE_CHECKING:
    from .story import Story


class RetryError(OncemoreError):
    """The operation was not seen to end well; *story* tells what was tried, *key* continues it later."""

    code = "CLIENT.retry"
    title = "The request did not succeed"

    def __init__(self, detail: str = "", *, story: Story | None = None, retry_after: float | None = None) -> None:
        super().__init__(detail, retry_after=retry_after)
        self.story = story

    @property
    def key(self) -> str | None:
        """The key under which the operation can be asked for again."""
        return self.story.key if self.story else None


class RetriesExhausted(RetryError):
    """Every attempt that the policy allows has failed."""

    code = "CLIENT.retries_exhausted"
    title = "All attempts failed"
    retryable = True


class CircuitOpen(RetryError):
    """The host failed too often just now, so nothing was sent."""

    code = "CLIENT.circuit_open"
    title = "The circuit to this host is open"
    retryable = True


class OutcomeUnknown(RetryError):
    """It may have been performed, and asking again is no longer safe: the server may have forgotten the key."""

    code = "CLIENT.outcome_unknown"
    title = "Whether the operation was performed is not known"


class AttemptTimeout(OncemoreError, TimeoutError):
    """One attempt took longer than it may, and was cut."""

    code = "CLIENT.attempt_timeout"
    title = "The attempt took too long and was cut"
    retryable = True


class KeyReused(PayloadMismatch):
    """The key was used for another request from here; nothing was sent."""

    code = "CLIENT.key_reused"
    title = "The idempotency key already names a different request"


class CredentialsMissing(OncemoreError):
    """An operation was to be resumed without the credentials that it had; nothing was sent, and it stays pending."""

    code = "CLIENT.credentials_missing"
    title = "The resumed operation lacks its credentials"


class KeyringError(OncemoreError):
    """The key could not be written down, so nothing was sent."""

    code = "CLIENT.keyring"
    title = "The keyring failed"
    retryable = True
