"""Requests per second with the ASGI middleware, compared with the bare app and similar libraries: `python -m bench.web`.

Each figure is a ratio to the bare app, because machines are noisy.  Both servers run at the same time, and get load in
turns, for a fraction of a second each.  The median of the pairs counts.  `--quick` makes fewer
rounds, and `--plot FILE` draws the table.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.servers import PostgresServer, ValkeyServer

from .load import Round, fresh, load, look, repeated
from .plot import bars

HERE = Path(__file__).parent
PEERS = (
    "idemkit[redis]",
    "asgi-idempotency-header",
    "fastapi-idempotency",
    "idempotency-kit[redis]",
    "redis",
    "orjson",
)
SERVER = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools")


class Contender(NamedTuple):
    name: str
    module: str  # the name in web_apps.py
    store: str = ""
    ours: bool = True


class Row(NamedTuple):
    """The median ratios to the bare app, for new keys, replays and an unguarded GET; and figures for new keys."""

    name: str
    new: float
    replay: float
    get: float
    rate: float
    p99: float
    failed: int


Pair = tuple[Round, Round]  # a round of the bare app, then one of the contender


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--plot", type=Path, help="write the table as a plot (SVG)")
    options = parser.parse_args()
    pairs, seconds = (5, 0.3) if options.quick else (16, 0.4)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders = list(ours(stack, folder))
        python = None
        if not options.no_peers:
            python = peers_python()
            contenders += peers(stack)
        print(
            f"{'of the bare app’s requests per second':36}{'new keys':>9}{'replays':>9}{'GET':>7}{'new/s':>8}{'p99 ms':>8}"
        )
        rows = measure(contenders, python, pairs, seconds)
    if options.plot:
        options.plot.write_text(plot(rows))
        print(f"written to {options.plot}")


def ours(stack: ExitStack, folder: Path) -> Iterator[Contender]:
    postgres = stack.enter_context(PostgresServer())  # with synchronous_commit and fsync on
    valkey = stack.enter_context(ValkeyServer(fsync=False))
    yield Contender("oncemore, SQLite FULL", "oncemore", f"sqlite:///{folder / 'once.db'}")
    yield Contender("oncemore, PostgreSQL", "oncemore", postgres.url)
    yield Contender("oncemore, Valkey", "oncemore", valkey.url)


def peers(stack: ExitStack) -> Iterator[Contender]:
    valkey = stack.enter_context(ValkeyServer(fsync=False))
    yield Contender("idemkit, Valkey", "idemkit", valkey.url, ours=False)
    yield Contender("asgi-idempotency-header, Valkey", "asgi-idempotency-header", valkey.url, ours=False)
    yield Contender("fastapi-idempotency, memory", "fastapi-idempotency", ours=False)
    yield Contender("idempotency-kit, Valkey", "idempotency-kit", valkey.url, ours=False)


def peers_python() -> str:
    """Return the interpreter of an environment with the other libraries, and make it at first use."""
    folder = HERE.parent / ".venv-peers"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print("making an environment for the peers ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *SERVER, *PEERS], check=True)
        (folder / ".ready").touch()
    return str(python)


def measure(contenders: list[Contender], python: str | None, pairs: int, seconds: float) -> list[Row]:
    """Measure each contender and its own bare app: both run at the same time, and get load in many short turns."""
    rows = []
    for contender in contenders:
        interpreter = sys.executable if contender.ours or python is None else python
        bare = Contender("bare", "bare", ours=contender.ours)
        with server(bare, interpreter) as (bare_port, _), server(contender, interpreter) as (port, _):
            rows.append(row(contender.name, *beside(bare_port, port, pairs, seconds)))
        print(format_row(rows[-1]), flush=True)
    return rows


def beside(bare: int, port: int, pairs: int, seconds: float) -> Iterator[list[Pair]]:
    """Yield the pairs of rounds for each kind of request: new keys, replays, and an unguarded GET."""
    for request in (fresh(secrets.token_hex(4)), repeated, look):
        for warming in (bare, port):
            load(warming, request, seconds)
        yield [(load(bare, request, seconds), load(port, request, seconds)) for _ in range(pairs)]


@contextmanager
def server(contender: Contender, interpreter: str) -> Iterator[tuple[int, int]]:
    """Run uvicorn with uvloop, httptools and one worker; return its port and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [interpreter, "-m", "uvicorn", "web_apps:app", "--app-dir", str(HERE / "apps"), "--port", str(port)]
    command += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "critical"]
    environment = {**os.environ, "CONTENDER": contender.module, "STORE": contender.store}
    process = subprocess.Popen(command, env=environment)
    try:
        wait_for(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(10)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit("the server did not answer")


def row(name: str, new: list[Pair], replay: list[Pair], get: list[Pair]) -> Row:
    def ratio(pairs: list[Pair]) -> float:
        return statistics.median(ours.rate / bare.rate for bare, ours in pairs)

    rate, p99 = (statistics.median(getattr(ours, each) for _, ours in new) for each in ("rate", "p99"))
    failed = sum(ours.failures for _, ours in (*new, *replay, *get))
    return Row(name, ratio(new), ratio(replay), ratio(get), rate, p99, failed)


def format_row(each: Row) -> str:
    figures = f"{each.new:9.2f}{each.replay:9.2f}{each.get:7.2f}{each.rate:8.0f}{each.p99:8.1f}"
    return f"{each.name:36}{figures}" + (f"  ({each.failed} failures)" if each.failed else "")


def plot(rows: list[Row]) -> str:
    groups = [(each.name, [each.new, each.replay]) for each in rows]
    return bars("Requests per second, as a share of the bare app", ["new keys", "replays"], groups, mark=1.0)


if __name__ == "__main__":
    main()
