"""A state machine for hypothesis: random sequences of verbs on a store and on the memory store must agree.

TestMachine = store_machine(lambda: connect("mystore://...")).TestCase
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from .._ledger.model import Claim, Lease, Operation, Outcome, Record
from .._ledger.store import Filter, Store
from .._runtime.plan import Plan, run
from ..errors import OncemoreError
from ..stores.memory import MemoryStore

KEYS = st.sampled_from(["a", "b"])
FINGERPRINTS = st.sampled_from(["c1:x", "c1:y"])
OUTCOMES = st.sampled_from([Outcome("response", 201, (), b"one"), Outcome("value", body=b"\xc0")])
REQUESTS = st.sampled_from([b"", b"", b"asked", b"asked again"])
# Coarse, so that the real time between two steps does not matter.
SPANS = st.sampled_from([100.0, 1000.0])
JUMPS = st.sampled_from([-50.0, 150.0, 700.0, 1500.0])


def store_machine(make: Callable[[], Store], *, examples: int = 50, steps: int = 30) -> type[RuleBasedStateMachine]:
    """Return a state machine that compares a store, made by *make*, with the memory store."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.scope = f"machine {uuid.uuid4()}"
            self.real, self.model = make(), MemoryStore()
            self.leases: list[tuple[Lease, Lease]] = []  # pairs, of the real store and of the model
            self.tokens: list[int] = []

        def teardown(self) -> None:
            self.real.close()

        def both(self, ask: Callable[[Store], Plan[Any]]) -> tuple[Any, Any]:
            """Ask both stores, check that they agree, and return both answers.  An error is an answer, too."""
            answers = tuple(ask_store(ask, store) for store in (self.real, self.model))
            assert comparable(answers[0]) == comparable(answers[1])
            return answers[0], answers[1]

        @rule(key=KEYS, fingerprint=FINGERPRINTS, lease=SPANS, request=REQUESTS)
        def claim(self, key: str, fingerprint: str, lease: float, request: bytes) -> None:
            operation = Operation(self.scope, key, fingerprint, "machine")
            real, model = self.both(lambda store: store.claim(operation, lease=lease, request=request))
            if isinstance(real, Lease):
                assert all(real.token > token for token in self.tokens), "tokens only grow"
                self.tokens.append(real.token)
                self.leases.append((real, model))

        @rule(key=KEYS)
        def unclaim(self, key: str) -> None:
            def undo(store: Store) -> Plan[None]:
                record = yield from store.find(self.scope, key)
                holder = record.holder if record is not None else "host:1:nobody:1"
                yield from store.unclaim([Claim(Operation(self.scope, key), holder, 100.0)])

            self.both(undo)
            self.both(lambda store: store.find(self.scope, key))

        def ask_with_lease(self, data: Any, ask: Callable[[Store, Lease], Plan[Any]]) -> None:
            real, model = data.draw(st.sampled_from(self.leases))  # includes old leases, which both must fence
            self.both(lambda store: ask(store, real if store is self.real else model))

        @precondition(lambda self: self.leases)
        @rule(data=st.data(), lease=SPANS)
        def renew(self, data: Any, lease: float) -> None:
            self.ask_with_lease(data, lambda store, held: store.renew(held, lease=lease))

        @precondition(lambda self: self.leases)
        @rule(data=st.data(), outcome=OUTCOMES, retention=SPANS, audit=st.booleans())
        def settle(self, data: Any, outcome: Outcome, retention: float, audit: bool) -> None:
            self.ask_with_lease(data, lambda store, held: store.settle(held, outcome, retention=retention, audit=audit))

        @precondition(lambda self: self.leases)
        @rule(data=st.data(), retention=SPANS)
        def release(self, data: Any, retention: float) -> None:
            self.ask_with_lease(data, lambda store, held: store.release(held, retention=retention))

        @precondition(lambda self: self.leases)
        @rule(data=st.data())
        def hold(self, data: Any) -> None:
            self.ask_with_lease(data, lambda store, held: store.hold(held, note="held"))

        @rule(key=KEYS, outcome=st.none() | OUTCOMES, retention=SPANS)
        def resolve(self, key: str, outcome: Outcome | None, retention: float) -> None:
            real, _ = self.both(lambda store: store.resolve(self.scope, key, outcome, retention=retention))
            if isinstance(real, Record):
                assert all(real.token > token for token in self.tokens), "resolving fences the late owner"
                self.tokens.append(real.token)

        @rule(key=KEYS, retention=SPANS)
        def touch(self, key: str, retention: float) -> None:
            real, model = self.both(lambda store: store.find(self.scope, key))
            if real is not None:
                self.both(lambda store: store.touch(real if store is self.real else model, retention=retention))

        @rule(key=KEYS)
        def delete(self, key: str) -> None:
            self.both(lambda store: store.delete(self.scope, key))

        @rule()
        def purge(self) -> None:
            for store in (self.real, self.model):
                while run(store.purge(batch=100)):
                    pass

        @rule(seconds=JUMPS)
        def time_passes(self, seconds: float) -> None:
            self.real.shift += seconds
            self.model.shift += seconds

        @rule(state=st.sampled_from([None, "running", "settled", "released", "held"]), lapsed=st.none() | st.booleans())
        def look(self, state: Any, lapsed: bool | None) -> None:
            where = Filter(scope=self.scope, state=state, lapsed=lapsed)
            self.both(lambda store: store.list(where, limit=10))

    case: Any = Machine.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return Machine


def ask_store(ask: Callable[[Store], Plan[Any]], store: Store) -> Any:
    try:
        return run(ask(store))
    except OncemoreError as error:
        return error


def comparable(answer: Any) -> Any:
    """Return the parts of an answer on which stores must agree: not tokens, holders and exact times."""
    match answer:
        case Lease():
            return ("lease", answer.attempt, answer.lapsed)
        case Record():
            lapsed = answer.state == "running" and answer.lease_until <= answer.now  # a copy in a cache has no lease
            return (
                "record",
                answer.key,
                answer.fingerprint,
                answer.state,
                answer.attempts,
                answer.outcome,
                answer.note,
                answer.request,
                lapsed,
            )
        case OncemoreError():
            return type(answer)
        case None | bool():
            return answer
    return sorted(comparable(record) for record in answer.records)
