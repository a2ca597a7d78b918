"""Real workers of each runner are killed and frozen: one effect with `once_task`, several without."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.workers.stage import (
    ArqRunner,
    CeleryRunner,
    DramatiqRunner,
    Figures,
    HueyRunner,
    ProcrastinateRunner,
    RqRunner,
    Runner,
    Stage,
    TaskiqRunner,
)

pytestmark = [pytest.mark.chaos, pytest.mark.server]

Play = Callable[[Runner], dict[str, Figures]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Play the stories with a runner, and check the results that all runners share."""

    def played(runner: Runner) -> dict[str, Figures]:
        with Stage(runner, tmp_path) as stage:
            figures = stage.play()
            states = {story: stage.state(story) for story in figures}
        write_down(runner, figures)
        assert {story: figure.once for story, figure in figures.items()} == dict.fromkeys(figures, 1), stage.log()[
            -4000:
        ]
        for story in figures.keys() - {"limit"}:
            assert set(figures[story].returned) == {f"{story} k1"}, "the result is replayed"
        assert len(figures["duplicate"].returned) == 2
        assert states == {story: "held" if story == "limit" else "settled" for story in figures}
        repeated = {story: figure.bare for story, figure in figures.items() if story not in ("retry", "limit")}
        assert min(repeated.values()) >= 2, "the bare runner has shown that the story can go wrong"
        return figures

    return played


def write_down(runner: Runner, figures: dict[str, Figures]) -> None:
    """Write the figures for docs/_generate/workers.py, if it asks for them."""
    if folder := os.environ.get("ONCEMORE_WORKERS"):
        Path(folder).mkdir(exist_ok=True)
        row = {runner.title: {story: [figure.bare, figure.once] for story, figure in figures.items()}}
        (Path(folder) / f"{runner.title}.json").write_text(json.dumps(row))


def test_celery_on_redis_takes_effect_once(play: Play, redis_broker: str) -> None:
    assert play(CeleryRunner(redis_broker))["limit"].bare == 2


def test_celery_on_rabbitmq_takes_effect_once(play: Play, rabbit_broker: str) -> None:
    assert play(CeleryRunner(rabbit_broker))["limit"].bare == 2


def test_dramatiq_on_redis_takes_effect_once(play: Play, redis_broker: str) -> None:
    assert play(DramatiqRunner(redis_broker))["limit"].bare == 2


def test_dramatiq_on_rabbitmq_takes_effect_once(play: Play, rabbit_broker: str) -> None:
    assert play(DramatiqRunner(rabbit_broker))["limit"].bare == 2


def test_rq_takes_effect_once(play: Play, redis_broker: str) -> None:
    assert play(RqRunner(redis_broker))["limit"].bare == 2


def test_huey_takes_effect_once(play: Play, redis_broker: str) -> None:
    assert play(HueyRunner(redis_broker))["limit"].bare == 2


def test_taskiq_takes_effect_once(play: Play, redis_broker: str) -> None:
    assert play(TaskiqRunner(redis_broker))["limit"].bare == 2


def test_procrastinate_takes_effect_once(play: Play, own_database: str) -> None:
    play(ProcrastinateRunner(own_database))
    with psycopg.connect(own_database) as connection:
        jobs = "SELECT attempts FROM procrastinate_jobs WHERE task_name = 'once' AND args ->> 'story' = 'duplicate'"
        assert connection.execute(jobs).fetchall() == [(1,), (1,)]  # those that came back later were not counted


def test_arq_takes_effect_once(play: Play, redis_broker: str, arq_python: str) -> None:
    runner = ArqRunner(redis_broker)
    runner.python = arq_python
    if not os.environ.get("FULL"):  # a frozen worker's job is run again after 12 seconds only
        runner.stories = ("duplicate", "retry", "limit", "killed")  # type: ignore[misc]
    play(runner)
