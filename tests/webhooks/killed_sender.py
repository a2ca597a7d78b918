"""A sender that kills itself at a chosen point: `killed_sender.py URL POINT`; without a point, it runs until SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from oncemore import Guard, Webhooks
from oncemore._runtime.plan import Plan
from oncemore.webhooks import Sender
from oncemore.webhooks.claims import Claims, MatchingPass
from oncemore.webhooks.endpoints import Endpoints
from oncemore.webhooks.requests import Requests
from oncemore.webhooks.sender import Results


def crash_around(kind: type, name: str, point: str, wanted: str) -> None:
    """Die before or after the method *name*, if that is the *wanted* point."""
    method: Any = getattr(kind, name)

    def reached(when: str) -> None:
        if f"{when} {point}" == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    def plan(self: Any, *args: Any, **options: Any) -> Plan[Any]:
        reached("before")
        result = yield from method(self, *args, **options)
        if result or point != "claim":  # a claim of nothing is none
            reached("after")
        return result

    async def awaited(self: Any, *args: Any, **options: Any) -> Any:
        reached("before")
        result = await method(self, *args, **options)
        reached("after")
        return result

    setattr(kind, name, awaited if point == "request" else plan)


def main(url: str, wanted: str = "") -> None:
    crash_around(MatchingPass, "match_page", "match", wanted)
    crash_around(Claims, "claim", "claim", wanted)
    crash_around(Requests, "attempt", "request", wanted)
    crash_around(Results, "record", "record", wanted)
    crash_around(Results, "_disable_gone", "commit of results", wanted)
    crash_around(Endpoints, "park_slice", "park", wanted)
    sender = Sender(Webhooks(Guard(url), allow=["127.0.0.0/8"], allow_http=True))
    if wanted:
        sender.run_once()
    else:
        sender.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
