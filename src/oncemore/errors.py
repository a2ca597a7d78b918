"""All errors of oncemore, in one tree.  Each class says whether a retry may help, and has an HTTP status."""

from __future__ import annotations

from typing import Any, ClassVar

NO_RESULT: Any = object()  # the default of `ProviderDuplicate(result=...)`, because None is a possible result


class OncemoreError(Exception):
    """The base of all errors of oncemore.

    Attributes:
        code: For programs.  It never changes, and docs/errors has a page for each.
        status: The HTTP status with which a middleware answers.
        title: One line for people, the same for all errors of the class.
        retryable: Whether the same call with the same key may succeed later.
        detail: What happened in this case, with its values.
        retry_after: Seconds until a retry makes sense, or None if that is not known.
    """

    code: ClassVar[str] = "INTERNAL.error"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Something went wrong inside oncemore"
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.retry_after = retry_after

    def problem(self) -> dict[str, Any]:
        """Return the members of an RFC 9457 problem document."""
        return {
            "type": f"urn:oncemore:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "error_code": self.code,
            "retryable": self.retryable,
        }


# ── Mistakes in the program or its configuration.  Most are raised while the service starts.


class ConfigurationError(OncemoreError):
    """A contract, URL or argument is wrong.  The message names the place and the correction.

    Attributes:
        faults: One sentence for each fault, if a contract has several.
    """

    code = "CONFIGURATION.invalid"
    title = "The configuration is invalid"
    faults: tuple[str, ...] = ()


class MissingDriver(ConfigurationError):
    """An optional package is not installed.  The message has the command that installs it."""

    code = "CONFIGURATION.missing_driver"
    title = "A driver is not installed"


class TransactionEnded(ConfigurationError):
    """The performing code committed or rolled back the guard's transaction by itself, so the outcome was not written."""

    code = "CONFIGURATION.transaction_ended"
    title = "The transaction was ended behind the guard's back"


class StepsChanged(ConfigurationError):
    """A resumed operation's code runs other steps than the stored ones.  The message names both steps."""

    code = "CONFIGURATION.steps_changed"
    title = "The operation's steps have changed since it began"


# ── Refusals: the request, a rule, or the record says that the operation must not be performed


class Refusal(OncemoreError):
    """The operation was not performed, and the ledger has not changed."""


class InvalidKey(Refusal):
    """The key is malformed, too long, or not in the format that the rule asks for."""

    code = "VALIDATION.idempotency.key_invalid"
    status = 400
    title = "The idempotency key is malformed"


class MissingKey(Refusal):
    """The rule requires a key, and the caller sent none."""

    code = "VALIDATION.idempotency.key_missing"
    status = 400
    title = "An idempotency key is required"


class InvalidPayload(Refusal):
    """The payload cannot be parsed as its content type."""

    code = "VALIDATION.payload"
    status = 400
    title = "The payload cannot be read"


class PayloadTooLarge(Refusal):
    """The payload is larger than the rule allows."""

    code = "VALIDATION.payload_too_large"
    status = 413
    title = "The payload is too large"


class InvalidPrincipal(Refusal):
    """The principal is empty, so the key has no owner."""

    code = "AUTH.principal_missing"
    status = 401
    title = "The caller is not known"


class PrincipalFailed(Refusal):
    """The function that names the principal has raised an error."""

    code = "INTERNAL.principal_failed"
    status = 500
    title = "The caller could not be determined"
    retryable = True


class WebhookError(Refusal):
    """A received webhook is unsigned, too old, or its signature does not match its body."""

    code = "AUTH.webhook_signature"
    status = 401
    title = "The webhook cannot be trusted"


class UnsafeTarget(Refusal):
    """A webhook's URL leads to a private or reserved network, or is not HTTPS.  Nothing is sent to it."""

    code = "VALIDATION.webhook_target"
    status = 400
    title = "The webhook's address is not allowed"


class Undeclared(Refusal):
    """The contract has no rule for this operation, and refuses undeclared ones."""

    code = "VALIDATION.idempotency.undeclared"
    status = 404
    title = "The operation is not in the contract"


class PreconditionRequired(Refusal):
    """The rule requires an If-Match header, and the caller sent none."""

    code = "PRECONDITION.if_match_required"
    status = 428
    title = "An If-Match header is required"


