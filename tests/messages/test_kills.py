"""A producer or a relay is killed at each step: nothing is lost, ids are stable, and subjects stay in order."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from oncemore import Guard, Op, Operation, Outbox, Policy
from oncemore.messages import Relay
from tests.messages.recording import FileBroker, stored_in
from tests.support.processes import Program

SCRIPT = str(Path(__file__).with_name("killed.py"))

# Killed at: whether the messages are there afterwards.
PRODUCER = {"after claim": False, "after add": False, "before commit": False, "after commit": True}
# Killed at: whether messages were stored twice at the broker, because it had stored them before the relay could say so.
RELAY = {"after claim": False, "before publish": False, "after publish": True, "before end": True, "after end": False}

modes = pytest.mark.parametrize(
    "mode", ["sqlite", *(pytest.param(mode, marks=pytest.mark.server) for mode in ("hold", "lease"))]
)


@pytest.fixture
def url(request: pytest.FixtureRequest, mode: str, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}" if mode == "sqlite" else str(request.getfixturevalue("own_schema"))


def run_killed(*args: str) -> None:
    with Program([sys.executable, SCRIPT, *args]) as program:
        assert program.wait(60) == -signal.SIGKILL


@modes
@pytest.mark.parametrize("point", PRODUCER)
def test_killed_producer_leaves_all_messages_or_none(url: str, mode: str, point: str, tmp_path: Path) -> None:
    run_killed("producer", url, "-", point)
    guard = Guard(url, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")
    before = [message.id for message in outbox.list()]
    assert len(before) == (10 if PRODUCER[point] else 0)

    def perform(op: Op) -> None:
        for n in range(10):
            outbox.add(op, "a", n, subject="s" if n % 2 else None)

    guard.run(Operation("test", "k1"), perform)  # the client asks again
    after = [message.id for message in outbox.list()]
    assert len(after) == len(set(after)) == 10
    if before:
        assert after == before
    file = tmp_path / "stored"
    relay_mode = None if mode == "sqlite" else mode
    assert Relay(outbox, to=FileBroker(file), mode=relay_mode).run_once() == 10  # type: ignore[arg-type]
    assert sorted(data for _, _, _, data in stored_in(file)) == list(range(10))
    guard.close()


@modes
@pytest.mark.parametrize("point", RELAY)
def test_killed_relay_loses_nothing_and_keeps_order(url: str, mode: str, point: str, tmp_path: Path) -> None:
    guard = Guard(url, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")

    def perform(op: Op) -> list[str]:
        return [outbox.add(op, "a", n, subject="s" if n % 2 else None) for n in range(10)]

    ids = guard.run(Operation("test", "k1"), perform).value
    file, relay_mode = tmp_path / "stored", None if mode == "sqlite" else mode
    run_killed("relay", url, str(file), point, *([] if relay_mode is None else [relay_mode]))
    relay = Relay(outbox, to=FileBroker(file), mode=relay_mode)  # type: ignore[arg-type]
    ends = time.monotonic() + 60
    while outbox.stats().pending:  # until the dead one's lease has ended
        assert time.monotonic() < ends
        relay.run_once()
        time.sleep(0.05)
    stored = stored_in(file)
    assert {id for id, *_ in stored} == set(ids)
    assert (len(stored) > 10) == RELAY[point]
    firsts = list(dict.fromkeys(id for id, _, subject, _ in stored if subject == "s"))
    assert firsts == [id for n, id in enumerate(ids) if n % 2]
    guard.close()


@modes
def test_relays_killed_at_random_lose_nothing(url: str, mode: str, tmp_path: Path) -> None:
    """Five relays are killed one after the other while a producer adds messages; a sixth relay sends the rest."""
    guard = Guard(url, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")
    file, relay_mode = tmp_path / "stored", None if mode == "sqlite" else mode
    count = 200

    def produce() -> None:
        for n in range(count):
            guard.run(Operation("test", f"k{n}"), lambda op, n=n: outbox.add(op, "a", n, subject=f"s{n % 5}"))  # type: ignore[misc]

    producer = threading.Thread(target=produce)
    producer.start()
    points = ("after publish", "after claim", "before end", "after end", "before publish")
    for point in points:
        while not outbox.stats().pending and producer.is_alive():
            time.sleep(0.01)
        with Program(
            [sys.executable, SCRIPT, "relay", url, str(file), point, *([relay_mode] if relay_mode else [])]
        ) as one:
            one.wait(60)
    producer.join(60)
    relay = Relay(outbox, to=FileBroker(file), mode=relay_mode)  # type: ignore[arg-type]
    ends = time.monotonic() + 60
    while outbox.stats().pending:
        assert time.monotonic() < ends
        relay.run_once()
        time.sleep(0.05)
    stored = stored_in(file)
    assert {data for _, _, _, data in stored} == set(range(count))
    for subject in range(5):
        firsts = list(dict.fromkeys(data for _, _, at, data in stored if at == f"s{subject}"))
        assert firsts == list(range(subject, count, 5))
    guard.close()


@modes
def test_sigterm_lets_a_relay_finish_and_end(url: str, mode: str, tmp_path: Path) -> None:
    guard = Guard(url, policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")
    file = tmp_path / "stored"
    script = tmp_path / "relaying.py"
    script.write_text(
        "import sys\nfrom oncemore import Guard, Outbox\nfrom oncemore.messages import Relay\n"
        "from tests.messages.recording import FileBroker\n"
        "relay = Relay(Outbox(Guard(sys.argv[1]), source='shop'), to=FileBroker(sys.argv[2]), mode=eval(sys.argv[3]))\n"
        "relay.run()\nprint('ended')\n"
    )
    relay_mode = None if mode == "sqlite" else mode
    with Program([sys.executable, str(script), url, str(file), repr(relay_mode)]) as program:
        guard.run(Operation("test", "k"), lambda op: outbox.add(op, "a", 1))
        ends = time.monotonic() + 60
        while not stored_in(file):
            assert time.monotonic() < ends
            time.sleep(0.02)
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 0
    assert outbox.stats().pending == 0
    guard.close()


def test_message_that_kills_its_relays_is_a_dead_letter_alone(tmp_path: Path) -> None:
    """An attempt under a lease counts even if the relay dies; the rest of the batch is sent."""
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}", policy=Policy(effect="transaction"))
    outbox = Outbox(guard, source="shop")
    guard.run(Operation("test", "k"), lambda op: [outbox.add(op, "a", n) for n in range(5)])
    file, script = tmp_path / "stored", tmp_path / "relaying.py"
    script.write_text(
        "import os, sys\nfrom oncemore import Guard, Outbox\nfrom oncemore.messages import Relay\n"
        "from tests.messages.recording import FileBroker\n"
        "class Poisoned(FileBroker):\n"
        "    async def publish(self, envelopes):\n"
        "        if any(envelope.data == 3 for envelope in envelopes):\n"
        "            os._exit(9)\n"
        "        return await super().publish(envelopes)\n"
        "outbox = Outbox(Guard(sys.argv[1]), source='shop')\n"
        "Relay(outbox, to=Poisoned(sys.argv[2]), attempts=2, lease='100ms').run_once()\n"
    )
    ends = time.monotonic() + 60
    while outbox.stats().pending:
        assert time.monotonic() < ends
        with Program([sys.executable, str(script), guard.store.url, str(file)]) as program:
            program.wait(60)
        time.sleep(0.1)
    [letter] = outbox.dead()
    assert (letter.envelope.data, "relays have died" in letter.error) == (3, True)
    assert sorted(data for *_, data in stored_in(file)) == [0, 1, 2, 4]
    guard.close()
