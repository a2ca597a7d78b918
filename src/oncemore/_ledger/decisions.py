"""Decisions that need no store: the answer or the refusal for a caller whose operation has a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal

import msgspec

from .._contract.policy import Policy
from ..errors import (
    ConfigurationError,
    Duplicate,
    Fenced,
    InProgress,
    NotFound,
    NotResolvable,
    OutcomeNotKept,
    PayloadMismatch,
    Refusal,
    UnknownOutcome,
)
from .model import Lease, Operation, Outcome, Record
from .values import NOTHING, value_outcome

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # so that a plain `Answer` is one of any value
else:
    from typing import TypeVar

    T = TypeVar("T")

How = Literal["stored", "replayed", "unstored", "released", "unknown"]


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """The outcome of an operation, and *how* it came:

    - "stored": it was performed now, and the outcome is stored;
    - "replayed": it was performed before, and this is the stored outcome;
    - "unstored": it was performed now, but the outcome could not be stored;
    - "released": it was performed now, and the policy does not keep such an outcome: the next claim performs again;
    - "unknown": the policy's `doubt` names its status or error: only this caller gets it, and `on_unknown` decides.

    *value* is the value that the performer returned, or its exception if the policy's `errors` name it.  For a replayed
    outcome, `Guard.run` gives an equal value.
    """

    outcome: Outcome
    how: How
    expires_at: float | None = None
    attempt: int = 1
    value: T = None  # type: ignore[assignment]


class Resolution(msgspec.Struct, frozen=True):
    """The decision about an unknown outcome: it happened (`settled`), it did not (`released`), or nobody can tell yet."""

    verdict: Literal["settled", "released", "unknown"]
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "settled") != (self.outcome is not None):  # without an outcome, it would be performed again
            raise ConfigurationError(
                f"Resolution({self.verdict!r}): 'settled' needs an outcome, and the others have none; write "
                "Resolution.settled(value), Resolution.released() or Resolution.unknown()"
            )

    @classmethod
    def settled(cls, outcome: Any) -> Resolution:
        """Decide that it happened.  *outcome* is an Outcome, or the value that the function returned."""
        return cls("settled", outcome if isinstance(outcome, Outcome) else value_outcome(outcome))

    @classmethod
    def released(cls) -> Resolution:
        """Decide that it did not happen, so that it may be performed."""
        return cls("released")

    @classmethod
    def unknown(cls) -> Resolution:
        """Leave it undecided: nobody can tell yet, and the next caller asks again."""
        return cls("unknown")


def check(operation: Operation, fingerprint: str) -> None:
    """Raise PayloadMismatch unless the stored *fingerprint* is of the same request."""
    if operation.same(fingerprint):
        return
    if operation.scope == f"once:{operation.name}":  # show the key to a function's caller; an HTTP client knows its own
        raise PayloadMismatch(
            f"{operation.name} was called before under the key {operation.key!r}, with other arguments: name what differs in "
            "the key, or leave it out of the comparison by ignore="
        )
    raise PayloadMismatch("This key was used for a different request; make a new key for a new operation")


def replay(outcome: Outcome, policy: Policy, *, expires_at: float | None = None) -> Answer:
    """Return the answer to a duplicate, as the policy's on_duplicate says."""
    if policy.on_duplicate == "reject":
        raise Duplicate("This operation was performed before, and duplicates are rejected; look up its result")
    if policy.on_duplicate == "ok":
        outcome = Outcome(outcome.kind, 200) if outcome.kind == "response" else NOTHING
    else:
        outcome = shown(outcome)
    return Answer(outcome, "replayed", expires_at)


def shown(outcome: Outcome) -> Outcome:
    """Return the outcome, or raise OutcomeNotKept if it is a tombstone."""
    if outcome.kind == "tombstone":
        why = outcome.body.decode("utf-8", "replace")  # the reason, if the operation is a function
        raise OutcomeNotKept(
            f"The operation was performed once, but its outcome could not be kept{f' ({why})' if why else ''}; "
            "look up its result"
        )
    return outcome


def is_free(record: Record) -> bool:
    """Whether the same request may claim the record, because it was released or its lease is over."""
    return record.state == "released" or (record.state == "running" and record.lease_until <= record.now)


def in_progress(record: Record) -> InProgress:
    """Return the refusal for a running operation, with the time after which to retry."""
    left = max(record.lease_until - record.now, 0.0)
    return InProgress(
        "The first request with this key is still running; retry later", retry_after=min(1.0, left) or 1.0
    )


def outcome_unknown(key: str, note: str = "") -> UnknownOutcome:
    """Return the refusal for an operation with an unknown outcome: it crashed, or *note* says how it ended."""
    end = f"broke off ({note})" if note else "crashed"
    return UnknownOutcome(
        f"An earlier attempt with key {key!r} {end}, and whether it took effect is not known. "
        f"Look up the result; an operator can then decide with: oncemore keys resolve {key!r}"
    )


def fenced(lease: Lease) -> Fenced:
    """Return the refusal of a late owner's write."""
    return Fenced(f"The lease on {lease.operation.key!r} is lost: it lapsed and was taken over, or it was resolved")


def not_resolvable(state: str) -> Refusal:
    """Return the refusal to resolve a record that is not in doubt."""
    if state == "running":
        return InProgress("It is running; only an operation with an unknown outcome can be resolved", retry_after=1.0)
    if state == "absent":
        return NotFound("There is no such record")
    return NotResolvable(f"It is {state}; only an operation with an unknown outcome can be resolved")


def not_deletable() -> InProgress:
    """Return the refusal to delete a record while its operation runs."""
    return InProgress("It is running; wait until it has ended, or until its lease is over", retry_after=1.0)
