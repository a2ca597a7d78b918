"""`oncemore keys` on every store: the command in a process of its own, on real servers."""

from __future__ import annotations

import csv
import shlex

import pytest

from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from oncemore.errors import UnknownOutcome
from tests.tools.command import oncemore
from tests.tools.conftest import claim

BOB = "payments:principal:bob"


def test_list_shows_each_record_and_its_state(filled: Guard, store_url: str) -> None:
    data = oncemore("keys", "list", "--json", "--store", store_url).json
    states = {record["key"]: record["state"] for record in data["records"]}
    assert states.items() >= {
        ("settled-1", "settled"),
        ("released-1", "released"),
        ("held-1", "held"),
        ("running-1", "running"),
        ("lapsed-1", "lapsed"),
    }
    assert "rf_1" not in str(data)
    table = oncemore("keys", "list", ONCEMORE_STORE=store_url).out
    assert all(key in table for key in states)


def test_list_filters_records(filled: Guard, store_url: str) -> None:
    for words, expected in (
        (["--state", "held"], {"held-1"}),
        (["--lapsed"], {"lapsed-1"}),
        (["--name", "refunds.create"], {"settled-1", "released-1"}),
        (["--scope", BOB, "--key", "running-1"], {"running-1"}),
        (["--key", "nobody's"], set()),
    ):
        data = oncemore("keys", "list", *words, "--json", "--store", store_url).json
        assert {record["key"] for record in data["records"]} == expected, words


def test_cursor_continues_the_list(filled: Guard, store_url: str) -> None:
    seen: list[str] = []
    cursor: list[str] = []
    while True:
        page = oncemore(
            "keys", "list", "--name", "payments.create", "--limit", 1, *cursor, "--json", "--store", store_url
        )
        seen += [record["key"] for record in page.json["records"]]
        if page.json["cursor"] is None:
            break
        cursor = ["--cursor", page.json["cursor"]]
    assert sorted(seen) == ["held-1", "lapsed-1", "running-1"]


def test_printed_cursor_can_be_pasted_into_a_shell(filled: Guard, store_url: str) -> None:
    """A cursor of PostgreSQL is JSON, with quotes and spaces."""
    words = ["keys", "list", "--name", "payments.create", "--limit", 2, "--store", store_url]
    more = oncemore(*words).out.splitlines()[-1]
    assert more.startswith("There are more: --cursor ")
    rest = oncemore(*words, *shlex.split(more.removeprefix("There are more: ")))
    assert (rest.code, len(rest.out.splitlines())) == (0, 2), "the head, and the third record"


def test_control_characters_in_a_cursor_are_escaped(guard: Guard, store_url: str) -> None:
    """U+009B starts a terminal command.  The escaped cursor still continues the list."""
    for number in range(3):
        claim(guard, f"\x9b2J{number}")
    words, more, seen = ["keys", "list", "--limit", 1, "--store", store_url], "", set()
    while more is not None:
        lines = oncemore(*words, *shlex.split(more)).out.splitlines()
        assert all(line.isprintable() for line in lines)
        seen |= {line.split()[0] for line in lines[1:2] if line}
        more = next((line.removeprefix("There are more: ") for line in lines if line.startswith("There")), None)
    assert {f"\\x9b2J{number}" for number in range(3)} <= seen


def test_show_hides_the_outcome_unless_asked(filled: Guard, store_url: str) -> None:
    shown = oncemore("keys", "show", "settled-1", "--store", store_url)
    assert shown.code == 0
    assert "refunds:principal:ann" in shown.out
    assert "rf_1" not in shown.out
    data = oncemore("keys", "show", "settled-1", "--outcome", "--json", "--store", store_url).json
    assert data["outcome"]["body"] == '{"id": "rf_1"}'
    assert data["status"] == 201


def test_invalid_cursor_exits_with_two(filled: Guard, store_url: str) -> None:
    ran = oncemore("keys", "list", "--cursor", "garbage", "--store", store_url)
    assert (ran.code, ran.out) == (2, "")
    assert "garbage" in ran.err


def test_missing_or_expired_record_exits_with_one(filled: Guard, store_url: str) -> None:
    for words in (["show", "nothing"], ["show", "expired-1"], ["delete", "nothing", "--yes"]):
        ran = oncemore("keys", *words, "--store", store_url)
        assert (ran.code, ran.out) == (1, "")
        assert "oncemore keys list" in ran.err


def test_key_in_two_scopes_needs_the_scope_option(filled: Guard, store_url: str) -> None:
    claim(filled, "settled-1", scope="O'Hara's")
    ran = oncemore("keys", "show", "settled-1", "--store", store_url)
    assert ran.code == 2
    choices = [shlex.split(line) for line in ran.err.splitlines() if "--scope" in line]
    assert sorted(choices) == [["--scope", "O'Hara's"], ["--scope", "refunds:principal:ann"]]
    found = oncemore("keys", "show", "settled-1", "--scope", "O'Hara's", "--json", "--store", store_url)
    assert found.json["state"] == "running"


