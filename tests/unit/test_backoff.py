"""Delays: each jitter over ten thousand samples, and the properties of all of them."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._runtime.backoff import Jitter
from oncemore.client import Backoff
from oncemore.client.retry import WEBHOOK_OFFSETS, Retry
from oncemore.errors import ConfigurationError

SAMPLES = 10_000


def is_uniform(values: list[float], low: float, high: float) -> bool:
    """Kolmogorov and Smirnov: the samples stray from the line no further than chance allows (p ≈ 0.00001)."""
    if not all(low <= value <= high for value in values):
        return False
    ordered = sorted((value - low) / (high - low) for value in values)
    strays = max(abs(value - at / len(ordered)) for at, value in enumerate(ordered))
    return strays < 2.5 / len(ordered) ** 0.5


@pytest.mark.parametrize(
    ("jitter", "retry", "low", "high"),
    [
        ("full", 1, 0.1, 0.2),
        ("full", 4, 0.8, 1.6),
        ("full", 9, 1.0, 2.0),  # at the cap the band keeps its width
        ("equal", 3, 0.2, 0.4),
        ("zero", 3, 0.0, 0.4),
        ("additive", 2, 0.2, 0.7),
        ("decorrelated", 2, 0.1, 0.6),
    ],
)
def test_each_jitter_is_uniform_in_its_band(jitter: Jitter, retry: int, low: float, high: float) -> None:
    chance = random.Random(7)
    backoff = Backoff(base=0.1, factor=2, cap=2, jitter=jitter, spread=0.5)
    assert is_uniform([backoff.delay(retry, chance.random(), 0.2) for _ in range(SAMPLES)], low, high)


def test_a_lopsided_sample_is_not_taken_for_uniform() -> None:
    """The yardstick itself."""
    chance = random.Random(7)
    assert not is_uniform([chance.random() ** 1.2 for _ in range(SAMPLES)], 0, 1)


def test_the_playbooks_schedule() -> None:
    retry = Retry.playbook()
    samples = [list(retry.delays()) for _ in range(SAMPLES)]
    bands = [(0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 1.6)]
    for delays, (low, high) in zip(zip(*samples, strict=True), bands, strict=True):
        assert is_uniform(list(delays), low, high)
    assert retry.deadline == 10
    assert retry.cap == 2


def test_the_matchmaking_schedule() -> None:
    retry = Retry.matchmaking()
    samples = [list(retry.delays()) for _ in range(SAMPLES)]
    for step, delays in enumerate(zip(*samples, strict=True)):
        assert is_uniform(list(delays), 2.0**step, 2.0**step + 1)
    assert len(samples[0]) == 3
    assert Backoff(base=1, cap=30, jitter="additive", spread=1).delay(9, 0.5) == 30


@pytest.mark.parametrize(
    ("preset", "attempts", "deadline"),
    [
        (Retry.user_facing, 1 + 3, 10),
        (Retry.background_job, 1 + 5, 300),
        (Retry.webhook_delivery, 10, 86400),
        (Retry.scheduled_task, 1 + 3, 3600),
    ],
)
def test_presets_by_operation_type(preset: Any, attempts: int, deadline: int) -> None:
    retry = preset()
    assert (retry.attempts, retry.deadline) == (attempts, deadline)
    assert sum(retry.delays()) < deadline
    assert preset(attempts=2).attempts == 2


def test_webhook_schedule_leaves_time_for_last_attempt() -> None:
    retry = Retry.webhook_delivery()
    for _ in range(1000):
        at = 0.0
        before = 0.0
        for delay, due in zip(retry.delays(), WEBHOOK_OFFSETS, strict=True):
            at += delay
            assert due - 0.1 * (due - before) <= at <= due
            before = due
        assert at < retry.deadline - 60


def test_schedule_counts_from_first_attempt() -> None:
    retry = Retry.webhook_delivery()
    assert retry.delay(2, 0.0, elapsed=29) < 1
    assert retry.delay(2, 0.0, elapsed=31) == 0


@given(
    st.sampled_from(get_args(Jitter)),
    st.integers(1, 10_000),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 100),
    st.floats(1, 10),
    st.floats(0, 1000),
)
def test_no_delay_is_negative_or_above_the_cap(
    jitter: Jitter, retry: int, chance: float, base: float, factor: float, previous: float
) -> None:
    backoff = Backoff(base=base, factor=factor, cap=max(base, 30.0), jitter=jitter, spread=1.0)
    assert 0 <= backoff.delay(retry, chance, previous) <= backoff.cap


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"attempts": True},
        {"attempts": 2.5},
        {"deadline": 0},
        {"deadline": "soon"},
        {"attempt_timeout": 0},
        {"base": 3, "cap": 2},
        {"factor": 0.5},
        {"spread": -1},
        {"jitter": "some"},
        {"schedule": (5, 3)},
        {"schedule": (1, 2), "attempts": 5},
        {"key_lifetime": 5},
        {"key_lifetime": 0},
    ],
)
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Retry(**wrong)
    if set(wrong) <= {"factor", "spread", "jitter"}:
        with pytest.raises(ConfigurationError):
            Backoff(**wrong)


def test_durations_may_be_written_as_text() -> None:
    retry = Retry(deadline="5m", attempt_timeout="250ms", key_lifetime="30d", schedule=("1s", "2s", "3s", "4s"))  # type: ignore[arg-type]
    assert (retry.deadline, retry.attempt_timeout, retry.key_lifetime) == (300, 0.25, 30 * 86400)
    assert retry.schedule == (1, 2, 3, 4)


def test_policies_are_values() -> None:
    assert Retry.playbook() == Retry()
    assert hash(Retry()) == hash(Retry())
    assert Retry(errors=KeyError).errors == (KeyError,)  # type: ignore[arg-type]


def test_preset_with_unknown_change_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"Retry has no 'attemps' \(did you mean 'attempts'\?\)"):
        Retry.user_facing(attemps=3)  # type: ignore[call-arg]
    assert Retry.user_facing(deadline="5s").deadline == 5.0
