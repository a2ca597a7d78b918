"""What the provider tells its customers: signed events, sent until they are acknowledged, and again when it feels like it."""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from oncemore.webhooks.signature import Signing

PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)  # before each attempt; a real provider goes on for a day


class Webhooks:
    """Events, each with an id that stays the same however often it is delivered."""

    def __init__(self, url: str, secret: str) -> None:
        self.url = url
        self.signing = Signing(secret)
        self.events: dict[str, bytes] = {}
        self.statuses: dict[str, list[int]] = {}
        self.answers: dict[str, list[Any]] = {}

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event in the background, until it is acknowledged."""
        event = f"ev_{secrets.token_hex(6)}"
        self.statuses[event], self.answers[event] = [], []
        self.events[event] = json.dumps({"type": kind, "data": data}).encode()
        if self.url:
            threading.Thread(target=self._deliver, args=(event,), daemon=True).start()

    def replay(self, event: str, times: int) -> list[int]:
        """Deliver an event again, *times* at the same moment; how each was answered."""
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(self._send(event))) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def told(self) -> list[dict[str, Any]]:
        """Every event, with the statuses of its deliveries, and what those that were taken were answered."""
        events = list(self.events.items())
        return [
            {"id": id, "deliveries": self.statuses[id], "answers": self.answers[id], **json.loads(body)}
            for id, body in events
        ]

    def _deliver(self, event: str) -> None:
        for pause in PAUSES:
            time.sleep(pause)
            if 200 <= self._send(event) < 300:
                return

    def _send(self, event: str) -> int:
        """The status of one delivery; 0 where nobody answered."""
        body = self.events[event]
        headers = {"content-type": "application/json", **self.signing.sign(body, id=event)}
        try:
            with urlopen(Request(self.url, body, headers), timeout=10) as answer:
                status: int = answer.status
                self.answers[event].append(json.loads(answer.read()))
        except URLError as error:
            status = getattr(error, "code", 0)
        except OSError:
            status = 0
        self.statuses[event].append(status)
        return status
