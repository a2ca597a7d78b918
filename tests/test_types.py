"""mypy accepts a correct program that uses oncemore, and reports each mistake in an incorrect one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oncemore._contract import policy

SRC = Path(policy.__file__).parents[2]

RIGHT = """
from oncemore import Contract, Guard, Inbox, Op, Policy, Rule, once

guard = Guard("sqlite:///once.db", policy=Policy(ttl="7d", lease=30, wait="500ms"))
kept: float = guard.policy.ttl

@once(guard, key="invoice:{number}", ttl="7d")
def send(number: int) -> str:
    return f"sent-{number}"

sent: str = send(7)

def book(op: Op, event: dict[str, int]) -> int:
    return event["amount"]

Inbox(guard, retention="30d").handle("ev_1", "payments", {"amount": 1}, book)
Contract(Rule("POST /refunds", key="required", ttl="30d", effect="transaction"))
"""
WRONG = """
from oncemore import Contract, Guard, Policy, Rule
from oncemore.web.wsgi import IdempotencyMiddleware; from wsgiref.simple_server import demo_app

Policy(ttl=None)
Policy(on_unknown="explode")
Rule("POST /refunds", efect="lease")
Contract("POST /refunds")
Guard("sqlite:///once.db", policy={"ttl": "7d"})
IdempotencyMiddleware(demo_app, guard=Guard("memory://"), principle=str)
"""


@pytest.mark.longer
def test_mypy_accepts_correct_use_and_reports_mistakes(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(SRC)}, capture_output=True, text=True
    )
    errors = [line.split(":")[:2] for line in ran.stdout.splitlines() if ": error:" in line]
    assert errors == [["wrong.py", str(line)] for line in range(5, 11)], ran.stdout + ran.stderr
