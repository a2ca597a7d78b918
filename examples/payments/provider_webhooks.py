"""The provider's webhooks: written in the transaction of the movement, delivered by a sender, and repeated on demand."""

from __future__ import annotations

import json
import sqlite3
import threading
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import oncemore
from oncemore.webhooks import Sender, Signing
from oncemore.webhooks.bodies import WebhookMessage

CUSTOMER = "customer"  # the only endpoint
SCHEDULE = (0, 0.2, 0.7, 1.7, 3.7, 8.7)  # seconds after the first attempt; a real provider tries for a day


class ProviderWebhooks:
    """Events and their deliveries.  The id of an event is the same in each delivery."""

    def __init__(self, url: str, secret: str, database: str) -> None:
        self.url = url
        self.signing = Signing(secret)
        self.webhooks = oncemore.Webhooks(
            oncemore.Guard(f"sqlite:///{database}"),
            allow=["127.0.0.0/8"],  # this example is on one machine; otherwise private addresses are refused
            allow_http=True,
            schedule=SCHEDULE,
            body=as_body,
        )
        self.events: dict[str, dict[str, Any]] = {}
        self.repeated: dict[str, list[tuple[int, Any]]] = {}  # the statuses and answers of repeated deliveries
        if url:
            self.webhooks.endpoints.create(url, id=CUSTOMER, secret=secret)
            self.webhooks.endpoints.update(CUSTOMER, url=url)  # the URL may have changed since the last start
            threading.Thread(target=Sender(self.webhooks).run, daemon=True).start()

    def send(self, connection: sqlite3.Connection, kind: str, data: dict[str, Any]) -> None:
        """Send an event, if the transaction on *connection* commits, until it is acknowledged."""
        id = self.webhooks.send(connection, kind, data)
        self.repeated[id] = []
        self.events[id] = {"type": kind, "data": data}

    def replay(self, event: str, times: int) -> list[int]:
        """Deliver an event again, *times* at the same moment, and return the statuses of the answers."""
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(self._repeat(event))) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def report(self) -> list[dict[str, Any]]:
        """Return all events, with the statuses of their deliveries and the answers to the accepted ones."""
        delivered: dict[str, list[tuple[int, Any]]] = {}
        for delivery in self.webhooks.deliveries.list(limit=10_000):
            attempts = self.webhooks.deliveries.attempts(delivery.id)
            delivered[delivery.message_id] = [(each.status or 0, each.response) for each in attempts]
        found = []
        for id, event in list(self.events.items()):
            all_ = delivered.get(id, []) + self.repeated[id]
            answers = [json.loads(answer) for status, answer in all_ if 200 <= status < 300]
            found.append({"id": id, "deliveries": [status for status, _ in all_], "answers": answers, **event})
        return found

    def _repeat(self, event: str) -> int:
        """Deliver the event again even if it was acknowledged.  Return the status, or 0 if there is no answer."""
        body = json.dumps(self.events[event]).encode()
        headers = {"content-type": "application/json", **self.signing.sign(body, id=event)}
        status, answer = 0, ""
        try:
            with urlopen(Request(self.url, body, headers), timeout=10) as response:
                status, answer = response.status, response.read().decode()
        except URLError as error:
            status = getattr(error, "code", 0)
        except OSError:
            status = 0
        self.repeated[event].append((status, answer))
        return status


def as_body(message: WebhookMessage) -> bytes:
    return json.dumps({"type": message.type, "data": message.data}).encode()
