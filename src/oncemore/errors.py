"""Every error, in one tree: each class says what happened, whether a retry can help, and how HTTP shows it."""

from __future__ import annotations

from typing import Any, ClassVar

UNTOLD: Any = object()  # stands for a result that nobody told


class OncemoreError(Exception):
    """The root: *code* is the machine's word, *status* HTTP's; *retryable* says that the same call may work later."""

    code: ClassVar[str] = "INTERNAL.error"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Something went wrong inside oncemore"
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.retry_after = retry_after

    def problem(self) -> dict[str, Any]:
        """The members of an RFC 9457 problem document."""
        return {
            "type": f"urn:oncemore:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "error_code": self.code,
            "retryable": self.retryable,
        }


# ── The programmer's mistakes: raised while things are set up, never answered to a client


class ConfigurationError(OncemoreError):
    """A contract, URL or argument is wrong; the message names the place and the fix."""

    code = "CONFIGURATION.invalid"
    title = "The configuration is invalid"


class MissingDriver(ConfigurationError):
    """An optional package is not installed; the message is the command that installs it."""

    code = "CONFIGURATION.missing_driver"
    title = "A driver is not installed"


class TransactionEnded(ConfigurationError):
    """The code that borrowed the guard's transaction has committed it or rolled it back."""

    code = "CONFIGURATION.transaction_ended"
    title = "The transaction was ended behind the guard's back"


class StepsChanged(ConfigurationError):
    """An operation resumes, and its code now takes other steps than those that are checkpointed; the message names both."""

    code = "CONFIGURATION.steps_changed"
    title = "The operation's steps have changed since it began"


# ── Refusals: the operation was not performed, by rule


class Refusal(OncemoreError):
    """The operation did not run, and the ledger is as it was."""


class InvalidKey(Refusal):
    """The key is malformed, too long or of the wrong format."""

    code = "VALIDATION.idempotency.key_invalid"
    status = 400
    title = "The idempotency key is malformed"


class MissingKey(Refusal):
    """The rule requires a key and the caller sent none."""

    code = "VALIDATION.idempotency.key_missing"
    status = 400
    title = "An idempotency key is required"


class InvalidPayload(Refusal):
    """The payload cannot be read as what it says it is."""

    code = "VALIDATION.payload"
    status = 400
    title = "The payload cannot be read"


class PayloadTooLarge(Refusal):
    """The payload is larger than the rule allows."""

    code = "VALIDATION.payload_too_large"
    status = 413
    title = "The payload is too large"


class InvalidPrincipal(Refusal):
    """Nobody owns the key: the principal is empty."""

    code = "AUTH.principal_missing"
    status = 401
    title = "The caller is not known"


class PrincipalFailed(Refusal):
    """The function that tells who is calling has failed."""

    code = "INTERNAL.principal_failed"
    status = 500
    title = "The caller could not be determined"
    retryable = True


class WebhookError(Refusal):
    """A received webhook is not what its sender signed, or not signed at all, or too old."""

    code = "AUTH.webhook_signature"
    status = 401
    title = "The webhook cannot be trusted"


class Undeclared(Refusal):
    """The contract does not know this operation, and refuses what it does not know."""

    code = "VALIDATION.idempotency.undeclared"
    status = 404
    title = "The operation is not in the contract"


class PreconditionRequired(Refusal):
    """The rule wants a conditional request, and the caller sent no If-Match."""

    code = "PRECONDITION.if_match_required"
    status = 428
    title = "An If-Match header is required"


class PreconditionFailed(Refusal):
    """The resource is no longer what the caller's If-Match says."""

    code = "PRECONDITION.if_match_failed"
    status = 412
    title = "The resource has changed"


class PayloadMismatch(Refusal):
    """The key already names a different request."""

    code = "CONFLICT.idempotency.payload_mismatch"
    status = 409
    title = "The idempotency key was used with a different payload"


