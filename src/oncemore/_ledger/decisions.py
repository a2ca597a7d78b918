"""Decisions that need no store: the answer or the refusal for a caller if the ledger knows its operation."""

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
    """The outcome of an operation, and *how* it came: stored now, replayed, released for another try, or unstored.

    It is *unknown* if the policy's `doubt` names its status: only this caller gets it, and `on_unknown` decides.

    *value* is the performer's value, or its exception if that is one of the policy's `errors`.  `Guard.run` gives an equal
    one for a replayed outcome.
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
        if (self.verdict == "settled") != (self.outcome is not None):  # without one, it would be performed again
            raise ConfigurationError(
                "What happened has an outcome, and nothing else has: say Resolution.settled(value)"
            )

    @classmethod
    def settled(cls, outcome: Any) -> Resolution:
        """It happened; *outcome* is an Outcome, or the value that the function returned."""
        return cls("settled", outcome if isinstance(outcome, Outcome) else value_outcome(outcome))

    @classmethod
    def released(cls) -> Resolution:
        """It did not happen, and may be performed."""
        return cls("released")

    @classmethod
    def unknown(cls) -> Resolution:
        """Nobody can tell yet; ask again later."""
        return cls("unknown")


def check(operation: Operation, fingerprint: str) -> None:
    """Refuse the operation unless the stored *fingerprint* is of the same request."""
    if operation.same(fingerprint):
        return
    if operation.scope == f"once:{operation.name}":  # a function's caller is told the key; an HTTP client knows it
        raise PayloadMismatch(
            f"{operation.name} was called before under the key {operation.key!r}, with other arguments: name what differs in "
            "the key, or leave it out of the comparison by ignore="
        )
    raise PayloadMismatch("This key was used for a different request; make a new key for a new operation")


def replay(outcome: Outcome, policy: Policy, *, expires_at: float | None = None) -> Answer:
    """The answer to a repeated operation, by the rule's on_duplicate."""
    if policy.on_duplicate == "reject":
        raise Duplicate("This operation was performed before, and repeats are rejected")
    if policy.on_duplicate == "ok":
        outcome = Outcome(outcome.kind, 200) if outcome.kind == "response" else NOTHING
    else:
        outcome = shown(outcome)
    return Answer(outcome, "replayed", expires_at)


def shown(outcome: Outcome) -> Outcome:
    """The outcome; raises OutcomeNotKept if only a tombstone is left of it."""
    if outcome.kind == "tombstone":
        why = outcome.body.decode("utf-8", "replace")  # of a function: its result is of a class that it does not name
        raise OutcomeNotKept(
            f"The operation was performed once, but its outcome could not be kept{f' ({why})' if why else ''}; "
            "look up its result"
        )
    return outcome


def is_over(record: Record) -> bool:
    """Whether the same request may claim the record: it was released, or its lease has ended."""
    return record.state == "released" or (record.state == "running" and record.lease_until <= record.now)


def in_progress(record: Record) -> InProgress:
    """The refusal for a running operation, with a guess when to come back."""
    left = max(record.lease_until - record.now, 0.0)
    return InProgress(
        "The first request with this key is still running; retry later", retry_after=min(1.0, left) or 1.0
    )


def outcome_unknown(key: str, note: str = "") -> UnknownOutcome:
    """The refusal for an operation with an earlier attempt that crashed, or was left in doubt for the reason in *note*."""
    end = f"broke off ({note})" if note else "crashed"
    return UnknownOutcome(
        f"An earlier attempt with key {key!r} {end}, and whether it took effect is not known. "
        f"Look the result up; an operator can then decide with: oncemore keys resolve {key!r}"
    )


def fenced(lease: Lease) -> Fenced:
    """The refusal of a late owner's write."""
    return Fenced(f"The lease on {lease.operation.key!r} is lost: it lapsed and was taken over, or it was resolved")


def not_resolvable(state: str) -> Refusal:
    """The refusal to resolve a record that is not in doubt."""
    if state == "running":
        return InProgress("It is running; only an operation with an unknown outcome can be resolved", retry_after=1.0)
    if state == "absent":
        return NotFound("There is no such record")
    return NotResolvable(f"It is {state}; only an operation with an unknown outcome can be resolved")


def not_deletable() -> InProgress:
    """The refusal to delete a record while its operation runs."""
    return InProgress(
        "It is running, and its holder would lose its place; wait for it, or for its lease", retry_after=1.0
    )
