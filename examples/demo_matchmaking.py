"""`make demo-matchmaking`: accidents of a dating app, live, against the matchmaking example.

The service runs in a process of its own, which some stories kill; a receiver of its webhooks runs here.  The exit code is 0
only if every effect happened once.  With ONCE=1 the demo ends after the stories; otherwise the service stays up until Ctrl-C.
Numbers on the command line choose stories: `python examples/demo_matchmaking.py 3`, or `make demo-matchmaking STORY=3`.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.demo import PORT, is_free, read_numbers, run_until_interrupted, stays_up, wait_for_interrupt
from examples.matchmaking.processes import Matchmaking, WebhookReceiver
from examples.show.display import Display
from examples.show.matchmaking import STORIES, MatchmakingEnding


def main() -> int:
    """Run the stories, and return 0 if every effect happened once."""
    return run_until_interrupted(demo, read_numbers(sys.argv[1:], len(STORIES)))


def demo(display: Display, stack: ExitStack, numbers: list[int]) -> int:
    began = time.monotonic()
    display.say("Ask once more; it happens once.", style="bold")
    display.say("A phone that got no answer asks again. What a matchmaking service then does, over real HTTP:")
    receiver = stack.enter_context(WebhookReceiver())
    receiver.up()
    with display.doing("starting the service"):
        service = Matchmaking(PORT if is_free(PORT) else 0, MATCHMAKING_WEBHOOK_URL=receiver.url)
        stack.enter_context(service)
    endings = [(number, play(display, service, receiver, number)) for number in numbers]
    rows = [
        (f"{number}. {STORIES[number - 1].title}", ending.requests, ending.expected, ending.effects, ending.holds)
        for number, ending in endings
    ]
    display.verdicts(("story", "requests", "effects wanted", "effects found"), rows)
    holds = all(ending.holds for _, ending in endings)
    verdict = "Every effect happened once" if holds else "A guarantee is broken: see ✗ above"
    display.say(
        f"\n{verdict}; {len(endings)} {'story' if len(endings) == 1 else 'stories'} in {time.monotonic() - began:.0f} s.",
        style="bold green" if holds else "bold red",
    )
    if not holds:
        return 1
    if stays_up():
        display.say(f"\nThe service is up at {service.url}, with its test hooks.  Try:", style="bold")
        display.say(f"  curl -s {service.url}/_test/effects")
        display.say(f"  curl -s {service.url}/metrics")
        display.say(
            "examples/matchmaking/README.md has more.  Ctrl-C ends the demo and removes its files.", style="dim"
        )
        wait_for_interrupt(display)
    return 0


def play(display: Display, service: Matchmaking, receiver: WebhookReceiver, number: int) -> MatchmakingEnding:
    """Run the story, and show its end."""
    story = STORIES[number - 1]
    with display.doing(story.title):
        ending = story.play(service, receiver, f"story{number}")
    many = f"{ending.effects} {story.effect}{'' if ending.effects == 1 else 's'}"
    display.say(f"\n{number}. {story.title}", style="bold")
    display.say(
        f"   {'✓' if ending.holds else '✗'} {many:12} {ending.how}", style="green" if ending.holds else "bold red"
    )
    sys.stdout.flush()
    return ending


if __name__ == "__main__":
    sys.exit(main())
