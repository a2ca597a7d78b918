"""The retry table of the matchmaking service, with the retry client and keys of UUID version 4."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest

from examples.matchmaking.processes import Matchmaking
from oncemore import Retry
from oncemore.client import random_key
from oncemore.client.httpx import RetryTransport

from .matchmaking import ForkedMatchmaking
from .scripted_proxy import scripted_proxy


@pytest.fixture(scope="module", name="service")
def one_service() -> Iterator[Matchmaking]:
    with ForkedMatchmaking() as service:
        service.sign_in("ann")
        yield service


def call(service: Matchmaking, subject: str, *script: str | int, retry: Retry | None = None) -> httpx.Response:
    """Block *subject* through a proxy with a script, by a client that retries."""
    retry = retry or Retry.matchmaking(budget=None, attempt_timeout=3)
    headers = {"Authorization": f"Bearer {service.tokens['ann']}"}
    with scripted_proxy(service.url, *script) as url:
        transport = RetryTransport(retry, make_key=random_key)
        with httpx.Client(transport=transport, base_url=url, headers=headers) as client:
            return client.post("/safety/block", json={"subjectId": subject})


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_status_is_retried(service: Matchmaking, skipped_sleeps: list[float], status: int) -> None:
    answer = call(service, f"subject-{status}", status)
    assert answer.status_code == 200
    story = answer.extensions["oncemore"]
    assert len(story.attempts) == 2
    assert uuid.UUID(story.key).version == 4
    assert service.effects("user.blocked").count(f"subject-{status}") == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
def test_status_is_not_retried(service: Matchmaking, skipped_sleeps: list[float], status: int) -> None:
    answer = call(service, f"subject-{status}", status)
    assert answer.status_code == status
    assert len(answer.extensions["oncemore"].attempts) == 1
    assert f"subject-{status}" not in service.effects("user.blocked")


def test_lost_answer_is_replayed(service: Matchmaking, skipped_sleeps: list[float]) -> None:
    answer = call(service, "subject-lost", "lose", 503)
    assert answer.json() == {"subjectId": "subject-lost", "blocked": True}
    assert len(answer.extensions["oncemore"].attempts) == 3
    assert service.effects("user.blocked").count("subject-lost") == 1


def test_three_retries_at_most(service: Matchmaking, skipped_sleeps: list[float]) -> None:
    answer = call(service, "subject-down", 500, 500, 500, 500)
    assert answer.status_code == 500
    assert len(answer.extensions["oncemore"].attempts) == 4
    for number, pause in enumerate(skipped_sleeps):
        assert 2**number <= pause <= 2**number + 1
    assert len(skipped_sleeps) == 3
    assert "subject-down" not in service.effects("user.blocked")


@pytest.mark.parametrize(
    ("preset", "attempts", "seconds"),
    [
        (Retry.user_facing, 1 + 3, 10),
        (Retry.background_job, 1 + 5, 300),
        (Retry.webhook_delivery, 10, 86_400),
        (Retry.scheduled_task, 1 + 3, 3600),
    ],
)
def test_retry_limits_of_each_kind_of_operation(preset: type[Retry], attempts: int, seconds: float) -> None:
    retry = preset()
    assert (retry.attempts, retry.deadline) == (attempts, seconds)
