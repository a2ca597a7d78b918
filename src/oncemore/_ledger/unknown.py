"""After a crash, nobody knows whether the effect happened: the policy's on_unknown says what to do."""

from __future__ import annotations

from .._contract.policy import Policy
from .._runtime.plan import Call, Plan
from ..errors import Fenced, StoreError, UnknownOutcome
from .context import Op
from .decisions import Answer, Resolution, outcome_unknown
from .ledger import Ledger
from .model import Lease


def resolve_unknown(ledger: Ledger, op: Op, policy: Policy) -> Plan[Answer | None]:
    """Find out about the earlier attempt, because its lease has lapsed: its answer, or None if this attempt may perform.

    Refuses with UnknownOutcome if nobody can tell.  The lease must be renewed meanwhile: a provider may take longer to
    answer than the lease lasts, and no other caller is to ask, and perform, at the same time.
    """
    lease = op.lease
    ledger.emit("lapsed", op.operation, token=lease.token, attempt=lease.attempt)
    if policy.on_unknown == "retry":
        return None
    if policy.on_unknown == "hold":
        yield from ledger.hold(lease, "its holder vanished")
        raise outcome_unknown(op.key)
    resolution = yield from _ask(ledger, op, policy)
    ledger.emit("resolved", op.operation, token=lease.token, detail=resolution.verdict)
    if resolution.outcome is not None:
        op.note = "resolved: it had happened"
        return Answer(resolution.outcome, "replayed", attempt=op.attempt)
    yield from ledger.store.renew(lease, lease=policy.lease)  # raises Fenced if the lease was lost meanwhile
    return None


def _ask(ledger: Ledger, op: Op, policy: Policy) -> Plan[Resolution]:
    """The resolver's decision.  If it has none, the lease lapses again at once, so that the next caller asks anew."""
    assert policy.resolver is not None, "a policy with on_unknown = 'resolve' has a resolver"
    cause: Exception | None = None
    try:
        resolution: Resolution = yield Call(policy.resolver, op)
        if resolution.verdict != "unknown":
            return resolution
    except Exception as error:
        cause = error
    yield from ledger.lapse(op.lease)
    raise UnknownOutcome("Whether a former attempt took effect is not known yet; retry later", retry_after=5) from cause


def mark_unknown(ledger: Ledger, lease: Lease, policy: Policy, error: BaseException) -> Plan[None]:
    """Record at once that the attempt was cancelled or interrupted: the next caller need not wait for the lease to end."""
    try:
        if policy.on_unknown == "retry":
            yield from ledger.release(lease, retention=policy.ttl)
        elif policy.on_unknown == "hold":
            yield from ledger.hold(lease, f"interrupted by {type(error).__name__}")
        else:
            yield from ledger.lapse(lease)
    except (Fenced, StoreError) as failure:  # then the lease lapses by itself
        ledger.emit("failed", lease.operation, token=lease.token, code=failure.code)


def leave_in_doubt(ledger: Ledger, lease: Lease) -> Plan[None]:
    """End the lease of an attempt that did not come to a decision: the next caller asks anew, without waiting."""
    try:
        yield from ledger.lapse(lease)
    except (Fenced, StoreError) as failure:
        ledger.emit("failed", lease.operation, token=lease.token, code=failure.code)
