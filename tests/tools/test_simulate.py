"""The simulation: the same seed tells the same tale, and the tale is the one that retries are known for."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from oncemore.client.hosts import Breaker, Budget
from oncemore.client.retry import Retry
from oncemore.tools.cli import main
from oncemore.tools.simulate import POLICIES, compare
from oncemore.tools.simulated import Brownout, Report, SimulatedServer, render_plot, render_table

SMALL = Brownout(clients=3000)


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {one.name: one for one in compare(SMALL, POLICIES, processes=5)}


def test_the_same_seed_gives_the_same_figures(reports: dict[str, Report]) -> None:
    """CASES 39."""
    chosen = {name: POLICIES[name] for name in ("full jitter", "+ hedging")}
    again = compare(SMALL, chosen, processes=5)
    assert again == [reports["full jitter"], reports["+ hedging"]]
    other = compare(SMALL, {"full jitter": POLICIES["full jitter"]}, seed=2, processes=5)
    assert other != [reports["full jitter"]]


def test_a_budget_keeps_the_load_down_and_recovery_short(reports: dict[str, Report]) -> None:
    """CASES 39."""
    bare, budget = reports["full jitter"], reports["+ budget"]
    assert budget.amplification < bare.amplification / 1.2
    assert budget.peak < bare.peak
    assert budget.recovery <= bare.recovery


def test_without_retries_every_operation_is_one_attempt(reports: dict[str, Report]) -> None:
    """CASES 39."""
    assert reports["no retries"].amplification == 1
    assert sum(reports["no retries"].asked) == SMALL.clients


def test_a_breaker_sends_less_than_a_budget_alone(reports: dict[str, Report]) -> None:
    """CASES 39."""
    assert sum(reports["+ breaker"].attempts) < sum(reports["+ budget"].attempts)


def test_hedging_shortens_the_tail_of_a_server_with_a_short_stall() -> None:
    """CASES 34."""
    stall = Brownout(clients=3000, ends=15.5, remaining=0.3, patience=5.0)
    plain, hedged = compare(
        stall,
        {"plain": Retry(attempt_timeout=4, budget=None), "hedged": Retry(attempt_timeout=4, hedge=0.2, budget=None)},
    )
    assert sum(hedged.attempts) > sum(plain.attempts)
    assert hedged.repeated > 0


def test_an_outage_shorter_than_the_retries_is_not_noticed_by_those_who_retry() -> None:
    """CASES 33."""
    outage = Brownout(clients=3000, ends=16.0, remaining=0.0, headroom=3.0)
    once, patient = compare(outage, {"once": POLICIES["no retries"], "patient": POLICIES["full jitter"]})
    assert once.success < 0.99
    assert patient.success == 1
    assert patient.recovery == 0


def test_no_operation_ends_after_its_deadline() -> None:
    """CASES 37."""
    retry = Retry(attempts=50, deadline=3.0, attempt_timeout=1.0, budget=Budget(), breaker=Breaker(cooldown=1.0))
    [report] = compare(SMALL, {"impatient": retry})
    assert max(report.latencies) <= 3.0 + 1e-6


def test_the_server_serves_in_order_and_refuses_when_the_queue_is_long() -> None:
    """CASES 39."""
    server = SimulatedServer(Brownout(clients=60, lasts=60, headroom=1.0, patience=2.5))
    answers = [server.visit(0.0) for _ in range(6)]
    assert [status for _, status in answers] == [201, 201, 201, 503, 503, 503]
    assert [round(when, 2) for when, _ in answers[:3]] == [1.01, 2.01, 3.01]


def test_the_command_prints_a_table_and_writes_a_plot(tmp_path: Path, capsys: Any) -> None:
    """CASES 39."""
    plot = tmp_path / "plot.svg"
    assert main(["simulate", "retries", "--clients", "500", "--seed", "3", "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    assert all(name in printed.out for name in POLICIES)
    assert "full jitter: done" in printed.err
    drawing = ElementTree.parse(plot).getroot()
    lines = [part for part in drawing.iter() if part.tag.endswith("polyline")]
    assert len(lines) == 2 * len(POLICIES)
    assert all("nan" not in line.attrib["points"] for line in lines)


def test_the_figures_are_there_for_programs(capsys: Any) -> None:
    """CASES 39."""
    assert main(["simulate", "retries", "--clients", "500", "--policy", "no retries", "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)
    assert (told["policy"], told["attempts_per_operation"]) == ("no retries", 1)


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """CASES 39."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(["simulate", "retries", "--clients", "50", "--policy", "no retries"])
    assert "█" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["--clients", "0"], ["--remaining", "2"], ["--brownout", "-1"], ["--policy", "hope"]]
)
def test_the_command_refuses_what_makes_no_sense(wrong: list[str]) -> None:
    """CASES 39."""
    assert main(["simulate", "retries", *wrong]) == 2


def test_nothing_at_all_is_still_a_report() -> None:
    """CASES 39."""
    seconds = [0] * 60
    empty = Report("nobody", Brownout(clients=1), seconds, seconds, seconds)
    assert "nobody" in render_table([empty])
    ElementTree.fromstring(render_plot([empty]))
