"""`oncemore init`, `stats` and `purge` on every store: the command in a process of its own, on real servers."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from oncemore._contract.policy import Policy
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation, Outcome
from oncemore._runtime.plan import run
from tests.tools.command import oncemore
from tests.tools.conftest import claim


def test_stats_count_by_state(filled: Guard, store_url: str) -> None:
    counts = oncemore("stats", "--json", "--store", store_url).json
    assert (counts["released"], counts["held"], counts["running"], counts["lapsed"]) == (1, 1, 2, 1)
    assert counts["settled"] - counts["expired"] == 1
    assert "their outcome is unknown" in oncemore("stats", ONCEMORE_STORE=store_url).out


def test_purge_removes_only_expired_records(filled: Guard, store_url: str) -> None:
    brief = Policy(ttl=0.001)
    for number in range(20):
        filled.run(Operation("old", f"many-{number}"), lambda op: "gone", policy=brief)
    kept = {"settled-1", "released-1", "held-1", "running-1", "lapsed-1"}
    asked = oncemore("purge", "--store", store_url, said="n\n")
    assert asked.code == 1
    assert re.search(r"Remove \d+ expired records", asked.err)
    assert filled.stats().expired > 0
    ran = oncemore("purge", "--yes", "--batch", 7, "--json", "--store", store_url)
    assert ran.code == 0, ran.err
    assert 0 < ran.json["removed"] <= 21
    assert {record.key for record in filled.list(limit=1000).records} == kept
    assert filled.stats().expired == 0
    assert oncemore("purge", "--store", store_url).out == "Removed 0 expired records.\n"


def test_init_twice_keeps_the_ledger_and_the_contract(store_url: str, tmp_path: Path) -> None:
    first = oncemore("init", "--store", store_url, folder=tmp_path)
    assert first.code == 0, first.err
    assert (tmp_path / "oncemore.toml").exists()
    guard = Guard(store_url + "&create=false" if "schema=" in store_url else store_url)
    guard.run(Operation("s", "k"), lambda op: "kept")
    written = (tmp_path / "oncemore.toml").read_text()
    again = oncemore("init", "--store", store_url, "--json", folder=tmp_path)
    assert again.json["written"] is False
    assert (tmp_path / "oncemore.toml").read_text() == written
    assert guard.find("s", "k") is not None
    guard.close()


def test_print_schema_creates_nothing(store_url: str, tmp_path: Path) -> None:
    printed = oncemore("init", "--print-schema", "--store", store_url, folder=tmp_path)
    assert printed.code == 0
    assert "CREATE TABLE" in printed.out or "ACL SETUSER" in printed.out
    assert list(tmp_path.iterdir()) == []


def test_missing_ledger_is_not_created_by_other_commands(store_url: str, tmp_path: Path) -> None:
    if store_url.startswith("redis"):  # Redis has no tables to create
        assert oncemore("stats", "--store", store_url).code == 0
        return
    for words in (["stats"], ["keys", "list"], ["purge", "--yes"]):
        ran = oncemore(*words, "--store", store_url)
        assert ran.code == 2
        assert "oncemore init --store" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_file_without_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    ran = oncemore("stats", "--store", f"sqlite:///{tmp_path}/empty.db")
    assert ran.code == 2
    assert "oncemore init --store" in ran.err
    (tmp_path / "text.db").write_text("no database " * 1000)
    ran = oncemore("stats", "--store", f"sqlite:///{tmp_path}/text.db")
    assert ran.code in (2, 3)
    assert ran.err.startswith("oncemore: ")


def test_memory_store_is_accepted() -> None:
    assert oncemore("stats", "--json", "--store", "memory://").json["settled"] == 0


def test_purge_on_a_terminal_asks_and_shows_progress(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/once.db"
    guard = Guard(url)
    for number in range(30):
        run(guard.store.settle(claim(guard, f"k{number}"), Outcome(), retention=0.001))
    guard.close()
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "oncemore.tools.cli", "purge", "--batch", "3", "--store", url]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env={**os.environ, "TERM": "xterm"})
    os.close(other)
    shown = read_until(terminal, "[y/N]")
    os.write(terminal, b"y\n")
    shown += read_until(terminal, "Removed")
    assert process.wait() == 0
    os.close(terminal)
    assert "━" in shown
    assert "30/30" in shown or "Removed" in shown


def read_until(terminal: int, text: str) -> str:
    """Return the output of the terminal up to *text*."""
    shown, ends = b"", time.monotonic() + 30
    while text.encode() not in shown and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the command has ended
                break
    return shown.decode(errors="replace")
