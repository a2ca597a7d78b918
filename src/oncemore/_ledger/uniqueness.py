"""Protects from callers that make a new key for each retry: unique records, twins, and keys that are too old."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import msgspec

from .._contract.policy import Policy
from .._runtime.plan import Plan
from ..errors import Duplicate, KeyExpired, Suspected, UnknownOutcome
from .context import Op, derive
from .decisions import Answer, shown
from .ledger import Ledger
from .model import Lease, Operation, Outcome, Record
from .store import Store
from .transactions import Transaction

OWNER = "oncemore-owner"  # the first header of a unique record's outcome: the scope that made it; never shown


def screen(ledger: Ledger, records: Store | Transaction, op: Op, policy: Policy) -> Plan[Answer | None]:
    """Check a first attempt for a twin and for an old key: refuse it, return its twin's answer, or None to go on.

    *records* is the store, or the transaction that the operation is in; the twin's record is written there.
    """
    if op.attempt > 1:
        return None
    operation, issued_at = op.operation, op.operation.issued_at
    if policy.late == "refuse" and issued_at is not None and ledger.clock.time() - issued_at > policy.ttl:
        raise KeyExpired("This key is older than the time for which outcomes are kept; look up the result instead")
    if policy.suspect == "off":
        return None
    # A small record is named after the request's fingerprint, and has the operation's key as its own fingerprint.  An equal
    # request of the same scope meets it within `suspect_window`, and learns the twin's key.
    seen = Operation(f"suspect|{operation.scope}", operation.fingerprint, operation.key, name="oncemore.suspect")
    found = yield from records.claim(seen, lease=policy.suspect_window)
    if isinstance(found, Lease):
        yield from records.release(found, retention=policy.suspect_window)
        return None
    if found.fingerprint == operation.key:  # this operation's own record: an attempt was cut short before the release
        return None
    ledger.emit("suspected", operation, token=op.lease.token, detail=found.fingerprint)
    if policy.suspect == "log":
        return None
    op.note = f"suspected duplicate of {found.fingerprint}"
    if policy.suspect == "flag":
        return None
    twin = yield from records.find(operation.scope, found.fingerprint)
    if policy.suspect == "replay" and twin is not None and twin.outcome is not None:
        return Answer(shown(twin.outcome), "replayed", attempt=op.attempt)
    raise Suspected("The same request was made a moment ago under another key; retry with that key, or wait")


def replay_unique(record: Record, op: Op, policy: Policy) -> Answer:
    """Return the answer for another key, from the settled unique *record*."""
    owner, outcome = untag(record.outcome)
    if policy.on_unique == "reject" or owner != op.operation.scope:
        raise Duplicate(f"{op.operation.unique!r} was done before, under another key")
    return Answer(shown(outcome), "replayed", attempt=op.attempt)


def unique_unknown(unique: str | None) -> UnknownOutcome:
    """Return the refusal for a second key if the outcome under the first key is unknown."""
    return UnknownOutcome(
        f"An attempt at {unique!r} under another key broke off, and whether it took effect is not known. Look up the result; "
        "an operator can then decide about that key with: oncemore keys resolve"
    )


def unique_operation(operation: Operation, policy: Policy) -> Operation:
    """Return the operation of the unique record (`unique_by`), or of the turn ("serialize").

    For an operation in steps, its fingerprint stands for the key, because only that key can go on with its steps.
    """
    kind = "serial" if policy.on_unique == "serialize" else f"unique|{operation.name}"
    if policy.effect != "steps":
        return Operation(kind, operation.unique or "", name=operation.name)
    by = "" if policy.on_unique == "serialize" else derive(operation, "unique")
    return Operation(kind, operation.unique or "", by, f"{operation.name}/unique", matches=lambda stored: True)


@lru_cache(maxsize=256)
def unique_policy(policy: Policy) -> Policy:
    """Return the policy of a unique record: only a success is kept, so a failure frees it for other keys.  A turn keeps none."""
    if policy.on_unique == "serialize":
        return dataclasses.replace(
            policy, keep=keep_nothing, on_unknown="retry", in_flight="wait", ttl=1.0, suspect="off", late="run"
        )
    return dataclasses.replace(policy, keep="success", suspect="off", late="run")


def keep_nothing(outcome: Outcome) -> bool:
    return False


def tag(outcome: Outcome, owner: str) -> Outcome:
    """Return the outcome with its owner, as a unique record stores it."""
    return msgspec.structs.replace(outcome, headers=((OWNER, owner), *outcome.headers))


def untag(outcome: Outcome | None) -> tuple[str, Outcome]:
    """Return the owner and the outcome without it.  The owner is empty if a person resolved it, or it cannot be read."""
    if outcome is None or [name for name, _ in outcome.headers[:1]] != [OWNER]:
        return "", outcome or Outcome("tombstone")
    (_, owner), *headers = outcome.headers
    return owner, msgspec.structs.replace(outcome, headers=tuple(headers))
