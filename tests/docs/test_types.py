"""mypy accepts a correct program that uses oncemore, and reports each mistake in an incorrect one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from oncemore._contract import policy

SRC = Path(policy.__file__).parents[2]

RIGHT = """
from oncemore import Contract, Guard, Inbox, Op, Operation, Policy, Retry, Rule, once

guard = Guard("sqlite:///once.db", policy=Policy(ttl="7d", lease=30, wait="500ms"))
kept: float = guard.policy.ttl

@once(guard, key="invoice:{number}", ttl="7d")
def send(number: int) -> str:
    return f"sent-{number}"

sent: str = send(7)

def book(op: Op, event: dict[str, int]) -> int:
    return event["amount"]

receipt: str = guard.run(Operation("s", "k"), lambda op: op.key).value

async def charge(op: Op) -> int:
    return 1

async def charged() -> int:
    return (await guard.arun(Operation("s", "k"), charge)).value

with guard.attempt(Operation("s", "k")) as attempt:
    if attempt.fresh:
        attempt.result = 1

Inbox(guard, retention="30d").handle("ev_1", "payments", {"amount": 1}, book)
Contract(Rule("POST /refunds", key="required", ttl="30d", effect="transaction"))

policy = Retry(deadline="5s", attempt_timeout="500ms", base=0.1)
left: float = policy.deadline
each: float | None = policy.attempt_timeout
Retry.user_facing(deadline="5s", attempts=2)
with guard as opened:
    opened.stats()
"""
WRONG = """
from oncemore import Contract, Guard, Policy, Retry, Rule
from oncemore.web.wsgi import IdempotencyMiddleware; from wsgiref.simple_server import demo_app

Policy(ttl=None)
Policy(on_unknown="explode")
Rule("POST /refunds", efect="lease")
Contract("POST /refunds")
Guard("sqlite:///once.db", policy={"ttl": "7d"})
IdempotencyMiddleware(demo_app, guard=Guard("memory://"), principle=str)
Retry(deadline=None)
Retry.user_facing(attemps=3)
"""


def test_mypy_accepts_correct_use_and_reports_mistakes(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(SRC)}, capture_output=True, text=True
    )
    errors = [line.split(":")[:2] for line in ran.stdout.splitlines() if ": error:" in line]
    assert errors == [["wrong.py", str(line)] for line in range(5, 13)], ran.stdout + ran.stderr
