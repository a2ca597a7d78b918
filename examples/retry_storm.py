"""Simulates a server that comes back while all its clients retry: `python examples/retry_storm.py`

2 000 clients get an error in the same instant.  The server is down for one second; then it can answer 60 requests in each
tenth of a second, and refuses the rest.  Each client waits for the delays of its policy (`Retry.delays()`) and retries.
The picture shows the requests in each tenth of a second: without jitter they arrive together, and most are refused.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter

from oncemore import Retry

CLIENTS = 2000
DOWN = 1.0  # seconds
SLOT = 0.1  # seconds
CAPACITY = 60  # requests in a slot
SHOWN = 40  # slots in the picture
WIDTH = 70

POLICIES = {
    "no jitter": Retry(attempts=6, jitter="none"),
    "equal jitter": Retry(attempts=6, jitter="equal"),
    "full jitter": Retry(attempts=6, jitter="full"),
}


def storm(policy: Retry, generator: random.Random) -> tuple[Counter[int], Counter[int]]:
    """Return the requests that the server gets, and those that it answers, by slot."""
    asked: Counter[int] = Counter()
    answered: Counter[int] = Counter()
    delays = [policy.delays(generator.random) for _ in range(CLIENTS)]
    waiting = [(0.0, client) for client in range(CLIENTS)]
    while waiting:
        now, client = heapq.heappop(waiting)
        slot = int(now / SLOT)
        asked[slot] += 1
        if now >= DOWN and answered[slot] < CAPACITY:
            answered[slot] += 1
        elif (delay := next(delays[client], None)) is not None:
            heapq.heappush(waiting, (now + delay, client))
    return asked, answered


def draw(name: str, asked: Counter[int], answered: Counter[int]) -> None:
    """Print a bar for each slot: `#` for answered requests, `.` for refused ones."""
    print(f"\n{name}: requests in each {SLOT * 1000:.0f} ms after the failure (# answered, . refused)\n")
    for slot in range(1, SHOWN):
        scale = WIDTH / CLIENTS
        good, total = round(answered[slot] * scale + 0.49), round(asked[slot] * scale + 0.49)
        print(f"{slot * SLOT:5.1f} s {asked[slot]:6d} {'#' * good}{'.' * (total - good)}")


def main() -> None:
    """Print a picture for each policy, and a table of all.  The busiest slot is counted after the server is back."""
    results = {name: storm(policy, random.Random(1)) for name, policy in POLICIES.items()}
    for name, (asked, answered) in results.items():
        draw(name, asked, answered)
    print(f"\n{'policy':<16}{'answered':>10}{'gave up':>10}{'requests':>10}{'busiest slot':>14}{'last answer':>14}")
    for name, (asked, answered) in results.items():
        busiest = max(count for slot, count in asked.items() if slot * SLOT >= DOWN)
        last = (max(answered) + 1) * SLOT
        done = answered.total()
        print(f"{name:<16}{done:>10}{CLIENTS - done:>10}{asked.total():>10}{busiest:>14}{last:>12.1f} s")


if __name__ == "__main__":
    main()
