"""When a holder vanishes: nobody knows whether its effect happened, and the rule's on_unknown says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .._contract.policy import Policy
from .._runtime.plan import Call, Plan
from ..errors import Fenced, StoreError, UnknownOutcome
from .context import Op
from .decisions import Answer, keeps
from .driven import Driven
from .model import Lease, Outcome
from .resolution import Resolution
from .uniqueness import inner_operation, inner_policy, tag

if TYPE_CHECKING:
    from .guard import Guard


def take_over(guard: Guard, op: Op, policy: Policy) -> Plan[Answer | None]:
    """What the former holder's attempt came to, or None where this one may perform; refuses where nobody can tell."""
    if policy.on_unknown == "retry" or policy.effect == "steps":  # steps tell for themselves how far it went
        return None
    if policy.on_unknown == "hold":
        yield from guard.store.hold(op.lease, note="its holder vanished")
        guard.tell("held", op.operation, token=op.lease.token)
        raise UnknownOutcome(
            "A former attempt ended without a trace; it must be resolved before this key is used again"
        )
    resolution = yield from ask(guard, op, policy)
    guard.tell("resolved", op.operation, token=op.lease.token, detail=resolution.verdict)
    if resolution.verdict == "settled" and resolution.outcome is not None:
        op.note = "resolved: it had happened"
        yield from unique_too(guard, op, policy, resolution.outcome)
        return Answer(resolution.outcome, "replayed", attempt=op.attempt)
    yield from guard.store.renew(op.lease, lease=policy.lease)  # refused, if it was lost on the way after all
    return None


def unique_too(guard: Guard, op: Op, policy: Policy, outcome: Outcome) -> Plan[None]:
    """What had happened had happened once whatever the key, too: the vanished one has left that undecided as well."""
    if op.operation.unique is None or policy.on_unique == "serialize":
        return
    under = inner_policy(policy)
    found = yield from guard.store.claim(inner_operation(op.operation, policy), lease=policy.lease)
    if isinstance(found, Lease) and keeps(under, outcome):
        yield from guard.store.settle(found, tag(outcome, op.operation.scope), retention=under.ttl)
    elif isinstance(found, Lease):
        yield from guard.store.release(found, retention=0.0)


def ask(guard: Guard, op: Op, policy: Policy) -> Plan[Resolution]:
    """The resolver's decision; where it has none, the lease lapses again at once, so that the next caller asks anew."""
    assert policy.resolver is not None, "a policy with on_unknown = 'resolve' has a resolver"
    cause: Exception | None = None
    try:
        # A provider may take longer to answer than the lease lasts, and nobody else is to ask and perform meanwhile.
        beat = guard.heart.beat(op.lease, policy.lease)
        resolution: Resolution = yield Driven(partial(asked, policy.resolver, op), guard.heart, beat)
        if resolution.verdict != "unknown":
            return resolution
    except Exception as error:
        cause = error
    yield from lapse(guard, op.lease)
    raise UnknownOutcome("Whether a former attempt took effect is not known yet; retry later", retry_after=5) from cause


def asked(resolver: Callable[..., Any], op: Op) -> Plan[Resolution]:
    resolution: Resolution = yield Call(resolver, op)
    return resolution


def vanish(guard: Guard, lease: Lease, policy: Policy, error: BaseException) -> Plan[None]:
    """Cancelled or interrupted in mid-operation: to the ledger that is a holder who vanished, told at once."""
    try:
        if policy.on_unknown == "retry" or policy.effect == "steps":
            yield from guard.give_back(lease, policy)
        elif policy.on_unknown == "hold":
            yield from guard.store.hold(lease, note=f"interrupted by {type(error).__name__}")
            guard.tell("held", lease.operation, token=lease.token)
        else:
            yield from lapse(guard, lease)
    except (Fenced, StoreError) as failure:  # then its lease lapses, which comes to the same
        guard.tell("failed", lease.operation, token=lease.token, code=failure.code)


def lapse(guard: Guard, lease: Lease) -> Plan[None]:
    """End the lease now, without saying how the operation ended."""
    yield from guard.store.renew(lease, lease=0.0)
    guard.store.wakeups.notify(lease.operation.id)
