"""`oncemore schedule`: jobs are run, listed, made up for and triggered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Program

from .command import Finished, oncemore

FOLDER = Path(__file__).parent
DAY = "2026-02-19"


@pytest.fixture
def call(tmp_path: Path) -> Any:
    def called(*words: str) -> Finished:
        return oncemore("schedule", *words, folder=FOLDER, SCHEDULE_STORE=f"sqlite:///{tmp_path}/once.db")

    return called


def test_backfill_list_and_trigger_tell_of_each_slot(call: Any) -> None:
    assert call("backfill", "schedules:schedule", DAY, "2026-02-20").out == "4 completed\n"
    again = call("backfill", "schedules:schedule", DAY, "2026-02-21", "--json").json
    assert (again["completed"], again["conflict"]) == (2, 4)
    listed = call("list", "schedules:schedule", "--day", DAY, "--json").json
    assert [(slot["slot"], slot["state"], slot["attempts"]) for slot in listed] == [
        (f"{DAY}:Europe/Berlin:ann", "completed", 1),
        (f"{DAY}:Europe/Berlin:bob", "completed", 1),
    ]
    assert listed[0]["at"] == "2026-02-19T06:00:00+01:00"
    table = call("list", "schedules:schedule", "--day", "2026-02-22", "--job", "daily_offers").out
    assert table.splitlines()[0].split() == ["job", "slot", "at", "state", "attempts", "note"]
    assert table.count("missed") == 2
    assert call("trigger", "schedules:schedule", "daily_offers").out == "2 completed\n"
    assert call("missed", "schedules:schedule", "--json").json == []


def test_job_is_named_with_or_without_its_module(call: Any) -> None:
    for name in ("broken", "schedules.broken"):
        assert len(call("list", "schedules:failing", "--day", DAY, "--job", name, "--json").json) == 1


def test_failed_slot_exits_with_one(call: Any) -> None:
    done = call("backfill", "schedules:failing", DAY, DAY)
    assert (done.code, done.out) == (1, "1 failed\n")
    (slot,) = call("list", "schedules:failing", "--day", DAY, "--json").json
    assert (slot["state"], slot["attempts"]) == ("failed", 1)


def test_run_once_says_that_nothing_is_due(call: Any) -> None:
    assert call("run", "schedules:failing", "--once") == Finished(0, "nothing was due\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "schedules"), "write module:name"),
        (("run", "schedules:nothing"), "not a schedule"),
        (("run", "nowhere:schedule"), "cannot be found"),
        (("missed", "schedules:schedule", "--job", "offers"), "offers is not in the schedule: it has daily_offers"),
        (("trigger", "schedules:schedule", "offers"), "offers is not in the schedule"),
        (("backfill", "schedules:schedule", DAY, "2026-02-18"), "the last day is before the first"),
    ],
)
def test_mistake_is_named_in_the_error(call: Any, words: tuple[str, ...], message: str) -> None:
    done = call(*words)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_with_the_signal(tmp_path: Path, end: int) -> None:
    environment = {**os.environ, "SCHEDULE_STORE": f"sqlite:///{tmp_path}/once.db"}
    command = [sys.executable, "-m", "oncemore.tools.cli", "schedule", "run", "schedules:busy"]
    with Program(command, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ran\n"
        program.send_signal(end)
        _, errors = program.communicate(timeout=60)
    assert (program.returncode, errors) == (0, "")


def test_json_error_is_one_line(call: Any) -> None:
    done = call("missed", "schedules:nothing", "--json")
    assert done.code == 2
    assert json.loads(done.err)["error_code"] == "CONFIGURATION.invalid"
