"""Defence in depth, for callers who make a new key on each retry: business uniqueness, suspicion, and keys too old."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from .._contract.policy import Policy
from .._runtime.plan import Plan
from ..errors import Duplicate, Fenced, KeyExpired, Suspected
from .context import Op, derive
from .decisions import Answer, fenced, keeps, shown
from .heartbeat import Beat
from .model import Lease, Operation, Outcome, Record
from .resolution import Resolution
from .store import Store

if TYPE_CHECKING:
    from .guard import Guard
    from .transactions import Transaction

OWNER = "oncemore-owner"  # stands before the headers of a unique record's outcome, and is never shown


def screen(guard: Guard, ledger: Store | Transaction, op: Op, policy: Policy) -> Plan[Answer | None]:
    """Look at a new operation before it is performed: refuse it, answer it from its twin, or let it pass (None)."""
    issued_at = op.operation.issued_at
    if policy.late == "refuse" and issued_at is not None and guard.clock.time() - issued_at > policy.ttl:
        raise KeyExpired("This key is older than the time for which outcomes are kept; look up the result instead")
    if policy.suspect != "off":
        return (yield from _suspect(guard, ledger, op, policy))
    return None


def _suspect(guard: Guard, ledger: Store | Transaction, op: Op, policy: Policy) -> Plan[Answer | None]:
    """Has the same principal just asked for the same thing under another key?  A small record remembers, for a while."""
    operation = op.operation
    mark = Operation(f"suspect|{operation.scope}", operation.fingerprint, operation.key, name="oncemore.suspect")
    found = yield from ledger.claim(mark, lease=policy.suspect_window)
    if isinstance(found, Lease):
        yield from ledger.release(found, retention=policy.suspect_window)
        return None
    if found.fingerprint == operation.key:  # its own mark, from an attempt that was cut short before the release
        return None
    guard.tell("suspected", operation, token=op.lease.token, detail=found.fingerprint)
    if policy.suspect == "log":
        return None
    op.note = f"suspected duplicate of {found.fingerprint}"
    if policy.suspect == "flag":
        return None
    twin = yield from ledger.find(operation.scope, found.fingerprint)
    if policy.suspect == "replay" and twin is not None and twin.outcome is not None:
        return Answer(shown(twin.outcome), "replayed", attempt=op.attempt)
    raise Suspected("The same request was made a moment ago under another key; retry with that key, or wait")


def unique(guard: Guard, op: Op, perform: Callable[[Op], Any], policy: Policy, beats: tuple[Beat, ...]) -> Plan[Answer]:
    """Perform under a second lease, on what must happen once whatever the key; its success is everyone's answer.

    The record belongs to no principal, so its outcome is shown only to the one who made it.  To `serialize` is only to
    take turns: nothing is kept, and the next one performs.
    """
    owner = op.operation.scope
    inner, under = inner_operation(op.operation, policy), inner_policy(policy)
    found = yield from guard.turn(inner, under, wait=policy.lease / 2)  # the outer lease is not renewed meanwhile
    if isinstance(found, Record):
        return done_before(found, op, policy)
    if found.lapsed and not op.lease.lapsed:  # it was another key that vanished
        under = doubting(under)
    ended: list[Outcome] = []

    def tagged(outcome: Outcome) -> Outcome:
        ended.append(outcome)
        return tag(outcome, owner)

    try:
        answer = yield from guard.own(found, lambda _: perform(op), under, beats=beats, then=tagged)
    except GeneratorExit:
        raise
    except BaseException as error:
        if ended and not isinstance(error, Exception):  # while it was written there, which is done all the same
            yield from conclude(guard, op, ended[0], policy)
            beats[0].lost = True  # there is no lease any more, and no doubt
        raise
    owners, outcome = untagged(answer.outcome)
    if owners != owner:  # we are late: the outcome is of the one who took over, and none of our caller's business
        raise fenced(found)
    return msgspec.structs.replace(answer, outcome=outcome, how="replayed" if answer.how == "replayed" else "stored")


def conclude(guard: Guard, op: Op, outcome: Outcome, policy: Policy) -> Plan[None]:
    """Write down what came of the operation for a caller that does not wait for it any more, nor for a refusal."""
    if not keeps(policy, outcome):
        yield from guard.give_back(op.lease, policy)
        return
    with suppress(Fenced):  # which is told, and is another's by now
        yield from guard.settle(op, Answer(outcome, "stored", attempt=op.attempt), policy)


@lru_cache(maxsize=256)
def doubting(policy: Policy) -> Policy:
    """The policy with a resolver that is believed only if it says that it happened.

    It is asked under the name of what must be unique.  That the provider knows nothing under that name does not tell that
    nothing happened, for it was asked for it under what the vanished one's own key is derived from.
    """
    resolver = policy.resolver
    if resolver is None:
        return policy

    def ask(op: Op) -> Any:
        found = resolver(op)
        return awaited(found) if hasattr(found, "__await__") else believed(found)

    return dataclasses.replace(policy, resolver=ask)


async def awaited(found: Awaitable[Resolution]) -> Resolution:
    return believed(await found)


def believed(found: Resolution) -> Resolution:
    return Resolution.unknown() if found.verdict == "released" else found


def done_before(record: Record, op: Op, policy: Policy) -> Answer:
    """The answer of one who comes too late, from the settled *record* of what must happen once."""
    owner, outcome = untagged(record.outcome)
    if policy.on_unique == "reject" or owner != op.operation.scope:
        raise Duplicate(f"{op.operation.unique!r} was done before, under another key")
    return Answer(shown(outcome), "replayed", attempt=op.attempt)


def inner_operation(operation: Operation, policy: Policy) -> Operation:
    """What must happen once whatever the key, or one at a time.

    In steps, it says whose it is: where that one is left unfinished, it alone can go on.
    """
    kind = "serial" if policy.on_unique == "serialize" else f"unique|{operation.name}"
    if policy.effect != "steps":
        return Operation(kind, operation.unique or "", name=operation.name)
    whose = "" if policy.on_unique == "serialize" else derive(operation, "unique")
    return Operation(kind, operation.unique or "", whose, f"{operation.name}/unique", matches=lambda stored: True)


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
    """The owner, and the outcome as it was; nobody's where it cannot be read, or a person has decided about it."""
    if outcome is None or [name for name, _ in outcome.headers[:1]] != [OWNER]:
        return "", outcome or Outcome("tombstone")
    (_, owner), *headers = outcome.headers
    return owner, msgspec.structs.replace(outcome, headers=tuple(headers))
