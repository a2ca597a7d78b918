"""The table of states: the transitions that are allowed, and those that are refused."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from oncemore._ledger.model import Record, state_of
from oncemore._ledger.states import TRANSITIONS, State, Verb, follows

STATES = {*get_args(State), "absent", "lapsed"}
VERBS = set(get_args(Verb))


def test_the_table_speaks_of_known_states_and_verbs_only() -> None:
    assert {state for state, _ in TRANSITIONS} <= STATES
    assert {verb for _, verb in TRANSITIONS} == VERBS
    assert set(TRANSITIONS.values()) <= STATES - {"lapsed"}  # only the clock makes a record lapse


def test_every_state_can_be_left() -> None:
    for state in STATES - {"absent"}:
        verbs = [verb for verb in VERBS if follows(state, verb) not in (None, state)]
        assert verbs or state == "settled"
    assert follows("settled", "delete") == "absent"


def test_claim_is_granted_unless_done_unknown_or_running() -> None:
    assert {state for state in STATES if follows(state, "claim") == "running"} == {"absent", "released", "lapsed"}
    assert {state for state in STATES if follows(state, "claim") is None} == {"settled", "held", "running"}


def test_only_the_owner_of_a_running_operation_may_renew() -> None:
    assert {state for state in STATES if follows(state, "renew") == "running"} == {"running", "lapsed"}


def test_a_settled_outcome_never_changes() -> None:
    """Until it expires or is deleted; so a process may cache it."""
    assert {verb for verb in VERBS if follows("settled", verb)} == {"settle", "delete"}


def test_only_lapsed_and_held_can_be_resolved() -> None:
    doubtful = {state for state in STATES if follows(state, "resolve")}
    assert doubtful == {state for state in STATES if follows(state, "settle_as")} == {"held", "lapsed"}


def test_a_running_record_is_not_deleted() -> None:
    assert {state for state in STATES if follows(state, "delete") is None} == {"running", "absent"}


def test_purge_removes_expired_records_only() -> None:
    assert {state for state in STATES if follows(state, "purge")} == {"absent"}


@pytest.mark.parametrize("verb", ["settle", "release", "hold"])
def test_owner_may_repeat_but_not_contradict_its_settle(verb: Verb) -> None:
    after = follows("running", verb)
    assert after is not None
    assert follows(after, verb) == after
    assert all(follows(after, other) is None for other in ("settle", "release", "hold", "renew") if other != verb)


@given(st.sampled_from(get_args(State)), st.booleans(), st.booleans())
def test_running_records_lapse_and_finished_records_expire(state: State, expired: bool, lapsed: bool) -> None:
    """Never running or held records."""
    names = ("scope", "key", "name", "fingerprint")
    until, expires_at = (100.0 if lapsed else 200.0), (100.0 if expired else 200.0)
    record = Record(*names, state, 1, "holder", 1, 0.0, until, now=100.0, expires_at=expires_at)
    seen = state_of(record)
    assert seen == state_of(replace(record, now=0.0), 100.0)
    assert (seen == "lapsed") == (state == "running" and lapsed)
    assert (seen == "absent") == (state in ("settled", "released") and expired)
    assert seen in (state, "lapsed", "absent")


def test_an_unknown_pair_is_refused() -> None:
    assert follows("nonsense", "claim") is None
