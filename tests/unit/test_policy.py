"""The policy: durations, choices, and which outcomes are final."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._contract.policy import Policy, check_choice, duration
from oncemore._contract.rule import Rule
from oncemore._ledger.attempt import is_final
from oncemore._ledger.model import Outcome
from oncemore.errors import ConfigurationError

DURATIONS = [(0, 0.0), (5, 5.0), (0.25, 0.25), ("250ms", 0.25), ("30s", 30.0), (" 2m ", 120.0), ("1.5h", 5400.0)]
DURATIONS += [("1h30m", 5400.0), ("30d", 2592000.0), ("1w", 604800.0)]
NOT_DURATIONS = ["", "30", "s", "30x", "1h 30m", "-1s", "1e3s", "1.s", "٣s", "1h,30m", "9" * 400 + "s"]
NOT_DURATIONS += [None, True, -1, float("inf"), float("nan"), [1]]


@pytest.mark.parametrize(("value", "seconds"), DURATIONS)
def test_duration_is_seconds_or_text(value, seconds):
    assert duration(value) == seconds


@pytest.mark.parametrize("value", NOT_DURATIONS)
def test_what_is_not_a_duration_is_refused_with_examples(value):
    with pytest.raises(ConfigurationError, match="1h30m"):
        duration(value)


@given(
    st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["ms", "s", "m", "h", "d", "w"])), min_size=1, max_size=4)
)
def test_parts_of_a_duration_add_up(parts):
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert duration(text) == pytest.approx(sum(duration(f"{number}{unit}") for number, unit in parts))


def test_policy_holds_seconds():
    policy = Policy(lease="1m", ttl="7d", wait="500ms", suspect_window="2m")
    assert (policy.lease, policy.ttl, policy.wait, policy.suspect_window) == (60.0, 604800.0, 0.5, 120.0)


@pytest.mark.parametrize("setting", ["lease", "ttl"])
def test_lease_and_a_retention_take_time(setting):
    with pytest.raises(ConfigurationError, match="longer than 0 s"):
        Policy(**{setting: 0})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ttl_from", "birth"),
        ("expired", "maybe"),
        ("in_flight", "queue"),
        ("on_duplicate", "again"),
        ("on_mismatch", 418),
        ("keep", "some"),
        ("effect", "magic"),
        ("on_unknown", "guess"),
        ("on_unique", "both"),
        ("suspect", "arrest"),
        ("late", "never"),
    ],
)
def test_unknown_choice_is_refused_with_the_choices(setting, value):
    with pytest.raises(ConfigurationError, match=f"{setting} = .* choose one of"):
        Policy(**{setting: value})


def test_setting_without_choices_takes_any_value():
    check_choice("ttl", "whatever")


@pytest.mark.parametrize("errors", [[LookupError], LookupError, ("LookupError",), (BaseException,), (LookupError(),)])
def test_errors_are_a_tuple_of_exceptions(errors):
    """Any other value would fail only after the effect, and lose its result."""
    with pytest.raises(ConfigurationError, match=r"CardDeclined"):
        Policy(errors=errors)


@pytest.mark.parametrize("reruns", [-1, 1.5, True, "3"])
def test_reruns_must_be_a_whole_number(reruns):
    with pytest.raises(ConfigurationError, match=r"is not a number of times: write 0, 1, 2"):
        Policy(reruns=reruns)
    with pytest.raises(ConfigurationError, match=r"reruns: .* is not a number of times: write 0, 1, 2"):
        Rule("POST /x", effect="steps", reruns=reruns)


@pytest.mark.parametrize("types", [[dict], dict, ("Order",), (list[int],)])
def test_types_must_be_a_tuple_of_classes(types):
    with pytest.raises(ConfigurationError, match=r"is not a tuple of classes: write one such as \(Order,\)"):
        Policy(types=types)


def test_unknown_setting_is_refused_with_the_nearest_one():
    assert Policy(lease=5).but(ttl="1d") == Policy(lease=5, ttl="1d")
    with pytest.raises(ConfigurationError, match=r"no setting 'tll'.*did you mean 'ttl'"):
        Policy().but(tll="7d")


def test_resolving_needs_someone_to_ask():
    with pytest.raises(ConfigurationError, match="resolver"):
        Policy(on_unknown="resolve", resolver="shop:did_it_happen")
    with pytest.raises(ConfigurationError, match="needs a resolver"):
        Policy(on_unknown="resolve")
    assert Policy(on_unknown="resolve", resolver=lambda operation: None).on_unknown == "resolve"


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("final", {200, 201, 204, 301, 400, 404, 409, 410, 422}),
        ("success", {200, 201, 204}),
    ],
)
def test_which_responses_are_final(keep, kept):
    statuses = {200, 201, 204, 301, 400, 401, 403, 404, 408, 409, 410, 422, 425, 429, 500, 502, 503, 504}
    policy = Policy(keep=keep)
    assert {status for status in statuses if is_final(Outcome("response", status), policy)} == kept


@pytest.mark.parametrize("status", [200, 404, 500, 503])
def test_with_keep_all_failures_are_final_too(status):
    assert is_final(Outcome("response", status), Policy(keep="all"))


@pytest.mark.parametrize(
    ("keep", "kind", "kept"),
    [
        ("final", "value", True),
        ("final", "error", True),
        ("success", "value", True),
        ("success", "error", False),
        ("all", "error", True),
    ],
)
def test_which_results_of_functions_are_final(keep, kind, kept):
    assert is_final(Outcome(kind), Policy(keep=keep)) is kept


def test_function_may_decide_what_is_final():
    policy = Policy(keep=lambda outcome: outcome.status == 418)
    assert is_final(Outcome("response", 418), policy)
    assert not is_final(Outcome("response", 200), policy)
