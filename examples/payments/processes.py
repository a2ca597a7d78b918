"""The provider and the service in processes of their own, which the demo and the tests can kill.

Each needs the other's address, so both ports are chosen before either starts.
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

# One client for all, without TLS, because to create an SSL context takes longer than most requests here.
http = httpx.Client(verify=False, timeout=30, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class Program(Server):
    """A module of this package, run in a process of its own with its settings in the environment."""

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
        except (httpx.HTTPError, ValueError, KeyError):  # nothing answers, or another process
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
        """Choose the faults of its next requests, one for each."""
        http.post(f"{self.url}/admin/quirks", json={"next": quirks}).raise_for_status()

    def replay(self, event: str, times: int) -> list[int]:
        """Deliver an event again, *times* at the same moment, and return the statuses of the answers."""
        response = http.post(f"{self.url}/admin/replay", json={"event": event, "times": times})
        answers: list[int] = response.raise_for_status().json()["deliveries"]
        return answers


class Service(Program):
    module = "examples.payments"


class PaymentSystem:
    """A provider and a service, connected to each other, with the requests of callers."""

    def __init__(self, *, port: int = 0, database: str = "", **settings: str) -> None:
        port = port or free_port()
        self.provider = Provider(f"http://127.0.0.1:{port}/webhooks/provider")
        database = database or "sqlite:///payments.db"  # in the service's own folder, which is removed with it
        settings = {"PAYMENTS_DATABASE": database, "PAYMENTS_PROVIDER": self.provider.url, **settings}
        self.service = Service(port, **settings)

    def start(self) -> Self:
        """Start both processes, and wait until they answer."""
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

    # Requests

    def post(self, path: str, key: str | None, body: Any = None, **headers: str) -> httpx.Response:
        """Send a request with *key*, and return the answer."""
        named = {"Authorization": "Bearer demo", **({} if key is None else {"Idempotency-Key": key}), **headers}
        return http.post(self.service.url + path, json=body, headers=named)

    def get(self, path: str) -> httpx.Response:
        return http.get(self.service.url + path)

    def captured(self, order: str, amount: int = 10_000) -> str:
        """Create and capture a payment, and return the id of its charge."""
        body = {"order_id": order, "customer_id": "cus_1", "amount": amount}
        payment = self.post("/payments", f"{order}:pay", body).raise_for_status().json()
        done = self.post(f"/payments/{payment['id']}/capture", f"{order}:capture").raise_for_status().json()
        charge: str = done["charge_id"]
        return charge

    # Effects

    def payouts(self) -> int:
        """Return how many payouts the provider has made."""
        count: int = self.provider.get("/admin/charges?kind=payout")["count"]
        return count

    def calls(self) -> list[dict[str, Any]]:
        """Return all payout requests that the provider got, with or without effect."""
        calls: list[dict[str, Any]] = self.provider.get("/admin/charges?kind=payout")["calls"]
        return calls

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.service.get("/ledger")["entries"] if entry["kind"] == kind]
