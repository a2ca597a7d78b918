"""Protection from callers that make a new key for each retry: business uniqueness, suspicion, and keys too old."""

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

OWNER = "oncemore-owner"  # stands before the headers of a unique record's outcome, and is never shown


def screen(ledger: Ledger, records: Store | Transaction, op: Op, policy: Policy) -> Plan[Answer | None]:
    """Look at an operation's first attempt before it is performed: refuse it, answer it from its twin, or let it pass.

    *records* is where marks are written: the store, or the transaction that the operation is in.
    """
    if op.attempt > 1:
        return None
    operation, issued_at = op.operation, op.operation.issued_at
    if policy.late == "refuse" and issued_at is not None and ledger.clock.time() - issued_at > policy.ttl:
        raise KeyExpired("This key is older than the time for which outcomes are kept; look up the result instead")
    if policy.suspect == "off":
        return None
    # Has the same principal just asked for the same thing under another key?  A small record remembers, for a while.
    mark = Operation(f"suspect|{operation.scope}", operation.fingerprint, operation.key, name="oncemore.suspect")
    found = yield from records.claim(mark, lease=policy.suspect_window)
    if isinstance(found, Lease):
        yield from records.release(found, retention=policy.suspect_window)
        return None
    if found.fingerprint == operation.key:  # its own mark, from an attempt that was cut short before the release
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


def done_before(record: Record, op: Op, policy: Policy) -> Answer:
    """The answer to a second key, from the settled *record* of what must happen once."""
    owner, outcome = untagged(record.outcome)
    if policy.on_unique == "reject" or owner != op.operation.scope:
        raise Duplicate(f"{op.operation.unique!r} was done before, under another key")
    return Answer(shown(outcome), "replayed", attempt=op.attempt)


def unique_unknown(unique: str | None) -> UnknownOutcome:
    """The refusal for a second key if nobody knows whether the attempt under the first one took effect."""
    return UnknownOutcome(
        f"An attempt at {unique!r} under another key broke off, and whether it took effect is not known; look the result up, "
        "and decide about that key with: oncemore keys resolve"
    )


def inner_operation(operation: Operation, policy: Policy) -> Operation:
    """The operation that must happen once whatever the key, or one at a time.

    In steps, its fingerprint names the key: if that is left unfinished, only the same key can go on.
    """
    kind = "serial" if policy.on_unique == "serialize" else f"unique|{operation.name}"
    if policy.effect != "steps":
        return Operation(kind, operation.unique or "", name=operation.name)
    by = "" if policy.on_unique == "serialize" else derive(operation, "unique")
    return Operation(kind, operation.unique or "", by, f"{operation.name}/unique", matches=lambda stored: True)


@lru_cache(maxsize=256)
def inner_policy(policy: Policy) -> Policy:
    """The policy of a unique record: a failure leaves the way free for another key; a turn leaves no trace at all."""
    if policy.on_unique == "serialize":
        return dataclasses.replace(
            policy, keep=never, on_unknown="retry", in_flight="wait", ttl=1.0, suspect="off", late="run"
        )
    return dataclasses.replace(policy, keep="success", suspect="off", late="run")


def never(outcome: Outcome) -> bool:
    return False


def tag(outcome: Outcome, owner: str) -> Outcome:
    return msgspec.structs.replace(outcome, headers=((OWNER, owner), *outcome.headers))


def untagged(outcome: Outcome | None) -> tuple[str, Outcome]:
    """The owner, and the outcome as it was.  No owner if it cannot be read, or if a person has decided about it."""
    if outcome is None or [name for name, _ in outcome.headers[:1]] != [OWNER]:
        return "", outcome or Outcome("tombstone")
    (_, owner), *headers = outcome.headers
    return owner, msgspec.structs.replace(outcome, headers=tuple(headers))
