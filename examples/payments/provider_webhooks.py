"""The provider's webhooks: signed events, sent until they are acknowledged, and again on demand."""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from oncemore.webhooks.signature import Signing

PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds before each attempt; a real provider tries for a day


class Webhooks:
    """Events and their deliveries.  The id of an event is the same in each delivery."""

    def __init__(self, url: str, secret: str) -> None:
        self.url = url
        self.signing = Signing(secret)
        self.events: dict[str, bytes] = {}
        self.statuses: dict[str, list[int]] = {}
        self.answers: dict[str, list[Any]] = {}

    def send(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event in the background, until it is acknowledged."""
        event = f"ev_{secrets.token_hex(6)}"
        self.statuses[event], self.answers[event] = [], []
        self.events[event] = json.dumps({"type": kind, "data": data}).encode()
        if self.url:
            threading.Thread(target=self._deliver, args=(event,), daemon=True).start()

    def replay(self, event: str, times: int) -> list[int]:
        """Deliver an event again, *times* at the same moment, and return the statuses of the answers."""
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(self._send_once(event))) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def report(self) -> list[dict[str, Any]]:
        """Return all events, with the statuses of their deliveries and the answers to the accepted ones."""
        events = list(self.events.items())
        return [
            {"id": id, "deliveries": self.statuses[id], "answers": self.answers[id], **json.loads(body)}
            for id, body in events
        ]

    def _deliver(self, event: str) -> None:
        for pause in PAUSES:
            time.sleep(pause)
            if 200 <= self._send_once(event) < 300:
                return

    def _send_once(self, event: str) -> int:
        """Deliver the event once, and return the status of the answer, 0 if there is none."""
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
