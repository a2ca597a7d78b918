"""`oncemore consume` and `oncemore inbox`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from oncemore import Guard, Inbox, Op
from oncemore.tools.cli import main

SHOP = """
import asyncio
from oncemore import Guard, Inbox
from oncemore.messages import Consumer, Envelope
from oncemore.messages.broker import connect

asyncio.run(connect("memory://cli").publish([Envelope("refund.succeeded", 1, id="ev_1", source="payments")]))
consumer = Consumer(Inbox(Guard("sqlite:///ledger.db")), "memory://cli", {"*": lambda op, envelope: "booked"})
"""


def fail(op: Op, payload: object) -> None:
    raise ValueError("poison")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger with an event that was handled and a dead letter."""
    monkeypatch.chdir(tmp_path)
    url = "sqlite:///ledger.db"
    guard = Guard(url)
    inbox = Inbox(guard, attempts=1)
    inbox.handle("ev_001", "payments", {"amount": 1}, lambda op, payload: "ok")
    inbox.handle("ev_002", "payments", {"amount": 2}, fail)
    Inbox(guard, name="mailer").handle("ev_001", "pay:ments", 1, lambda op, payload: "ok")
    guard.close()
    return url


def test_list_shows_events_and_nothing_else(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inbox", "list", "--store", url, "--json"]) == 0
    events = json.loads(capsys.readouterr().out)["events"]
    found = {(event["event_id"], event["source"], event["result"]) for event in events}
    assert found == {("ev_001", "payments", "ok"), ("ev_002", "payments", "dead"), ("ev_001", "pay:ments", "ok")}


def test_csv_has_the_columns_of_the_consumer_inbox(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inbox", "list", "--store", url, "--csv", "--source", "payments"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "event_id,source,first_seen,processed,result"
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert any(re.fullmatch(rf"ev_001,payments,{time},{time},ok", line) for line in lines)
    assert any(re.fullmatch(rf"ev_002,payments,{time},,dead", line) for line in lines)


def test_csv_marks_an_event_id_that_looks_like_a_formula(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Guard(url) as guard:
        Inbox(guard).handle("=HYPERLINK(1)", "payments", 1, lambda op, payload: "ok")
    assert main(["inbox", "list", "--store", url, "--csv", "--source", "payments"]) == 0
    assert "\n'=HYPERLINK(1)," in capsys.readouterr().out


@pytest.mark.parametrize("command", ["list", "dead"])
def test_unreadable_cursor_is_reported_as_such(url: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inbox", command, "--store", url, "--source", "payments", "--cursor", "nonsense"]) == 2
    assert "copy it from the end of the previous list" in capsys.readouterr().err


def test_events_are_filtered_by_inbox_and_source(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*options: str) -> set[tuple[str, str, str]]:
        found: set[tuple[str, str, str]] = set()
        cursor: tuple[str, ...] = ()
        while True:
            assert main(["inbox", "list", "--store", url, "--json", "--limit", "1", *options, *cursor]) == 0
            page = json.loads(capsys.readouterr().out)
            found |= {(event["event_id"], event["inbox"], event["source"]) for event in page["events"]}
            if page["cursor"] is None:
                return found
            cursor = ("--cursor", page["cursor"])

    mailed = ("ev_001", "mailer", "pay:ments")
    assert listed("--inbox", "mailer") == listed("--source", "pay:ments") == {mailed}
    assert listed("--inbox", "mailer", "--source", "pay:ments") == {mailed}
    assert listed("--inbox", "inbox") == {("ev_001", "inbox", "payments"), ("ev_002", "inbox", "payments")}
    assert listed("--inbox", "mailer", "--source", "payments") == set()


def test_dead_letters_of_all_sources_are_listed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inbox", "dead", "--store", url, "--json"]) == 0
    [letter] = json.loads(capsys.readouterr().out)["events"]
    assert (letter["event_id"], letter["inbox"], letter["source"]) == ("ev_002", "inbox", "payments")
    assert letter["attempts"] == 1
    assert main(["inbox", "dead", "--store", url, "--inbox", "mailer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["events"] == []


def test_requeued_letter_is_no_longer_listed_as_dead(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inbox", "dead", "--store", url, "--source", "payments", "--json"]) == 0
    [letter] = json.loads(capsys.readouterr().out)["events"]
    assert (letter["event_id"], "poison" in letter["reason"]) == ("ev_002", True)
    assert main(["inbox", "requeue", "ev_002", "--store", url, "--source", "payments"]) == 0
    assert capsys.readouterr().out == "Requeued ev_002 of payments.\n"
    assert main(["inbox", "dead", "--store", url, "--source", "payments"]) == 0
    assert "ev_002" not in capsys.readouterr().out
    assert main(["inbox", "requeue", "ev_001", "--store", url, "--source", "payments"]) == 1
    assert "not a dead letter" in capsys.readouterr().err
    assert main(["inbox", "requeue", "ev_9", "--store", url, "--source", "payments"]) == 1


def test_consume_once_handles_what_is_there(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cli_shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    try:
        assert main(["consume", "cli_shop:consumer", "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"acknowledged": 1}
        assert main(["consume", "cli_shop:Inbox", "--once"]) == 2
        assert "not" in capsys.readouterr().err
    finally:
        sys.modules.pop("cli_shop", None)
