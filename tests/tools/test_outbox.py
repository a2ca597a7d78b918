"""`oncemore outbox` and `oncemore relay`: the commands in a process of their own, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncemore import Guard, Operation, Outbox, Policy
from oncemore.messages import Relay
from tests.messages.recording import RecordingBroker, stored_in
from tests.tools.command import oncemore


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    schema = request.getfixturevalue("postgres_schema")
    server = request.getfixturevalue("postgres_url")
    return f"{server}{'&' if '?' in server else '?'}schema={schema}"


@pytest.fixture
def outbox(url: str) -> Iterator[Outbox]:
    """An outbox with a pending message and a dead letter."""
    guard = Guard(url, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")
    guard.run(Operation("s", "k1"), lambda op: outbox.add(op, "refund.lost", {"secret": 1}, id="dead-1"))
    Relay(outbox, to=RecordingBroker(lambda _: True), attempts=1).run_once()
    guard.run(
        Operation("s", "k2"), lambda op: outbox.add(op, "refund.created", {"secret": 2}, subject="r1", id="new-1")
    )
    yield outbox
    guard.close()


def test_stats_show_each_source(outbox: Outbox, url: str) -> None:
    data = oncemore("outbox", "stats", "--json", "--store", url).json
    assert data.keys() == {"shop"}
    assert {name: data["shop"][name] for name in ("pending", "dead", "sent")} == {"pending": 1, "dead": 1, "sent": 0}
    assert "shop" in oncemore("outbox", "stats", "--store", url).out
    assert oncemore("outbox", "stats", "--source", "other", "--json", "--store", url).json["other"]["pending"] == 0


def test_list_and_dead_show_messages_without_their_data(outbox: Outbox, url: str) -> None:
    (message,) = oncemore("outbox", "list", "--json", "--store", url).json
    assert (message["id"], message["subject"], message["correlationid"]) == ("new-1", "r1", "k2")
    (letter,) = oncemore("outbox", "dead", "--json", "--store", url).json
    assert (letter["id"], letter["error"]) == ("dead-1", "ValueError: refund.lost is refused")
    assert "secret" not in str((message, letter))
    assert oncemore("outbox", "list", "--type", "other.*", "--json", "--store", url).json == []
    assert "new-1" in oncemore("outbox", "list", "--store", url).out


def test_requeue_sends_a_dead_letter_again(outbox: Outbox, url: str) -> None:
    assert oncemore("outbox", "requeue", "dead-1", "--json", "--store", url).json == {"requeued": ["dead-1"]}
    assert outbox.dead() == []
    refused = oncemore("outbox", "requeue", "dead-1", "--source", "shop", "--store", url)
    assert (refused.code, "no dead letter 'dead-1'" in refused.err) == (1, True)


def test_purge_deletes_dead_letters_of_an_age(outbox: Outbox, url: str) -> None:
    assert oncemore("outbox", "purge", "--dead", "--store", url, said="n\n").code == 1
    assert oncemore("outbox", "purge", "--dead", "--yes", "--json", "--store", url).json == {"removed": 0}
    assert oncemore("outbox", "purge", "--dead", "--older-than", "0s", "-y", "--json", "--store", url).json == {
        "removed": 1
    }
    assert oncemore("outbox", "purge", "--yes", "--json", "--store", url).json == {"removed": 0}
    assert outbox.stats().pending == 1


def test_two_sources_must_be_told_apart(outbox: Outbox, url: str) -> None:
    other = Outbox(outbox.guard, source="other")
    outbox.guard.run(Operation("s", "k3"), lambda op: other.add(op, "a"))
    wrong = oncemore("outbox", "list", "--store", url)
    assert (wrong.code, "'other', 'shop'" in wrong.err) == (2, True)


def test_ledger_without_outbox_is_told_by_name(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    Guard(url).stats()
    missing = oncemore("outbox", "stats", "--store", url)
    assert (missing.code, "oncemore init" in missing.err) == (2, True)
    assert oncemore("init", "--store", url, folder=tmp_path).code == 0
    assert oncemore("outbox", "stats", "--json", "--store", url).json == {}


def test_relay_command_sends_what_is_due(outbox: Outbox, url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from oncemore import Guard, Outbox\nfrom oncemore.messages import Relay\n"
        "from tests.messages.recording import FileBroker\n"
        f"relay = Relay(Outbox(Guard({url!r}), source='shop'), to=FileBroker('stored'))\n"
    )
    assert oncemore("relay", "shop:relay", "--once", "--json", folder=tmp_path).json == {"sent": 1}
    assert [id for id, *_ in stored_in(tmp_path / "stored")] == ["new-1"]
    wrong = oncemore("relay", "shop:Outbox", "--once", folder=tmp_path)
    assert (wrong.code, "not a relay" in wrong.err) == (2, True)
