"""`make demo`: the everyday accidents, live, against the payments example; without oncemore, and with it.

Two services run, each with a provider of its own: in one the guard is off, in the other it is on.  Every story is played
over HTTP against both, and the effects are counted where they happen: at the provider, and in the ledger.  The exit code is 0
only if every effect happened once.  With ONCE=1 the demo ends after the stories; else the service stays up until Ctrl-C.
Numbers on the command line are those of the stories to play: `python examples/demo.py 5`, or `make demo STORY=5`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.payments.processes import World
from examples.show.screen import Screen
from examples.show.stories import STORIES, Played, Story

PORT = 8000
SETTLING = 10.0  # seconds; a webhook that met a dead service comes again
TIMEOUT = "1"  # seconds that the service waits for its provider; short, for nobody wants to watch a clock


def main() -> int:
    """Play the stories; 0 if every effect happened once."""
    screen = Screen()
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, interrupted)
    try:
        with ExitStack() as stack:
            return demo(screen, stack, asked(sys.argv[1:]))
    except KeyboardInterrupt:
        screen.say("\nInterrupted; the services and the providers are gone.", style="dim")
        return 130


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def asked(words: list[str]) -> list[int]:
    """The numbers of the stories to play; all of them, if none are named."""
    known = {str(number): number for number in range(1, len(STORIES) + 1)}
    if unknown := [word for word in words if word not in known]:
        sys.exit(f"There is no story {unknown[0]}: name one by its number, from 1 to {len(STORIES)}")
    return [known[word] for word in dict.fromkeys(words)] or list(known.values())


def demo(screen: Screen, stack: ExitStack, numbers: list[int]) -> int:
    began = time.monotonic()
    screen.say("Ask once more; it happens once.", style="bold")
    screen.say("A caller who got no answer asks again. What happens then, in a payments service, over real HTTP:")
    with screen.doing("starting two services and their providers"):
        plain, guarded = both(screen, stack)
    played = [play(screen, number, STORIES[number - 1], plain, guarded) for number in numbers]
    plain.stop()
    screen.table(played)
    stories = {refund: number for number, _, _, ending in played for refund in ending.refunds}
    with screen.doing("waiting for the provider's last webhooks"):
        booked = ledger_of(guarded, stories, numbers)
    screen.ledger(guarded.service.get("/ledger"), stories)
    holds = booked and all(ending.holds for _, _, _, ending in played)
    seconds = time.monotonic() - began
    broken = "A guarantee is broken: " + ("see ✗ above" if booked else "the ledger does not have each refund once")
    verdict = "Every effect happened once" if holds else broken
    screen.say(
        f"\n{verdict}; {len(played)} {'story' if len(played) == 1 else 'stories'} in {seconds:.0f} s.",
        style="bold green" if holds else "bold red",
    )
    if not holds:
        return 1
    if os.environ.get("ONCE", "0") in ("", "0"):
        screen.curls(guarded.service.url, guarded.captured("yours"))
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        screen.say("\nEnded; the service and the provider are gone.", style="dim")
    return 0


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: one that has just ended is no matter
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def both(screen: Screen, stack: ExitStack) -> tuple[World, World]:
    """The service with its guard off, and on, unless somebody wants to see the demo fail."""
    on = os.environ.get("PAYMENTS_GUARD", "on")
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(started, stack, 0, "off")
        guarded = pool.submit(started, stack, PORT, on) if is_free(PORT) else None
    if guarded is None or guarded.exception() is not None:  # in the second case, it was taken only just now
        screen.say(f"Port {PORT} is taken, so the service has another one.", style="yellow")
        return plain.result(), started(stack, 0, on)
    return plain.result(), guarded.result()


def started(stack: ExitStack, port: int, guard: str) -> World:
    world = World(port=port, PAYMENTS_GUARD=guard, PAYMENTS_PROVIDER_TIMEOUT=TIMEOUT)
    stack.callback(world.stop)
    return world.start()


def ledger_of(world: World, stories: dict[str, int], numbers: list[int]) -> bool:
    """Whether each story's refund was booked once, and confirmed once, when all webhooks have arrived."""

    def booked() -> list[tuple[int, str]]:
        entries = world.service.get("/ledger")["entries"]
        return [(stories[entry["reference"]], entry["kind"]) for entry in entries if entry["reference"] in stories]

    expected = sorted((number, kind) for number in numbers for kind in ("refund", "settlement"))
    ends = time.monotonic() + SETTLING
    while len(booked()) < len(expected) and time.monotonic() < ends:
        time.sleep(0.1)
    return sorted(booked()) == expected


def play(screen: Screen, number: int, story: Story, plain: World, guarded: World) -> Played:
    """The story and how it ended, without the guard and with it."""
    screen.story(number, story)
    with screen.doing("without oncemore"):
        without = story.play(plain, f"story-{number}")
    screen.ending("without oncemore", story, without, judged=False)
    with screen.doing("with oncemore"):
        ended = story.play(guarded, f"story-{number}")
    screen.ending("with oncemore", story, ended, judged=True)
    sys.stdout.flush()
    return Played(number, story, without, ended)


if __name__ == "__main__":
    sys.exit(main())