class InProgress(Refusal):
    """The operation is running elsewhere, and waiting for it was not asked for or took too long."""

    code = "CONFLICT.idempotency.in_progress"
    status = 409
    title = "The operation is still in progress"
    retryable = True


class UnknownOutcome(Refusal):
    """A holder vanished in mid-operation: whether the effect happened is not known until someone resolves it."""

    code = "CONFLICT.idempotency.outcome_unknown"
    status = 409
    title = "The outcome of the operation is unknown"


class Duplicate(Refusal):
    """The operation was done before, and the rule rejects repeats."""

    code = "CONFLICT.idempotency.duplicate"
    status = 409
    title = "The operation was already performed"


class Suspected(Refusal):
    """The same request came under a different key a moment ago, and the rule rejects such pairs."""

    code = "CONFLICT.idempotency.suspected_duplicate"
    status = 409
    title = "The same request was just made under another key"


class OutcomeNotKept(Refusal):
    """The operation was performed, but its outcome was too large or not storable, so it cannot be replayed."""

    code = "CONFLICT.idempotency.outcome_not_kept"
    status = 409
    title = "The operation was performed, but its response was not kept"


class KeyExpired(Refusal):
    """The key is older than the retention, so a repeat can no longer be told from a first request."""

    code = "PRECONDITION.idempotency.key_expired"
    status = 412
    title = "The idempotency key has expired"


class NotFound(Refusal):
    """The ledger has no such record."""

    code = "NOT_FOUND.idempotency.record"
    status = 404
    title = "There is no such record"


class NotResolvable(Refusal):
    """The record is not in doubt, so there is nothing to resolve."""

    code = "CONFLICT.idempotency.not_resolvable"
    status = 409
    title = "The record is not in doubt"


class WrongState(Refusal):
    """The action does not follow from the state that the row is in."""

    code = "CONFLICT.state"
    status = 409
    title = "The action is not possible in this state"


class NoSuchRow(Refusal):
    """There is no row whose state could change."""

    code = "NOT_FOUND.row"
    status = 404
    title = "There is no such row"


class RateLimited(Refusal):
    """The principal made too many new keys."""

    code = "RATE_LIMIT.exceeded"
    status = 429
    title = "Too many new operations"
    retryable = True


class ProviderDuplicate(Refusal):
    """The provider says that it has done this already; its existing *result* is the answer.

    Raised with a result by what is performed under a lease, a step for instance, it is settled as that result: to whoever
    asked, the operation has succeeded.
    """

    code = "PROVIDER.duplicate"
    status = 409
    title = "The provider had already applied the operation"

    def __init__(self, detail: str = "", *, result: Any = UNTOLD, retry_after: float | None = None) -> None:
        super().__init__(detail, retry_after=retry_after)
        self.result = result

    @property
    def told(self) -> bool:
        """Whether the existing result is known."""
        return self.result is not UNTOLD


# ── Faults: the ledger could not do its work


class StoreError(OncemoreError):
    """The store failed; what was asked of it may or may not have happened."""

    code = "DEPENDENCY.store"
    status = 503
    title = "The idempotency store failed"
    retryable = True


class StoreUnavailable(StoreError):
    """The store cannot be reached."""

    code = "DEPENDENCY.unavailable"
    title = "The idempotency store is unavailable"


class StoreTimeout(StoreError):
    """The store did not answer in time."""

    code = "DEPENDENCY.timeout"
    status = 504
    title = "The idempotency store did not answer in time"


class Fenced(OncemoreError):
    """The lease is no longer yours: it lapsed and someone else took the operation over, or it was resolved."""

    code = "TRANSIENT.idempotency.fenced"
    status = 409
    title = "The operation was taken over"
    retryable = True


class CorruptRecord(StoreError):
    """The stored record cannot be read."""

    code = "TRANSIENT.idempotency.record_corrupt"
    title = "The stored record cannot be read"
