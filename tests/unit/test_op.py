"""The running operation: its attributes, and the keys that it gives to providers."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard, Op, Operation, Policy
from oncemore._ledger.context import derive
from oncemore._ledger.model import Lease
from oncemore._runtime.plan import run

texts = st.text()


def test_a_performer_sees_its_operation_key_and_attempt() -> None:
    operation = Operation("scope", "key", name="refunds.create")
    op = Op(Lease(operation, token=7, expires_at=0.0, attempt=3))
    assert (op.operation, op.key, op.attempt, op.note) == (operation, "key", 3, "")


@pytest.mark.parametrize("unique", [None, "order-7"])
@pytest.mark.parametrize("effect", ["lease", "transaction", "steps"])
def test_a_performer_sees_when_its_caller_stops_waiting(tmp_path: Path, effect: Any, unique: str | None) -> None:
    guard, deadlines = Guard(f"sqlite:///{tmp_path / 'once.db'}", policy=Policy(effect=effect)), []
    for key, wait in (("k1", 5.0), ("k2", None)):
        operation = Operation("scope", key, name="refunds.create", unique=unique and f"{unique}-{key}")
        guard.run(operation, lambda op: deadlines.append(op.deadline), wait=wait)
    assert deadlines == [pytest.approx(time.time() + 5, abs=2), None]
    guard.close()


@pytest.mark.parametrize("effect", ["lease", "steps"])
def test_deadline_excludes_the_time_spent_waiting(tmp_path: Path, effect: Any) -> None:
    guard, deadlines = Guard(f"sqlite:///{tmp_path / 'once.db'}", policy=Policy(effect=effect)), []
    held = run(guard.store.claim(Operation("scope", "key"), lease=30.0))
    assert isinstance(held, Lease)
    threading.Timer(0.6, lambda: run(guard.store.release(held, retention=60.0))).start()
    asked = time.time()
    guard.run(Operation("scope", "key"), lambda op: deadlines.append(op.deadline), wait=5.0)
    assert deadlines == [pytest.approx(asked + 5, abs=0.4)]
    guard.close()


def test_a_derived_key_never_changes() -> None:
    """Pinned: another value after an upgrade would have the provider do it again."""
    expected = "om_de7ccd020a8a914b6f720b71367bac28a6e69558"
    assert derive(Operation("alice", "k-1"), "charge") == expected


@given(texts, texts, texts)
def test_derived_key_is_stable_short_and_plain(scope: str, key: str, name: str) -> None:
    first = Op(Lease(Operation(scope, key, "f1"), 1, 0.0, attempt=1))
    second = Op(Lease(Operation(scope, key, "f2"), 2, 9.0, attempt=2, lapsed=True))
    assert first.derive(name) == second.derive(name)
    assert re.fullmatch("om_[0-9a-f]{40}", first.derive(name))


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_different_parts_never_share_a_derived_key(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (derive(Operation(*one[:2]), one[2]) == derive(Operation(*other[:2]), other[2])) == (one == other)


def test_derived_keys_of_differently_split_parts_differ() -> None:
    pairs = [("a:", "b", "c"), ("a", ":b", "c"), ("a", "b", ":c"), ("a:1:b", "", "c"), ("", "a:b", "c")]
    assert len({derive(Operation(scope, key), name) for scope, key, name in pairs}) == len(pairs)


def test_half_a_character_is_no_reason_to_fail() -> None:
    assert derive(Operation("s", "\ud800"), "x") != derive(Operation("s", "\ud801"), "x")
