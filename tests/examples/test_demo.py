"""`make demo`, run in a process of its own."""

from __future__ import annotations

import html
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest

from ..support.processes import without_coverage

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.py"
PICTURE = ROOT / "docs" / "demo.svg"  # of the demo without a broker, on the README's first screen
STORIES = 7

pytestmark = pytest.mark.chaos


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in without_coverage().items() if name not in ("ONCE", "PAYMENTS_GUARD", "NO_COLOR")
    }
    return {**kept, **more}


def play(**more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(ONCE="1", **more), timeout=110)


@contextmanager
def port_8000_taken() -> Iterator[None]:
    """Have the port taken, by this test if it is free."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        except OSError:
            pass
        yield


def children_of(demo: int) -> set[int]:
    """Return the processes that *demo* has started, and their children."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found, new = set(), {demo}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def folders(pids: set[int]) -> set[Path]:
    return {Path(os.readlink(f"/proc/{pid}/cwd")) for pid in pids} - {Path.cwd()}


def test_demo_effects_happen_once_with_oncemore_and_repeatedly_without() -> None:
    """If its port is taken, the demo says so and uses another."""
    began = time.monotonic()
    with port_8000_taken():
        played = play()
    assert played.returncode == 0, played.stdout + played.stderr
    assert time.monotonic() - began < 60
    assert "Port 8000 is taken" in played.stdout
    rows = re.findall(r"^(\d)\. .*?  +(\d+)  +(\d+)  +(\d+)  ✓ once$", played.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, STORIES + 1))
    assert all(int(without) > 1 and int(having) == 1 for _, _, without, having in rows)
    assert len(re.findall(r"^\d+ +(refund|settlement) +rf_\w+ ", played.stdout, re.MULTILINE)) == 2 * STORIES
    assert "together 0.00" in played.stdout
    titles = re.findall(r"^(\d\. .*?)  +\d+  +\d+  +\d+  ✓ once$", played.stdout, re.MULTILINE)
    drawn = html.unescape(PICTURE.read_text()).replace("\N{NO-BREAK SPACE}", " ")
    assert [title for title in titles[:6] if title not in drawn] == []
    assert "\x1b" not in played.stdout
    assert max(map(len, played.stdout.splitlines())) <= 100


def test_unknown_story_is_refused() -> None:
    ran = subprocess.run([sys.executable, str(DEMO), "8"], capture_output=True, text=True, env=environment())
    assert ran.returncode == 1
    assert ran.stderr == "There is no story 8: name one by its number, from 1 to 7\n"


def test_story_that_needs_a_broker_is_left_out_without_one() -> None:
    script = "import sys, pathlib; from examples import demo; from examples.payments.processes import Nats; "
    script += "Nats.program = pathlib.Path('/nowhere'); sys.argv[1:] = ['3', '7']; sys.exit(demo.main())"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(ONCE="1"), cwd=ROOT, timeout=110
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Story 7, kill -9 of the message relay, is left out: it needs a message broker" in ran.stdout
    assert ran.stdout.count("✓ once") == 1


def test_demo_without_guard_exits_with_one() -> None:
    """The guard is off in both services, so effects are repeated."""
    played = play(PAYMENTS_GUARD="off")
    assert played.returncode == 1
    assert played.stdout.count("✗ broken") == STORIES
    assert "A guarantee is broken" in played.stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_printed_curl_commands_work_until_demo_is_stopped(how: signal.Signals) -> None:
    command = [sys.executable, str(DEMO), "1"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    assert demo.stdout is not None
    lines = []
    for line in demo.stdout:  # the stream stays open while the demo runs
        lines.append(line)
        if line.startswith("Ctrl-C"):
            break
    started = children_of(demo.pid)
    curls = [line.strip() for line in lines if line.startswith("  curl")]
    assert len(curls) == 4, "".join(lines)
    try:
        answers = [run(line) for line in (curls[0], *curls)]
    finally:
        left = folders(started)
        demo.send_signal(how)
        code = demo.wait(20)
        demo.stdout.close()
    assert "201 Created" in answers[0]
    assert "idempotency-status: stored" in answers[0]
    assert "idempotency-status: replayed" in answers[1]
    assert '"entries"' in answers[2]
    assert "idempotent_replayed_total" in answers[3]
    assert '"x-idempotency"' in answers[4]
    assert code == (-how if how == signal.SIGKILL else 0)
    ends = time.monotonic() + 15
    while alive(started) or any(folder.exists() for folder in left):
        assert time.monotonic() < ends, "something was left behind"
        time.sleep(0.05)
    assert started
    assert left


def run(line: str) -> str:
    """Return the output of the line in a shell."""
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.mark.parametrize("plain", [False, True])
def test_terminal_output_has_colour_unless_no_color_is_set(plain: bool) -> None:
    more = {"TERM": "xterm-256color", "COLUMNS": "", "ONCE": "1", **({"NO_COLOR": "1"} if plain else {})}
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    demo = subprocess.Popen(
        [sys.executable, str(DEMO), "3"],
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment(**more),
        start_new_session=True,
    )
    os.close(its)
    shown = b""
    while demo.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert demo.wait(20) == 0, shown.decode()
    text = shown.decode()
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", text)) is not plain
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert written.count("✓ once") == 1
    assert all(len(part) <= 100 for line in written.split("\n") for part in line.split("\r"))