class PreconditionFailed(Refusal):
    """The resource has changed: its ETag is not in the caller's If-Match header."""

    code = "PRECONDITION.if_match_failed"
    status = 412
    title = "The resource has changed"


class PayloadMismatch(Refusal):
    """The key was first used with a different request."""

    code = "CONFLICT.idempotency.payload_mismatch"
    status = 409
    title = "The idempotency key was used with a different payload"


class InProgress(Refusal):
    """Another caller is performing the operation, and this one does not wait, or its waiting time is over."""

    code = "CONFLICT.idempotency.in_progress"
    status = 409
    title = "The operation is still in progress"
    retryable = True


class UnknownOutcome(Refusal):
    """An earlier attempt has an unknown outcome, as after a crash, until an operator or the resolver decides."""

    code = "CONFLICT.idempotency.outcome_unknown"
    status = 409
    title = "The outcome of the operation is unknown"


class Duplicate(Refusal):
    """The operation was performed before, and the rule says `on_duplicate = "reject"`."""

    code = "CONFLICT.idempotency.duplicate"
    status = 409
    title = "The operation was already performed"


class Suspected(Refusal):
    """An equal request came with another key a moment ago, and the rule says `suspect = "reject"`."""

    code = "CONFLICT.idempotency.suspected_duplicate"
    status = 409
    title = "The same request was just made under another key"


class OutcomeNotKept(Refusal):
    """The operation was performed, but its outcome cannot be replayed: it was too large or could not be stored."""

    code = "CONFLICT.idempotency.outcome_not_kept"
    status = 409
    title = "The operation was performed, but its response was not kept"


class KeyExpired(Refusal):
    """The key is older than the retention, so a first request and a duplicate look the same."""

    code = "PRECONDITION.idempotency.key_expired"
    status = 412
    title = "The idempotency key has expired"


class NotFound(Refusal):
    """The ledger has no record of this operation, or it belongs to another caller."""

    code = "NOT_FOUND.idempotency.record"
    status = 404
    title = "There is no such record"


class NotResolvable(Refusal):
    """The outcome of the operation is known, so there is nothing to resolve."""

    code = "CONFLICT.idempotency.not_resolvable"
    status = 409
    title = "The record is not in doubt"


class WrongState(Refusal):
    """The row is in a state in which the action is not allowed."""

    code = "CONFLICT.state"
    status = 409
    title = "The action is not possible in this state"


class NoSuchRow(Refusal):
    """The table has no row with this id."""

    code = "NOT_FOUND.row"
    status = 404
    title = "There is no such row"


class RateLimited(Refusal):
    """The principal has used too many new keys within the limit's window."""

    code = "RATE_LIMIT.exceeded"
    status = 429
    title = "Too many new operations"
    retryable = True


class ProviderDuplicate(Refusal):
    """The provider says that it has applied the operation before.  Raise this in the code that calls the provider.

    With the provider's existing *result*, the operation or step is settled with that result: the caller sees a success.
    Inside a transaction or between two steps it is an ordinary error, because other effects may be missing.
    """

    code = "PROVIDER.duplicate"
    status = 409
    title = "The provider had already applied the operation"

    def __init__(self, detail: str = "", *, result: Any = NO_RESULT, retry_after: float | None = None) -> None:
        super().__init__(detail, retry_after=retry_after)
        self.result = result

    @property
    def has_result(self) -> bool:
        """Whether the provider's existing result was given."""
        return self.result is not NO_RESULT


# ── Failures of the ledger


class StoreError(OncemoreError):
    """The store failed.  The requested change may or may not have been made."""

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
    """The lease lapsed and another caller took the operation over, or an operator resolved it.  Nothing was written."""

    code = "TRANSIENT.idempotency.fenced"
    status = 409
    title = "The operation was taken over"
    retryable = True


class CorruptRecord(StoreError):
    """The stored record cannot be decoded or decrypted."""

    code = "TRANSIENT.idempotency.record_corrupt"
    title = "The stored record cannot be read"


# ── Failures of a message broker


class BrokerError(OncemoreError):
    """The broker failed or could not be reached.  The message may or may not have been stored there."""

    code = "DEPENDENCY.broker"
    status = 503
    title = "The message broker failed"
    retryable = True
