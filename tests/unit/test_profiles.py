"""The profiles: each agrees with its source."""

from __future__ import annotations

import pytest

from oncemore._contract.contract import Contract
from oncemore._contract.profiles import DEFAULT, PROFILES
from oncemore._contract.rule import Rule
from oncemore._contract.settings import SETTINGS, StatusHeader
from oncemore.errors import InvalidKey, MissingKey

V4 = "8e03978e-40d5-43e8-bc93-6894a57f9324"
V7 = "018f4a2e-7c3b-7def-8abc-0123456789ab"
WITHOUT_A_DEFAULT = {"name", "reverses", "resolver", "unique_by", "rate", "retry"}


def default_of(profile: str) -> Rule:
    return Contract(profile=profile).default


def test_all_profiles_of_the_design_are_there():
    named = "default ietf stripe stripe-v2 azure zalando matchmaking patterns spring knowledge"
    assert set(PROFILES) == set(named.split())


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_complete_and_valid(profile):
    assert set(PROFILES[profile]) == {*SETTINGS, "match"} - WITHOUT_A_DEFAULT
    assert default_of(profile).policy


def test_rule_alone_is_under_the_default_profile():
    assert Rule() == default_of("default")
    assert PROFILES["default"] == DEFAULT


@pytest.mark.parametrize(
    ("profile", "on_mismatch", "in_flight", "keep", "hours"),
    [
        ("default", 409, "wait", "final", 24),
        ("ietf", 422, "conflict", "final", 24),
        ("stripe", 400, "conflict", "all", 24),
        ("stripe-v2", 400, "conflict", "success", 720),
        ("azure", 400, "conflict", "final", 1 / 12),
        ("zalando", 400, "wait", "all", 24),
        ("matchmaking", 409, "wait", "final", 24),
        ("patterns", 400, "wait", "final", 24),
        ("spring", 409, "conflict", "all", 72),
        ("knowledge", 409, "accepted", "success", 24),
    ],
)
def test_what_repeats_and_conflicts_get(profile, on_mismatch, in_flight, keep, hours):
    policy = default_of(profile).policy
    assert (policy.on_mismatch, policy.in_flight, policy.keep) == (on_mismatch, in_flight, keep)
    assert policy.ttl == hours * 3600


def test_ietf_wants_a_structured_field():
    key = default_of("ietf").key
    assert key.read(['"8e03"']) == "8e03"
    with pytest.raises(InvalidKey, match="double quotes"):
        key.read(["8e03"])


def test_matchmaking_wants_a_uuid_of_version_4():
    key = default_of("matchmaking").key
    assert key.read([V4]) == V4
    with pytest.raises(InvalidKey, match="version 4"):
        key.read([V7])
    with pytest.raises(MissingKey, match="Idempotency-Key"):
        key.read([])


def test_azure_has_its_own_headers():
    rule = default_of("azure")
    assert rule.key.name == "Repeatability-Request-ID"
    assert (rule.first_sent, rule.policy.late) == ("Repeatability-First-Sent", "refuse")
    header = rule.status_header
    assert (header.name, header.stored, header.replayed, header.refused) == (
        "Repeatability-Result",
        "accepted",
        "accepted",
        "rejected",
    )


def test_stripe_marks_replays_only():
    assert default_of("stripe").status_header == StatusHeader("Idempotent-Replayed", replayed="true", expires="")
    assert default_of("default").status_header == StatusHeader("Idempotency-Status", "stored", "replayed", "unstored")


def test_spring_tells_when_to_come_back():
    assert default_of("spring").retry_after == 3.0
    with pytest.raises(InvalidKey, match="at most 100"):
        default_of("spring").key.read(["k" * 101])


def test_patterns_log_a_suspicious_repeat():
    policy = default_of("patterns").policy
    assert (policy.suspect, policy.suspect_window) == ("log", 30.0)


@pytest.mark.parametrize(
    ("profile", "conflicts"),
    [("default", False), ("stripe", True), ("stripe-v2", False), ("matchmaking", True)],
)
def test_key_on_another_route_is_another_operation_or_conflict(profile, conflicts):
    """A conflict is found by the fingerprint, once both routes' keys share a scope."""
    contract = Contract(Rule("POST /a"), Rule("POST /b"), profile=profile)
    one, other = (contract.match("POST", path).rule.scope_of(principal="alice") for path in ("/a", "/b"))
    assert (one == other) is conflicts


@pytest.mark.parametrize(
    ("profile", "guarded"),
    [("default", "POST PATCH"), ("stripe", "POST"), ("stripe-v2", "POST DELETE"), ("azure", "POST PUT PATCH DELETE")],
)
def test_which_undeclared_methods_are_guarded(profile, guarded):
    contract = Contract(profile=profile)
    methods = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
    assert [method for method in methods if contract.match(method, "/any")] == guarded.split()
