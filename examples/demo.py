"""`make demo`: everyday accidents, live, against the payments example, without oncemore and with it.

Two services run, each with its own provider: one with the guard off, one with the guard on.  Every story runs over HTTP
against both, and the effects are counted at the provider and in the ledger.  The exit code is 0 only if every effect
happened once.  With ONCE=1 the demo ends after the stories; otherwise the service stays up until Ctrl-C.
Numbers on the command line choose stories: `python examples/demo.py 5`, or `make demo STORY=5`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.payments.processes import PaymentSystem
from examples.show.display import Display
from examples.show.stories import STORIES, Played, Story

PORT = 8000
WEBHOOKS = 30.0  # seconds to wait for webhooks; one that was sent to a killed service is sent again
TIMEOUT = "1"  # seconds that the service waits for its provider; short, so that the demo is short


def main() -> int:
    """Run the stories, and return 0 if every effect happened once."""
    return run_until_interrupted(demo, read_numbers(sys.argv[1:], len(STORIES)))


def run_until_interrupted(demo: Callable[[Display, ExitStack, list[int]], int], numbers: list[int]) -> int:
    """Run a demo, and return its exit code.  At Ctrl-C or SIGTERM, stop everything that it has started."""
    display = Display()
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, interrupt)
    try:
        with ExitStack() as stack:
            return demo(display, stack, numbers)
    except KeyboardInterrupt:
        display.say("\nInterrupted; the services and the providers are stopped.", style="dim")
        return 130


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def read_numbers(words: list[str], count: int) -> list[int]:
    """Return the numbers of the stories to run, or all numbers up to *count* if no story is named."""
    known = {str(number): number for number in range(1, count + 1)}
    if unknown := [word for word in words if word not in known]:
        sys.exit(f"There is no story {unknown[0]}: name one by its number, from 1 to {count}")
    return [known[word] for word in dict.fromkeys(words)] or list(known.values())


def demo(display: Display, stack: ExitStack, numbers: list[int]) -> int:
    began = time.monotonic()
    display.say("Ask once more; it happens once.", style="bold")
    display.say("A caller that got no answer asks again. What a payments service then does, over real HTTP:")
    with display.doing("starting two services and their providers"):
        plain, guarded = start_both(display, stack)
    for number in numbers.copy():
        if reason := STORIES[number - 1].left_out():
            display.say(f"Story {number}, {STORIES[number - 1].title}, is left out: {reason}", style="yellow")
            numbers.remove(number)
    played = [play(display, number, STORIES[number - 1], plain, guarded) for number in numbers]
    plain.stop()
    display.table(played)
    stories = {refund: number for number, _, _, ending in played for refund in ending.refunds}
    with display.doing("waiting for the provider's last webhooks"):
        booked = is_booked_once(guarded, stories, numbers)
    display.ledger(guarded.service.get("/ledger"), stories)
    holds = booked and all(ending.holds for _, _, _, ending in played)
    seconds = time.monotonic() - began
    broken = "A guarantee is broken: " + ("see ✗ above" if booked else "the ledger does not have each refund once")
    verdict = "Every effect happened once" if holds else broken
    display.say(
        f"\n{verdict}; {len(played)} {'story' if len(played) == 1 else 'stories'} in {seconds:.0f} s.",
        style="bold green" if holds else "bold red",
    )
    if not holds:
        return 1
    if stays_up():
        display.curls(guarded.service.url, guarded.captured("yours"))
        wait_for_interrupt(display)
    return 0


def stays_up() -> bool:
    """Whether the service stays up after the stories: it does so unless ONCE is set."""
    return os.environ.get("ONCE", "0") in ("", "0")


def wait_for_interrupt(display: Display) -> None:
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    display.say("\nEnded; all processes are stopped.", style="dim")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Servers set this, too, so that the closed connections of a former server do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def start_both(display: Display, stack: ExitStack) -> tuple[PaymentSystem, PaymentSystem]:
    """Start the service with its guard off, and with its guard on; PAYMENTS_GUARD=off lets the demo fail."""
    on = os.environ.get("PAYMENTS_GUARD", "on")
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(start, stack, 0, "off")
        guarded = pool.submit(start, stack, PORT, on) if is_free(PORT) else None
    if guarded is None or guarded.exception() is not None:  # it raises if the port was taken a moment ago
        display.say(f"Port {PORT} is taken, so the service has another one.", style="yellow")
        return plain.result(), start(stack, 0, on)
    return plain.result(), guarded.result()


def start(stack: ExitStack, port: int, guard: str) -> PaymentSystem:
    system = PaymentSystem(port=port, PAYMENTS_GUARD=guard, PAYMENTS_PROVIDER_TIMEOUT=TIMEOUT)
    stack.callback(system.stop)
    return system.start()


def is_booked_once(system: PaymentSystem, stories: dict[str, int], numbers: list[int]) -> bool:
    """Wait for the webhooks, and return whether each story's refund is booked once and confirmed once."""

    def booked() -> list[tuple[int, str]]:
        entries = system.service.get("/ledger")["entries"]
        return [(stories[entry["reference"]], entry["kind"]) for entry in entries if entry["reference"] in stories]

    expected = sorted((number, kind) for number in numbers for kind in ("refund", "settlement"))
    ends = time.monotonic() + WEBHOOKS
    while len(booked()) < len(expected) and time.monotonic() < ends:
        time.sleep(0.1)
    return sorted(booked()) == expected


def play(display: Display, number: int, story: Story, plain: PaymentSystem, guarded: PaymentSystem) -> Played:
    """Run the story without the guard and with it, and show both endings."""
    display.story(number, story)
    with display.doing("without oncemore"):
        without = story.play(plain, f"story-{number}")
    display.ending("without oncemore", story, without, judged=False)
    with display.doing("with oncemore"):
        ended = story.play(guarded, f"story-{number}")
    display.ending("with oncemore", story, ended, judged=True)
    sys.stdout.flush()
    return Played(number, story, without, ended)


if __name__ == "__main__":
    sys.exit(main())
