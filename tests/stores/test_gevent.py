"""gevent: leases are renewed if it patches first; if it patches too late, the first call says so, and nothing runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
url, when = sys.argv[1:]
if when == "first":
    from gevent import monkey
    monkey.patch_all()
from oncemore import Guard, Operation, Policy
guard = Guard(url, policy=Policy(lease=0.6))
if when == "late":
    from gevent import monkey
    monkey.patch_all()
import gevent, time

def perform(op):
    print("performed", flush=True)
    time.sleep(2)

def work():
    try:
        print(guard.run(Operation("s", "k"), perform).how, flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

gevent.spawn(work).join()
guard.close()
"""


@pytest.fixture(
    params=["memory", "sqlite", *(pytest.param(kind, marks=pytest.mark.server) for kind in ("postgres", "redis"))]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return f"{request.getfixturevalue('postgres_url')}?schema={request.getfixturevalue('postgres_schema')}"
    if request.param == "redis":
        return f"{request.getfixturevalue('valkey_url')}?prefix={request.getfixturevalue('redis_prefix')}"
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/once.db"


def outcome(url: str, when: str) -> str:
    pytest.importorskip("gevent")
    program = [sys.executable, "-c", PROGRAM, url, when]
    return subprocess.run(program, capture_output=True, text=True, timeout=120).stdout


def test_lease_is_renewed_if_gevent_patches_first(url: str) -> None:
    """The performer takes longer than the lease; without renewal, its outcome would be refused."""
    assert outcome(url, "first").splitlines() == ["performed", "stored"]


def test_first_claim_is_refused_if_gevent_patches_late(url: str) -> None:
    told = outcome(url, "late")
    assert told.startswith("ConfigurationError")
    assert "monkey.patch_all()" in told
    assert "performed" not in told