def test_resolve_released_lets_the_operation_run(filled: Guard, store_url: str) -> None:
    operation = Operation(BOB, "held-1", "c1:c", "payments.create")
    with pytest.raises(UnknownOutcome):
        filled.run(operation, lambda op: "again")
    ran = oncemore("keys", "resolve", "held-1", "--released", "--yes", "--note", "asked the bank", "--store", store_url)
    assert ran.code == 0, ran.err
    assert filled.run(operation, lambda op: "again").value == "again"


def test_resolve_with_an_outcome_replays_it(filled: Guard, store_url: str) -> None:
    response = ["--status", 201, "--header", "Content-Type: application/json", "--body", "-"]
    words = ["keys", "resolve", "held-1", *response, "--yes", "--ttl", "2h", "--json", "--store", store_url]
    ran = oncemore(*words, said='{"id": "pay_1"}')
    assert ran.json["state"] == "settled"
    answer = filled.run(Operation(BOB, "held-1", "c1:c"), lambda op: pytest.fail("performed again"))
    expected = Outcome("response", 201, (("content-type", "application/json"),), b'{"id": "pay_1"}')
    assert answer.outcome == expected
    ran = oncemore("keys", "resolve", "lapsed-1", "--value", '{"paid": true}', "--yes", "--store", store_url)
    assert ran.code == 0, ran.err
    record = filled.find(BOB, "lapsed-1")
    assert record is not None
    assert record.state == "settled"


def test_resolve_of_settled_or_running_is_refused(filled: Guard, store_url: str) -> None:
    for key in ("settled-1", "running-1"):
        ran = oncemore("keys", "resolve", key, "--released", "--yes", "--store", store_url)
        assert ran.code == 1
        assert "only an operation with an unknown outcome" in ran.err


def test_delete_makes_the_key_new_unless_it_is_running(filled: Guard, store_url: str) -> None:
    assert oncemore("keys", "delete", "settled-1", "--yes", "--json", "--store", store_url).json["deleted"] is True
    again = filled.run(Operation("refunds:principal:ann", "settled-1", "c1:z"), lambda op: "as new")
    assert again.value == "as new"
    ran = oncemore("keys", "delete", "running-1", "--yes", "--store", store_url)
    assert ran.code == 1
    assert "It is running" in ran.err


def test_delete_and_resolve_need_a_yes(filled: Guard, store_url: str) -> None:
    before = filled.stats()
    for words in (["delete", "settled-1"], ["resolve", "held-1", "--released"]):
        for said in ("n\n", ""):
            ran = oncemore("keys", *words, "--store", store_url, said=said)
            assert ran.code == 1
            assert "Nothing was changed." in ran.err
    assert filled.stats() == before
    assert oncemore("keys", "delete", "settled-1", "--store", store_url, said="y\n").code == 0
    assert filled.find("refunds:principal:ann", "settled-1") is None


def test_list_state_lapsed_is_the_flag_lapsed(filled: Guard, store_url: str) -> None:
    by_state, by_flag = (
        oncemore("keys", "list", *words, "--json", "--store", store_url).json["records"]
        for words in (("--state", "lapsed"), ("--lapsed",))
    )
    assert [record["key"] for record in by_state] == [record["key"] for record in by_flag] == ["lapsed-1"]


def test_list_csv_has_the_columns_of_a_replay_log(filled: Guard, store_url: str) -> None:
    response = Outcome("response", 201, (), b'{"id": "rf_123"}')
    filled.run(Operation("payments", "=1+1", "c1:ab"), lambda op: response)
    ran = oncemore("keys", "list", "--csv", "--store", store_url)
    rows = {row["key"]: row for row in csv.DictReader(ran.out.splitlines())}
    assert list(rows["held-1"]) == ["key", "payload_hash", "status", "http_code", "result_id", "notes"]
    written = rows["'=1+1"]  # not taken for a formula
    assert (written["status"], written["http_code"], written["result_id"]) == ("settled", "201", "rf_123")
    assert (rows["held-1"]["status"], rows["held-1"]["result_id"]) == ("held", "")


def test_show_derive_tells_the_providers_key(filled: Guard, store_url: str) -> None:
    found: list[str] = []
    filled.run(Operation("payments", "derived"), lambda op: found.append(op.derive("charge")))
    shown = oncemore("keys", "show", "derived", "--derive", "charge", "--json", "--store", store_url).json
    assert [shown["derived"]] == found
