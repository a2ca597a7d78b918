"""Overhead of retrying while nothing fails, for functions and for requests over loopback: `python -m bench.retry`

It is compared with a hand-written loop, backoff, stamina and tenacity for functions, and with bare httpx and
httpx-retries for requests.  All take turns in small batches, and the figure is the first decile of the batches, because
other work on the machine has disturbed those least.  For requests there is also the median processor time of the client.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import backoff
import httpx
import httpx_retries
import stamina
import tenacity

from oncemore.client.function import retry
from oncemore.client.httpx import AsyncRetryTransport, RetryTransport
from oncemore.client.retry import Retry

BATCH, BATCHES = 500, 200
HTTP_BATCH, HTTP_BATCHES = 5, 400
BODY = b'{"amount": 1000}\n'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n" + b'{"id": "r1"}'


def undisturbed(times: list[float]) -> float:
    """Return the time of an undisturbed batch: the first decile."""
    return statistics.quantiles(times, n=10)[0]


def work(x: int) -> int:
    return x


def by_hand(x: int) -> int:
    for attempt in range(5):
        try:
            return work(x)
        except ConnectionError:
            time.sleep(0.1 * 2**attempt)
    raise ConnectionError


def functions() -> None:
    """Print microseconds per call."""
    pace = {"stop": tenacity.stop_after_attempt(5), "wait": tenacity.wait_random_exponential()}
    contestants: dict[str, Callable[[int], int]] = {
        "a loop by hand": by_hand,
        "oncemore.retry": retry(Retry())(work),
        "backoff": backoff.on_exception(backoff.expo, ConnectionError, max_tries=5)(work),
        "stamina": stamina.retry(on=ConnectionError, attempts=5)(work),
        "tenacity": tenacity.retry(**pace)(work),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(BATCHES):
        for name, call in contestants.items():
            begun = time.perf_counter()
            for _ in range(BATCH):
                call(1)
            times[name].append((time.perf_counter() - begun) / BATCH * 1e6)
    base = undisturbed(times["a loop by hand"])
    print(f"{'function, first try succeeds':<36}{'µs per call':>14}{'above the loop':>18}")
    for name, taken in times.items():
        print(f"{name:<36}{undisturbed(taken):>14.2f}{undisturbed(taken) - base:>18.2f}")


def serve(ports: multiprocessing.Queue[int]) -> None:
    """Run a server that sends the same answer to every request."""

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport
            self.head = b""

        def data_received(self, data: bytes) -> None:
            self.head += data
            head, ended, rest = self.head.partition(b"\r\n\r\n")
            if ended and len(rest) >= (len(BODY) if head.startswith(b"POST") else 0):
                self.head = b""
                self.transport.write(ANSWER)  # type: ignore[attr-defined]

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def requests(url: str) -> None:
    """Print requests per second of sync clients.  Clients of other libraries get a key by hand."""
    folder = tempfile.mkdtemp()
    contestants = {
        "bare httpx": httpx.HTTPTransport(),
        "oncemore": RetryTransport(Retry()),
        "httpx-retries": httpx_retries.RetryTransport(retry=httpx_retries.Retry(total=5)),
        "oncemore, keys on disk": RetryTransport(Retry(), f"sqlite:///{folder}/keys.db"),
    }
    clients = {name: httpx.Client(transport=transport, base_url=url) for name, transport in contestants.items()}

    def post(client: httpx.Client) -> None:
        ours = isinstance(client._transport, RetryTransport)
        client.post("/", content=BODY, headers=None if ours else {"Idempotency-Key": str(uuid.uuid4())})

    for title, call in {"GET": lambda client: client.get("/"), "POST": post}.items():
        turns = Turns(clients)
        for name in turns.measure_in_turns():
            for _ in range(HTTP_BATCH):
                call(clients[name])
        turns.report(f"{title}, sync client")


def async_requests(url: str) -> None:
    """Print requests per second of async clients."""

    async def post(client: httpx.AsyncClient) -> None:
        ours = isinstance(client._transport, AsyncRetryTransport)
        await client.post("/", content=BODY, headers=None if ours else {"Idempotency-Key": str(uuid.uuid4())})

    async def main() -> None:
        contestants = {"bare httpx": httpx.AsyncHTTPTransport, "oncemore": partial(AsyncRetryTransport, Retry())}
        clients = {name: httpx.AsyncClient(transport=make(), base_url=url) for name, make in contestants.items()}
        for title, call in {"GET": lambda client: client.get("/"), "POST": post}.items():
            turns = Turns(clients)
            for name in turns.measure_in_turns():
                for _ in range(HTTP_BATCH):
                    await call(clients[name])
            turns.report(f"{title}, async client")

    asyncio.run(main())


class Turns:
    """The time and the processor time of each contestant's batches."""

    def __init__(self, names: Iterable[str]) -> None:
        self.taken: dict[str, list[float]] = {name: [] for name in names}
        self.spent: dict[str, list[float]] = {name: [] for name in names}

    def order(self, number: int) -> list[str]:
        """Return the order of a round.  It changes, because a contestant that writes to the disk slows the next one."""
        names = list(self.taken)
        shift = number % len(names)
        names = names[shift:] + names[:shift]
        return names[::-1] if number // len(names) % 2 else names

    def measure_in_turns(self) -> Iterator[str]:
        """Yield the name for the next batch, and measure the time until the caller asks for the following one."""
        for number in range(HTTP_BATCHES):
            for name in self.order(number):
                begun, spent = time.perf_counter(), time.process_time()
                yield name
                self.spent[name].append(time.process_time() - spent)
                self.taken[name].append(time.perf_counter() - begun)

    def report(self, title: str) -> None:
        base, cost = undisturbed(self.taken["bare httpx"]), self.spent["bare httpx"]
        print(f"\n{title:<36}{'requests/s':>14}{'of bare httpx':>18}{'by its own time':>18}")
        for name, taken in self.taken.items():
            own = statistics.median(bare / its for bare, its in zip(cost, self.spent[name], strict=True))
            print(f"{name:<36}{HTTP_BATCH / undisturbed(taken):>14.0f}{base / undisturbed(taken):>17.2f}×{own:>17.2f}×")


def main() -> None:
    functions()
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=serve, args=(ports,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ports.get(timeout=30)}"
    try:
        requests(url)
        async_requests(url)
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
