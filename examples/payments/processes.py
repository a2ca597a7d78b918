"""The provider and the service as real processes, for the demo and the tests: they can be killed, and are gone at the end.

What they need of each other's addresses is known before either runs, so both have their ports first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Self

import httpx

from examples.process import Server, free_port
from oncemore.webhooks.signature import new_secret

ROOT = Path(__file__).parents[2]

# One for all: to make an SSL context takes longer than most of what is asked here, and nothing is asked over TLS.
http = httpx.Client(verify=False, timeout=30, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class Program(Server):
    """A module of this package in a process of its own, with its settings in the environment."""

    module = ""

    def __init__(self, port: int = 0, **settings: str) -> None:
        super().__init__()
        self.port = port or free_port()
        self.settings = settings

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arguments(self) -> list[str]:
        return []

    def command(self) -> list[str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        settings = [f"{name}={value}" for name, value in {"PYTHONPATH": path, **self.settings}.items()]
        return ["env", *settings, sys.executable, "-m", self.module, "--port", str(self.port), *self.arguments()]

    def is_ready(self) -> bool:
        try:
            return bool(http.get(f"{self.url}/health").json()["pid"] == self.pid)
        except (httpx.HTTPError, ValueError, KeyError):  # nobody is there, or somebody else
            return False

    def get(self, path: str) -> Any:
        return http.get(self.url + path).raise_for_status().json()


class Provider(Program):
    module = "examples.payments.provider"

    def __init__(self, webhooks: str) -> None:
        super().__init__()
        self.webhooks = webhooks

    def arguments(self) -> list[str]:
        return ["--database", str(self.folder / "provider.db"), "--webhooks", self.webhooks]

    def order(self, *quirks: dict[str, float]) -> None:
        """What it shall get wrong, in its next requests."""
        http.post(f"{self.url}/admin/quirks", json={"next": quirks}).raise_for_status()

    def replay(self, event: str, times: int) -> list[int]:
        """Have an event delivered again, *times* at once; the statuses it was answered with."""
        told = http.post(f"{self.url}/admin/replay", json={"event": event, "times": times})
        answers: list[int] = told.raise_for_status().json()["deliveries"]
        return answers


class Service(Program):
    module = "examples.payments"


class World:
    """A provider and a service that know each other, and what callers ask of them."""

    def __init__(self, *, port: int = 0, database: str = "", **settings: str) -> None:
        port = port or free_port()
        self.provider = Provider(f"http://127.0.0.1:{port}/webhooks/provider")
        database = database or "sqlite:///payments.db"  # in the service's own folder, which goes with it
        settings = {"PAYMENTS_DATABASE": database, "PAYMENTS_PROVIDER": self.provider.url, **settings}
        self.service = Service(port, **settings)

    def start(self) -> Self:
        """Both processes, up and answering."""
        try:
            self.provider.settings["PAYMENTS_WEBHOOK_SECRET"] = self.service.settings.setdefault(
                "PAYMENTS_WEBHOOK_SECRET", new_secret()
            )
            self.provider.start()
            self.service.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.service.stop()
        self.provider.stop()

    # What callers do

    def post(self, path: str, key: str | None, body: Any = None, **headers: str) -> httpx.Response:
        """The answer to one request under *key*."""
        named = {"Authorization": "Bearer demo", **({} if key is None else {"Idempotency-Key": key}), **headers}
        return http.post(self.service.url + path, json=body, headers=named)

    def get(self, path: str) -> httpx.Response:
        return http.get(self.service.url + path)

    def captured(self, order: str, amount: int = 10_000) -> str:
        """A captured payment to refund from; its charge's id."""
        body = {"order_id": order, "customer_id": "cus_1", "amount": amount}
        payment = self.post("/payments", f"{order}:pay", body).raise_for_status().json()
        done = self.post(f"/payments/{payment['id']}/capture", f"{order}:capture").raise_for_status().json()
        charge: str = done["charge_id"]
        return charge

    # What is true

    def payouts(self) -> int:
        """How often the provider has given money back."""
        count: int = self.provider.get("/admin/charges?kind=payout")["count"]
        return count

    def calls(self) -> list[dict[str, Any]]:
        """Every time that the provider was asked to give money back, whatever came of it."""
        calls: list[dict[str, Any]] = self.provider.get("/admin/charges?kind=payout")["calls"]
        return calls

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.service.get("/ledger")["entries"] if entry["kind"] == kind]
