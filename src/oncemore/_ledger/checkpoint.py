"""What a checkpoint is: the name of a step's operation, the policy it is kept by, and what can be read from it."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from .._contract.keys import join
from .._contract.policy import Policy
from ..errors import ConfigurationError, StoreError, UnknownOutcome
from .decisions import Answer
from .model import Operation, Outcome, Record, decode_outcome, encode_outcome
from .step import StepEffect
from .values import Types, replayed, value_outcome

# For so long an operation may be unfinished: its checkpoints are kept that much longer than its outcome.
UNFINISHED = 30 * 86400.0
# A request that is larger is not kept: then only its caller can have the operation finished, by asking again.
LARGEST = 1024 * 1024
DOUBT = "oncemore-doubt"
CLOSED = ("oncemore-closed", "")  # marks the step at which an operation has failed for good


def step_operation(operation: Operation, life: str, number: int | str, name: str) -> Operation:
    key = join(operation.key, life, str(number))
    return Operation(f"step|{operation.scope}", key, name, f"{operation.name}/{name}")


def life_of(record: Record) -> str:
    """What tells this life of a key from the next, after its retention or deletion: when it began, by the store's clock."""
    return f"{record.created_at:.6f}"


@lru_cache(maxsize=256)
def step_policy(policy: Policy, effect: StepEffect) -> Policy:
    """The policy of an operation's steps: whoever holds the operation waits for them, and all that comes of them is kept."""
    return dataclasses.replace(
        policy,
        effect=effect,
        on_unknown="retry",
        keep="all",
        ttl=policy.ttl + UNFINISHED,
        ttl_from="creation",
        expired="delete",
        in_flight="wait",
        wait=2 * policy.lease,
        on_duplicate="replay",
        suspect="off",
        late="run",
    )


def kept(answer: Answer, name: str) -> Answer:
    """The answer, if it is a checkpoint; without one, going on would be to forget where we are."""
    if answer.how == "unstored":
        raise StoreError(f"step {name!r} was performed, but its checkpoint could not be stored; retry the operation")
    if answer.outcome.kind == "tombstone":
        why = answer.outcome.body.decode(errors="replace")
        raise ConfigurationError(f"step {name!r} gave what cannot be checkpointed ({why})")
    return answer


def result(answer: Answer, policy: Policy) -> Any:
    """What the step gave; raises where its outcome is an error."""
    if answer.how != "stored":
        return replayed(answer.outcome, policy.errors, policy.types)
    if answer.outcome.kind == "error":
        raise answer.value
    return answer.value


def is_closed(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.headers[:1] == (CLOSED,)


def closing(failure: Outcome | None, doubt: str) -> Outcome:
    """The mark that no further step is to be taken, and why: the outcome, or None where it was given up.

    *doubt* is the step in whose place it stands, where that was begun: nobody knows whether it took effect.
    """
    return Outcome("value", headers=(CLOSED, (DOUBT, doubt)), body=b"" if failure is None else encode_outcome(failure))


def doubt_of(outcome: Outcome | None) -> str:
    """The step that a mark has doubts about."""
    return "" if outcome is None else dict(outcome.headers).get(DOUBT, "")


def closed_with(outcome: Outcome | None) -> Outcome | None:
    """The failure that a mark remembers."""
    return decode_outcome(outcome.body) if outcome is not None and outcome.body else None


def request_outcome(operation: Operation, deadline: float | None, types: Types) -> Outcome:
    """Step 0: what was asked, as far as it can be kept, and all that whoever goes on with it could not tell from that."""
    request = None if operation.request is None else operation.request()
    kept = {"deadline": deadline, "request": request, "unique": operation.unique}
    outcome = value_outcome(kept, types)
    if outcome.kind == "tombstone" or len(outcome.body) > LARGEST:
        return value_outcome({**kept, "request": None})
    return outcome


def check_age(record: Record) -> None:
    """Refuse to go on with what was left so long ago that a checkpoint may be missing: its step would be taken again."""
    if record.now - record.created_at > UNFINISHED:
        raise UnknownOutcome("It was left unfinished for so long that its checkpoints may be gone; resolve it")
